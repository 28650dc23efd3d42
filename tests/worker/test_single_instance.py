"""Single-instance tasks on a real prefork worker, with locks, broker and results in Redis."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import CeleryWorker
from tests.worker import tasks
from tests.worker.conftest import StartWorker
from tests.worker.rooms import Room

#: Seconds until a result must be there; far less than LOCK_TIMEOUT (30 s), so that
#: what waits for a lease to end is too late.
SOON = 12


@pytest.fixture(scope="module", autouse=True)
def worker(start_worker: StartWorker) -> Iterator[CeleryWorker]:
    """One worker for the module."""
    with start_worker("django-redis", concurrency=3) as worker:
        yield worker


def begin(task: Any, room: Room) -> Any:
    """Send the task and wait until it is inside the room."""
    first = task.delay(room.path)
    room.until(lambda: room.runs(first.id), "the first did not start")
    (run,) = room.runs(first.id)
    assert len(run["locks"]) == 1
    assert run["locks"][0].startswith(f"{task.name}:")
    return first


def test_a_skipped_duplicate_returns_none_at_once(room: Room) -> None:
    """While one runs, another with the same key ends with None; the next one runs."""
    first = begin(tasks.skipping, room)
    assert tasks.skipping.delay(room.path).get(timeout=SOON) is None
    assert len(room.runs()) == 1
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    third = tasks.skipping.delay(room.path)
    assert third.get(timeout=SOON) == [third.id, 0]
    assert room.gauge.violations() == []


def test_a_retried_duplicate_runs_afterwards(room: Room) -> None:
    """It comes back, with its id and without a retry of its own, until the first has ended."""
    first = begin(tasks.returning, room)
    second = tasks.returning.delay(room.path)
    room.until(lambda: room.tries(second.id) > 2, "the second did not come back")
    assert second.state == "RETRY"
    assert room.runs(second.id) == []
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    # max_retries is 0: a counted retry would have failed.
    assert second.get(timeout=SOON) == [second.id, 0]
    assert room.gauge.violations() == []


def test_with_a_limit_as_many_run_and_the_next_comes_back(room: Room) -> None:
    """The third runs when a place is free: that of a killed run is at once."""
    first, second = begin(tasks.two_at_once, room), tasks.two_at_once.delay(room.path)
    room.until(lambda: room.runs(second.id), "the second did not start")
    third = tasks.two_at_once.delay(room.path)
    room.until(lambda: room.tries(third.id) > 2, "the third did not come back")
    assert room.runs(third.id) == []
    os.kill(room.runs(first.id)[0]["pid"], signal.SIGKILL)
    room.until(lambda: room.runs(third.id), "the place of the killed run is not free", SOON)
    room.open()
    for result in (second, third):
        assert result.get(timeout=SOON) == [result.id, 0]
    assert room.gauge.highest() == 2


def test_with_a_limit_one_message_does_not_run_beside_itself(room: Room) -> None:
    """Delivered again while it runs, it comes back, though a place is free."""
    first = begin(tasks.two_at_once, room)
    tasks.two_at_once.apply_async((room.path,), task_id=first.id)
    room.until(lambda: room.tries(first.id) >= 2, "it was not delivered again")
    second = tasks.two_at_once.delay(room.path)
    room.until(lambda: room.runs(second.id), "the other place is not free")
    assert len(room.runs(first.id)) == 1
    room.open()
    assert second.get(timeout=SOON) == [second.id, 0]
    room.until(lambda: len(room.runs(first.id)) == 2, "the other delivery was lost", SOON)
