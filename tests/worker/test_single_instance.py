"""Single-instance tasks on a real prefork worker, with locks, broker and results in Redis."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import app_on_redis
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.worker import tasks
from tests.worker.rooms import Room

#: Seconds until a result must be there; far less than LOCK_TIMEOUT (30 s), so that
#: what waits for a lease to end is too late.
SOON = 12


@pytest.fixture(scope="module", autouse=True)
def worker(redis_server: RedisServer) -> Iterator[None]:
    """One worker for the module."""
    with app_on_redis(redis_server), CeleryWorker("tests.app", concurrency=3):
        yield


def test_with_a_limit_as_many_run_and_the_next_comes_back(room: Room) -> None:
    """The third runs when a place is free: that of a killed run is at once."""
    first, second = (tasks.two_at_once.delay(room.path) for _ in range(2))
    room.until(lambda: len(room.runs()) == 2, "the two did not start")
    third = tasks.two_at_once.delay(room.path)
    room.until(lambda: room.tries(third.id) > 2, "the third did not come back")
    assert room.runs(third.id) == []
    os.kill(room.runs(first.id)[0]["pid"], signal.SIGKILL)
    room.until(lambda: room.runs(third.id), "the place of the killed run is not free", SOON)
    room.open()
    for result in (second, third):
        assert result.get(timeout=SOON) == [result.id, 0]
    assert room.gauge.highest() == 2
