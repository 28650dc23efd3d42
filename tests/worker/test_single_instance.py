"""Single-instance tasks on a real prefork worker, with locks, broker and results in Redis."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, group
from celery.exceptions import Reject

from django_celery_safe import AlreadyRunning, LockBackendError, SafeTask, find_lock
from tests.app.celery import app
from tests.app.tasks import add
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


def test_a_chain_and_a_group_go_on_behind_a_skipped_duplicate(room: Room) -> None:
    """The links of a duplicate are not lost."""
    begin(tasks.skipping, room)
    linked = chain(tasks.skipping.si(room.path), add.si(1, 2)).delay()
    joined = group(tasks.skipping.si(room.path), add.si(3, 4)).delay()
    assert linked.get(timeout=SOON) == 3
    assert joined.get(timeout=SOON) == [None, 7]
    room.open()


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


def test_a_rejected_duplicate_fails(room: Room) -> None:
    """Celery's Reject: its own run goes on, and the duplicate's result is a failure."""
    first = begin(tasks.rejecting, room)
    second = tasks.rejecting.delay(room.path)
    with pytest.raises(Reject, match=f"is held by task {first.id}"):
        second.get(timeout=SOON)
    assert second.state == "FAILURE"
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert len(room.runs()) == 1


def test_a_raising_duplicate_names_the_task_that_runs(room: Room) -> None:
    """The caller gets AlreadyRunning with the id of the run that goes on."""
    first = begin(tasks.raising, room)
    with pytest.raises(AlreadyRunning) as raised:
        tasks.raising.delay(room.path).get(timeout=SOON)
    assert raised.value.task_id == first.id
    assert raised.value.name == room.runs()[0]["locks"][0]
    room.open()
    first.get(timeout=SOON)


@pytest.mark.parametrize(
    ("task", "state"),
    [(tasks.skipping_autoretry, "SUCCESS"), (tasks.rejecting_autoretry, "FAILURE")],
)
def test_autoretry_leaves_a_duplicate_alone(task: Any, state: str, room: Room) -> None:
    """With autoretry_for=(Exception,) a skipped or rejected duplicate is taken up once only."""
    begin(task, room)
    duplicates = [task.delay(room.path) for _ in range(2)]
    for duplicate in duplicates:
        duplicate.get(timeout=SOON, propagate=False)
        assert duplicate.state == state
    room.open()
    assert [room.tries(duplicate.id) for duplicate in duplicates] == [1, 1]
    assert len(room.runs()) == 1


def test_a_plain_task_sent_by_name_is_guarded(room: Room) -> None:
    """Without our base class and our header, as from beat elsewhere, the lock is taken too."""
    first = begin(tasks.plain, room)
    assert not issubclass(type(tasks.plain), SafeTask)
    by_keyword = app.send_task(tasks.plain.name, kwargs={"room": room.path})
    assert by_keyword.get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]


def test_its_own_retry_is_not_skipped(room: Room) -> None:
    """A retry without delay runs soon, though it may overtake the end of the run that sent it."""
    result = tasks.repeating.delay(room.path)
    assert result.get(timeout=SOON) == 2
    assert [run["retries"] for run in room.runs()] == [0, 1, 2]
    assert room.gauge.violations() == []


def test_the_lock_is_free_when_the_task_has_ended(tmp_path: Any) -> None:
    """Exception, Ignore, Reject, Retry and the soft time limit free the lock at once."""
    ways = ["exception", "ignore", "reject", "retry", "soft time limit"]
    rooms = {}
    for way in ways:
        rooms[way] = room = Room(tmp_path / way)
        room.folder.mkdir()
        limit = 3 if way == "soft time limit" else None
        tasks.ending.apply_async((room.path, way), soft_time_limit=limit)
    for way, room in rooms.items():
        (run,) = room.until(room.runs, f"the task that ends by {way} did not start")
        assert run["locks"] == [f"{tasks.ending.name}:{room.path}"]
    for way, room in rooms.items():
        name = f"{tasks.ending.name}:{room.path}"
        room.until(lambda name=name: find_lock(name) is None, f"{way} left the lock behind", SOON)


def test_a_task_may_call_itself(room: Room) -> None:
    """In its own message a direct call takes the lock of its own key, or skips."""
    result = tasks.crawling.delay(room.path, 2)
    ground = [0, "the ground", None]
    assert result.get(timeout=SOON) == [2, [1, ground, None], None]
    assert room.tries(result.id) == 1


def test_a_killed_child_leaves_its_task_to_come_back(room: Room) -> None:
    """The message of a SIGKILLed child is not skipped; it runs again after its lease of 2 s."""
    first = begin(tasks.surviving, room)
    (run,) = room.runs()
    os.kill(run["pid"], signal.SIGKILL)
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert len(room.runs(first.id)) == 2
    assert room.gauge.violations() == []
    assert find_lock(f"{tasks.surviving.name}:copy:{first.id}:0.0") is None


def test_without_the_cache_the_task_does_not_run(room: Room) -> None:
    """Whether the lock is free is not known: LockBackendError reaches the caller."""
    room.open()
    with pytest.raises(LockBackendError, match="did not answer to acquire"):
        tasks.without_cache.delay(room.path).get(timeout=SOON)
    assert room.runs() == []
