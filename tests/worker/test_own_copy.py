"""
A message that meets the lock of its own task id, with a visibility timeout of 3 s.

Redis gives a message out again that was not acknowledged for that long, while its
task may still run. ``test_copies`` has the stories in which more happens.
"""

import json
import threading
from collections import Counter

import pytest

from tests.conftest import LOOKING_OFTEN, app_on_redis
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.versions import needs_quick_redelivery
from tests.worker import tasks
from tests.worker.rooms import Room

pytestmark = [needs_quick_redelivery, pytest.mark.long]

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


def test_a_live_holder(redis_server: RedisServer, room: Room) -> None:
    """Delivered again and again while it runs, a task never runs twice at once nor for ever."""
    options = {"visibility_timeout": VISIBILITY_TIMEOUT, **LOOKING_OFTEN}
    with (
        app_on_redis(redis_server, "django", **options),
        CeleryWorker("tests.app"),
        Broker(redis_server) as broker,
    ):
        result = tasks.redelivered.delay(room.path)
        # The first, its redelivery, and then one copy after the other.
        room.until(lambda: room.tries(result.id) >= 5, "it was not delivered again", PATIENCE)
        assert len(room.runs()) == 1
        room.open()
        assert result.get(timeout=PATIENCE) == [result.id, 0]
        room.until(lambda: not broker.count()[result.id], "messages are left over", PATIENCE)
    # At least once: the copy on its way may have run as well.
    assert room.gauge.violations() == []
