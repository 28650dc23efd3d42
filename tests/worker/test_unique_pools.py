"""
The lock of a message from its send to the end of its run, in each pool of Celery.

One worker of each kind serves all tests, each with a queue of its own, and a test has
all of them do the same at the same time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import shared_task
from celery.exceptions import Ignore, Reject

from django_celery_safe import HeldLock, SafeTask, find_lock, single_instance
from tests.conftest import app_on_redis
from tests.processes import wait_for
from tests.servers import RedisServer
from tests.worker.pools import POOLS, workers_of_all_pools
from tests.worker.rooms import Room

pytestmark = pytest.mark.long

#: Seconds until a result must be there; far less than any lease, so that what waits for
#: a lease to end is too late.
SOON = 15

#: Ways in which a task can end without a result, and after how many runs.
ENDINGS = {"exception": 1, "ignore": 1, "reject": 1, "one retry too many": 3, "autoretry": 3}


def make_task(until: str) -> Any:
    """Return a task that is sent once for each room until it starts, or ends."""

    @shared_task(
        base=SafeTask,
        bind=True,
        name=f"tests.unique_until_{until}",
        autoretry_for=(ConnectionError,),
        default_retry_delay=0,
        max_retries=2,
    )
    @single_instance(key="{room}", unique_until=until, on_conflict="retry", retry_delay=0.2)
    def unique(self: Any, room: str, how: str = "stay") -> Any:
        here = Room(Path(room))
        match how:
            case "stay":
                return here.stay(self)
            case "retry" if self.request.retries == 0:
                here.note("retries", self)
                raise self.retry(countdown=1)
            case "retry":
                return here.stay(self)
        with here.entered(self):
            match how:
                case "exception":
                    raise KeyError(how)
                case "ignore":
                    raise Ignore(how)
                case "reject":
                    raise Reject(how, requeue=False)
                case "one retry too many":
                    raise self.retry()
                case "autoretry":
                    raise ConnectionError(how)

    return unique


TASKS = {until: make_task(until) for until in ("start", "end")}


@pytest.fixture(scope="module", autouse=True)
def workers(redis_server: RedisServer) -> Iterator[None]:
    """A worker of each pool."""
    with app_on_redis(redis_server), workers_of_all_pools(__name__):
        yield


@pytest.fixture(params=TASKS)
def until(request: pytest.FixtureRequest) -> str:
    """Until when the same is not sent again."""
    return str(request.param)


def send_to_all(
    task: Any, rooms: dict[str, Room], how: str = "stay", **options: Any
) -> dict[str, Any]:
    """Send the task to the worker of each pool, for the room of that pool."""
    return {
        pool: task.apply_async((room.path, how), queue=pool, **options)
        for pool, room in rooms.items()
    }


def locks_of(task: Any, rooms: dict[str, Room]) -> dict[str, HeldLock | None]:
    """Return the lock of the message for each room."""
    return {pool: find_lock(f"sent:{task.name}:{room.path}") for pool, room in rooms.items()}


def senders(task: Any, rooms: dict[str, Room]) -> dict[str, str | None]:
    """Return the id of the task that keeps others from being sent, by pool; "" for nobody."""
    locks = locks_of(task, rooms)
    return {pool: lock.holder.task_id if lock else "" for pool, lock in locks.items()}


def ids(results: dict[str, Any]) -> dict[str, str]:
    """Return the ids of results."""
    return {pool: result.id for pool, result in results.items()}


def duplicates(results: dict[str, Any]) -> set[bool]:
    """Return what all of the results say of themselves."""
    return {result.is_duplicate for result in results.values()}


def values(results: dict[str, Any]) -> dict[str, Any]:
    """Wait for what all tasks return."""
    return {pool: result.get(timeout=SOON) for pool, result in results.items()}


def until_all(rooms: dict[str, Room], condition: Callable[[str, Room], Any]) -> None:
    """Wait until something is true of each room."""
    for pool, room in rooms.items():
        room.until(lambda: condition(pool, room), f"{pool} does not", SOON)  # noqa: B023


NOBODY = dict.fromkeys(POOLS, "")


def test_the_same_is_sent_again_when_the_run_starts_or_ends(
    until: str, rooms: dict[str, Room]
) -> None:
    """While it runs, the second send is a duplicate with "end", and with "start" the third."""
    task = TASKS[until]
    first = send_to_all(task, rooms)
    assert duplicates(first) == {False}
    until_all(rooms, lambda pool, room: room.runs(first[pool].id))
    assert senders(task, rooms) == (ids(first) if until == "end" else NOBODY)

    second, third = send_to_all(task, rooms), send_to_all(task, rooms)
    assert duplicates(second) == {until == "end"}
    assert duplicates(third) == {True}
    assert ids(third) == ids(second)

    for room in rooms.values():
        room.open()
    assert values(first) == {pool: [result.id, 0] for pool, result in first.items()}
    assert values(second) == {pool: [result.id, 0] for pool, result in second.items()}
    # The run is over once its result is there.
    assert senders(task, rooms) == NOBODY
    fourth = send_to_all(task, rooms)
    assert duplicates(fourth) == {False}
    assert values(fourth) == {pool: [result.id, 0] for pool, result in fourth.items()}
    assert senders(task, rooms) == NOBODY
    expected = 2 if until == "end" else 3
    assert {pool: len(room.runs()) for pool, room in rooms.items()} == dict.fromkeys(
        POOLS, expected
    )
    assert [room.gauge.violations() for room in rooms.values()] == [[]] * len(POOLS)


def test_a_retry_keeps_the_lock_until_the_end(rooms: dict[str, Room]) -> None:
    """With "end" it is one lock from the send over each wait and each run to the last end."""
    task = TASKS["end"]
    first = send_to_all(task, rooms, "retry", countdown=1)
    tokens = {pool: lock and lock.token for pool, lock in locks_of(task, rooms).items()}
    steps: list[Callable[[str, Room], Any]] = [
        lambda pool, room: True,
        lambda pool, room: room.journal.count("retries") and first[pool].state == "RETRY",
        lambda pool, room: room.runs(first[pool].id),
    ]
    for step in steps:
        until_all(rooms, step)
        again = send_to_all(task, rooms)
        assert duplicates(again) == {True}
        assert ids(again) == ids(first)
        assert {p: lock and lock.token for p, lock in locks_of(task, rooms).items()} == tokens
    for room in rooms.values():
        room.open()
    assert values(first) == {pool: [result.id, 1] for pool, result in first.items()}
    assert senders(task, rooms) == NOBODY
    assert {len(room.runs()) for room in rooms.values()} == {1}


def test_a_retry_leaves_the_lock_of_what_was_sent_since_the_start(rooms: dict[str, Room]) -> None:
    """With "start" the first run frees it, and its retry touches no other's."""
    task = TASKS["start"]
    for room in rooms.values():
        room.open()
    first = send_to_all(task, rooms, "retry", countdown=6)
    assert senders(task, rooms) == ids(first)
    assert ids(send_to_all(task, rooms)) == ids(first)
    until_all(rooms, lambda pool, room: room.journal.count("retries"))
    assert senders(task, rooms) == NOBODY

    second = send_to_all(task, rooms, countdown=3600)
    assert duplicates(second) == {False}
    assert values(first) == {pool: [result.id, 1] for pool, result in first.items()}
    assert senders(task, rooms) == ids(second)


def test_every_end_frees_the_lock(until: str, rooms: dict[str, Room]) -> None:
    """The same can be sent again at once, in whatever way a run ends for good."""
    task = TASKS[until]
    parts = {
        how: {pool: Room(room.folder / how) for pool, room in rooms.items()} for how in ENDINGS
    }
    for how, places in parts.items():
        for room in places.values():
            room.folder.mkdir()
        assert duplicates(send_to_all(task, places, how)) == {False}
    for how, places in parts.items():
        until_all(places, lambda _, room: len(room.runs()) == ENDINGS[how])  # noqa: B023
        wait_for(lambda: senders(task, places) == NOBODY, SOON, f"{how} left a lock behind")  # noqa: B023
