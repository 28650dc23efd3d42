"""
A message that meets the lock of its own task id, with a visibility timeout of 3 s.

Redis gives a message out again that was not acknowledged for that long, while its
task may still run. The messages of each id are counted at the broker all the time.
"""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LOOKING_OFTEN
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.versions import needs_quick_redelivery
from tests.worker import tasks
from tests.worker.conftest import StartWorker
from tests.worker.rooms import Room

pytestmark = needs_quick_redelivery

VISIBILITY_TIMEOUT = 3
#: Seconds for what has to come; the lease is 6 s.
PATIENCE = 40


class Broker:
    """Counts, for each task id, the messages that the broker has: waiting and given out."""

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client(db=1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.highest: Counter[str] = Counter()
        self.samples = 0

    def count(self) -> Counter[str]:
        """Return how many messages there are now, at one moment."""
        with self._client.pipeline(transaction=True) as moment:
            waiting, given_out = moment.lrange("celery", 0, -1).hvals("unacked").execute()
        messages = [json.loads(text) for text in waiting]
        messages += [json.loads(text)[0] for text in given_out]
        return Counter(message["headers"]["id"] for message in messages)

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.highest |= self.count()
            self.samples += 1

    def __enter__(self) -> "Broker":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()


class Delivery:
    """A task that was sent into a room of its own."""

    def __init__(self, task: Any, folder: Path) -> None:
        folder.mkdir()
        self.room = Room(folder)
        self.result = task.delay(self.room.path)
        self.id: str = self.result.id


@pytest.fixture(scope="module")
def worker(start_worker: StartWorker) -> Iterator[CeleryWorker]:
    """A worker whose broker looks for unacknowledged messages twice a second."""
    with start_worker(
        "django",
        concurrency=4,
        visibility_timeout=VISIBILITY_TIMEOUT,
        **LOOKING_OFTEN,
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def broker(worker: CeleryWorker, redis_server: RedisServer) -> Iterator[Broker]:
    """The broker, watched from before the first send."""
    with Broker(redis_server) as broker:
        yield broker


@pytest.fixture(scope="module")
def live(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Delivery:
    """A task that runs for several times the visibility timeout."""
    return Delivery(tasks.redelivered, tmp_path_factory.mktemp("live") / "room")


@pytest.fixture(scope="module")
def dead(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Delivery:
    """A task whose process is killed while it runs."""
    delivery = Delivery(tasks.redelivered, tmp_path_factory.mktemp("dead") / "room")
    delivery.room.until(delivery.room.runs, "the task did not start")
    os.kill(delivery.room.runs()[0]["pid"], signal.SIGKILL)
    delivery.room.open()
    return delivery


@pytest.fixture(scope="module")
def late(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Delivery, Any]:
    """A task, and a second one that is to come back after more than the visibility timeout."""
    delivery = Delivery(tasks.returning_late, tmp_path_factory.mktemp("late") / "room")
    delivery.room.until(delivery.room.runs, "the task did not start")
    return delivery, tasks.returning_late.delay(delivery.room.path)


@pytest.fixture(autouse=True)
def _all_at_once(live: Delivery, dead: Delivery, late: tuple[Delivery, Any]) -> None:
    """Let the three stories happen at the same time, whichever test comes first."""


@pytest.mark.quarantine("2026-11-26", "over 100 samples; counts of 1 or 2")
def test_a_live_holder(live: Delivery, broker: Broker) -> None:
    """Delivered again and again while it runs, a task never runs twice at once nor multiplies."""
    room = live.room
    # The first, its redelivery, and then one copy after the other.
    room.until(lambda: room.tries(live.id) >= 5, "it was not delivered again", PATIENCE)
    assert len(room.runs()) == 1
    assert broker.count()[live.id] in {1, 2}
    room.open()
    assert live.result.get(timeout=PATIENCE) == [live.id, 0]
    room.until(lambda: not broker.count()[live.id], "messages are left over", PATIENCE)
    # At least once: the copy on its way ran as well, or was another's.
    assert 1 <= len(room.runs()) <= 2
    assert room.gauge.violations() == []
    assert broker.highest[live.id] <= 2
    assert broker.samples > 100


def test_a_dead_holder(dead: Delivery, broker: Broker) -> None:
    """The task of a killed process is not skipped: it runs again when the lease is over."""
    room = dead.room
    assert dead.result.get(timeout=PATIENCE) == [dead.id, 0]
    first, second = room.runs()[:2]
    waited = (second["at_ns"] - first["at_ns"]) / 1e9
    # It was killed at its start, so the lease had 6 s to go.
    assert 5 < waited < PATIENCE
    room.until(lambda: not broker.count()[dead.id], "messages are left over", PATIENCE)
    assert room.gauge.violations() == []
    # The killed run, the last one, and what met the dead lock in between: how often that was
    # depends on when the worker notices the death.
    assert room.tries(dead.id) >= 3
    assert broker.highest[dead.id] <= 2


@pytest.mark.long
def test_a_conflict_that_comes_back_late(late: tuple[Delivery, Any], broker: Broker) -> None:
    """A retry_delay beyond the visibility timeout does not multiply the duplicate."""
    first, second = late
    room = first.room
    room.until(lambda: room.tries(second.id) > 3, "the second did not come back", PATIENCE)
    assert room.runs(second.id) == []
    room.open()
    assert second.get(timeout=PATIENCE) == [second.id, 0]
    room.until(lambda: not broker.count()[second.id], "messages are left over", PATIENCE)
    assert len(room.runs(second.id)) == 1
    assert room.gauge.violations() == []
    assert broker.highest[second.id] <= 2


def test_the_log_tells_of_copies(live: Delivery, worker: CeleryWorker) -> None:
    """A record at INFO says whose lock it was and that a copy comes back."""
    said = f"{tasks.redelivered.name}[{live.id}] was delivered while "
    live.room.until(lambda: said in worker.log, "no copy was told of", PATIENCE)
