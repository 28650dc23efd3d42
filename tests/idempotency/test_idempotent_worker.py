"""
Idempotent tasks on a real worker, with a visibility timeout of 3 s and a lease of 6 s.

All stories happen at the same time, whichever test comes first. The messages of each
id are counted at the broker all the time.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from django_celery_safe.conf import DEFAULTS
from django_celery_safe.models import DatabaseLock, IdempotencyRecord
from tests.app.celery import app
from tests.app.models import Person
from tests.conftest import LOOKING_OFTEN, MakeDatabase, app_on_redis
from tests.idempotency import tasks
from tests.processes import CeleryWorker
from tests.sending.conftest import connections_of_this_module
from tests.servers import RedisServer
from tests.versions import needs_quick_redelivery
from tests.worker.rooms import Room
from tests.worker.test_own_copy import PATIENCE, VISIBILITY_TIMEOUT, Broker

__all__ = ["connections_of_this_module"]

LOCK_TIMEOUT = DEFAULTS["LOCK_TIMEOUT"]

if TYPE_CHECKING:
    pass


class Delivery:
    """A task that was sent into a room of its own, once or more."""

    def __init__(self, task: Any, folder: Path) -> None:
        folder.mkdir()
        self.room = Room(folder)
        self.task = task
        self.id = self.send()

    def send(self) -> str:
        """Send it, as a message of its own; return that one's id."""
        # Not the result: the last test keeps its fixtures until the servers are gone.
        return str(self.task.delay(self.room.path).id)

    def until_it_runs(self) -> int:
        """Wait until it runs; return the id of its process."""
        self.room.until(self.room.runs, "the task did not start")
        return int(self.room.runs()[0]["pid"])


def killed(task: Any, folder: Path) -> Delivery:
    """Return the delivery of a task whose process was killed, and whose room is open since."""
    delivery = Delivery(task, folder)
    os.kill(delivery.until_it_runs(), signal.SIGKILL)
    delivery.room.open()
    return delivery


def result_of(task_id: str) -> Any:
    """Wait for the end of a task and return its result."""
    return app.AsyncResult(task_id).get(timeout=PATIENCE)


@pytest.fixture(scope="module")
def shop(make_module_database: MakeDatabase) -> str:
    """The alias, here, of what is the worker's default database."""
    return make_module_database("postgres")


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer, shop: str) -> Iterator[CeleryWorker]:
    """A worker whose broker looks for unacknowledged messages twice a second."""
    database = connections.settings[shop]
    kept = {name: database[name] for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")}
    with (
        app_on_redis(
            redis_server, "django", visibility_timeout=VISIBILITY_TIMEOUT, **LOOKING_OFTEN
        ),
        CeleryWorker(
            "tests.idempotency.worker_app",
            concurrency=6,
            settings={"DATABASES": {"default": kept}},
        ) as worker,
    ):
        yield worker


@pytest.fixture(scope="module")
def broker(worker: CeleryWorker, redis_server: RedisServer) -> Iterator[Broker]:
    """The broker, watched from before the first send."""
    with Broker(redis_server) as broker:
        yield broker


@pytest.fixture(scope="module")
def live(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Delivery, str]:
    """A task that runs for several times the visibility timeout, and was sent once more."""
    delivery = Delivery(tasks.staying, tmp_path_factory.mktemp("live") / "room")
    delivery.until_it_runs()
    return delivery, delivery.send()


@pytest.fixture(scope="module")
def dead(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Delivery:
    """A task whose process is killed while it runs."""
    return killed(tasks.staying, tmp_path_factory.mktemp("dead") / "room")


@pytest.fixture(scope="module")
def open_end(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Delivery:
    """A task that is killed between finish() and the commit of its transaction."""
    return killed(tasks.writing, tmp_path_factory.mktemp("open_end") / "room")


@pytest.fixture(autouse=True)
def _all_at_once(live: object, dead: object, open_end: object) -> None:
    """Let the stories happen at the same time, whichever test comes first."""


@needs_quick_redelivery
def test_a_live_holder(live: tuple[Delivery, str], broker: Broker, shop: str) -> None:
    """Delivered again and again while it runs, it is done once, and all get its result."""
    delivery, second = live
    room = delivery.room
    for task_id in (delivery.id, second):
        room.until(lambda: room.tries(task_id) >= 4, "it was not delivered again", PATIENCE)  # noqa: B023
        assert broker.count()[task_id] in {1, 2}
    assert len(room.runs()) == 1
    room.open()
    for task_id in (delivery.id, second):
        assert result_of(task_id) == [delivery.id, 0]
        room.until(lambda: not broker.count()[task_id], "messages are left over", PATIENCE)  # noqa: B023
        assert broker.highest[task_id] <= 2
    assert len(room.runs()) == 1
    assert broker.samples > 100
    # One that comes much later, too.
    assert result_of(delivery.send()) == [delivery.id, 0]
    notes = DatabaseLock.objects.using(shop)
    room.until(lambda: not notes.filter(key__contains=delivery.id).exists(), "notes are left over")


def test_a_dead_holder(dead: Delivery, broker: Broker) -> None:
    """A redelivery does the work of a killed process when its lease is over."""
    room = dead.room
    assert result_of(dead.id) == [dead.id, 0]
    first, second = room.runs()
    waited = (second["at_ns"] - first["at_ns"]) / 1e9
    # It was killed at its start, so the lease had nearly all to go.
    assert waited > tasks.LEASE / 2
    room.until(lambda: not broker.count()[dead.id], "messages are left over", PATIENCE)
    assert room.gauge.violations() == []
    assert broker.highest[dead.id] <= 2


def test_a_holder_killed_before_its_commit(open_end: Delivery, broker: Broker, shop: str) -> None:
    """Rows that were written and finished in one transaction are there once."""
    room = open_end.room
    assert result_of(open_end.id) in ([open_end.id, 0], "written")
    room.until(lambda: not broker.count()[open_end.id], "messages are left over", PATIENCE)
    assert len(room.runs()) == 2
    assert Person.everyone.using(shop).filter(email="written@example.org").count() == 1
    assert result_of(open_end.send()) == "written"


@pytest.mark.parametrize("task", [tasks.repeating, tasks.reconnecting], ids=lambda task: task.name)
def test_a_retry_comes_back_and_does_it(
    task: Any, broker: Broker, shop: str, tmp_path: Path
) -> None:
    """Neither self.retry nor autoretry waits for the lease of the run that sent it."""
    delivery = Delivery(task, tmp_path / "room")
    assert result_of(delivery.id) == 2
    runs = delivery.room.runs()
    assert [run["retries"] for run in runs] == [0, 1, 2]
    # Each of the two would have waited for a lease.
    assert (runs[-1]["at_ns"] - runs[0]["at_ns"]) / 1e9 < LOCK_TIMEOUT
    assert result_of(delivery.send()) == 2
    assert len(delivery.room.runs()) == 3
    records = IdempotencyRecord.objects.using(shop)
    record = records.get(holder__contains=delivery.id)
    assert (record.state, record.claims) == ("done", 3)
