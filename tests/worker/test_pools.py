"""
Leases, waiting and the lock of a send in each pool of Celery: prefork, threads, solo and gevent.

One worker of each kind serves all tests, each with a queue of its own, and a test has
all of them do the same at the same time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from django_celery_safe import find_lock
from tests.conftest import app_on_redis
from tests.locks.renewals import get_lock, get_remaining
from tests.processes import CeleryWorker, wait_for
from tests.processes.worker import start_together
from tests.servers import RedisServer
from tests.worker import pool_tasks
from tests.worker.pool_tasks import unique
from tests.worker.rooms import Room

pytestmark = pytest.mark.long

#: Each pool, and how many tasks run in it at once.
POOLS = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 20}
TOGETHER = ["prefork", "threads", "gevent"]
#: Seconds until a result must be there; less than any lease that is to be freed.
SOON = 20


@pytest.fixture(scope="module", autouse=True)
def workers(redis_server: RedisServer) -> Iterator[None]:
    """A worker of each pool, with the queue that is called like its pool."""
    with app_on_redis(redis_server), ExitStack() as stack:
        workers = []
        for pool, size in POOLS.items():
            arguments = ["--include", pool_tasks.__name__, "--queues", pool]
            worker = CeleryWorker("tests.app", pool=pool, concurrency=size, arguments=arguments)
            workers.append(stack.push(worker))
        start_together(workers)
        yield


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[dict[str, Room]]:
    """A room for the tasks of each pool, open in the end."""
    rooms = {pool: Room(tmp_path / pool) for pool in POOLS}
    for room in rooms.values():
        room.folder.mkdir()
    yield rooms
    open_all(rooms)


def open_all(rooms: dict[str, Room]) -> None:
    """Let everybody go."""
    for room in rooms.values():
        room.open()


def until_all(rooms: dict[str, Room], condition: Callable[[str, Room], Any]) -> None:
    """Wait until something is true of each room."""
    for pool, room in rooms.items():
        room.until(lambda: condition(pool, room), f"{pool} does not", SOON)  # noqa: B023


def until_renewed(names: list[str]) -> None:
    """Wait until each of these locks has been renewed; all of them stay with their holders."""
    before = {name: read_lease(name) for name in names}

    def are_renewed() -> bool:
        now = {name: read_lease(name) for name in names}
        assert {name: token for name, (token, _) in now.items()} == {
            name: token for name, (token, _) in before.items()
        }
        return all(now[name][1] > before[name][1] + 1 for name in names)

    wait_for(are_renewed, 60, "not all are renewed")


def read_lease(name: str) -> tuple[str, float]:
    """Return the token of a lock, and when its lease ends."""
    return get_lock(name).token, time.monotonic() + get_remaining(name)


def test_locks_are_kept_in_every_pool(rooms: dict[str, Room]) -> None:
    """All tasks of a pool keep ten locks each."""
    results, names = [], []
    for pool, size in POOLS.items():
        for number in range(size):
            mine = [f"{pool} {number}:{place}" for place in range(10)]
            args = (rooms[pool].path, mine)
            results.append(pool_tasks.keep.apply_async(args, queue=pool))
            names += mine
    until_all(rooms, lambda pool, room: len(room.runs()) == POOLS[pool])
    until_renewed(names)
    open_all(rooms)
    for result in results:
        assert result.get(timeout=SOON) is True
    assert not any(map(find_lock, names))


def test_a_waiting_task_is_woken_by_another(rooms: dict[str, Room]) -> None:
    """A task that waits gets the lock when another task of its pool frees it, and not before."""
    results = {}
    together = {pool: rooms[pool] for pool in TOGETHER}
    for pool, room in together.items():
        args = (room.path, f"wanted in {pool}")
        pool_tasks.release_later.apply_async(args, queue=pool)
        room.until(room.runs, f"{pool}: the holder did not begin", SOON)
        results[pool] = pool_tasks.wait_long.apply_async(args, queue=pool)
    until_all(together, lambda pool, room: room.journal.entries("waits"))
    # A waiting task blocks no other task of its pool; prefork has no other child here.
    queues = ("threads", "gevent") * 3
    doubled = [pool_tasks.double.apply_async((21,), queue=queue) for queue in queues]
    assert [result.get(timeout=SOON) for result in doubled] == [42] * 6
    assert not any(room.journal.entries("stopped waiting") for room in together.values())
    open_all(together)
    # The lease is 60 s.
    assert [result.get(timeout=SOON) for result in results.values()] == [True] * 3


def test_a_task_beyond_its_time_limit_keeps_its_lock_until_it_ends(rooms: dict[str, Room]) -> None:
    """Where the pool does not end it, another run would overlap with it."""
    hung = {pool: room for pool, room in rooms.items() if pool != "prefork"}
    names = [f"{pool} hangs" for pool in hung]
    for pool, room in hung.items():
        pool_tasks.hang.apply_async((room.path, f"{pool} hangs"), queue=pool)
    until_all(hung, lambda pool, room: room.journal.entries("hangs"))
    for _ in range(2):  # the second renewal is certainly after the limit of 1 s
        until_renewed(names)
    open_all(rooms)
    wait_for(lambda: not any(map(find_lock, names)), SOON, "a lock is held still")


def send_to_all(rooms: dict[str, Room]) -> dict[str, Any]:
    """Send the unique task to the worker of each pool, for the room of that pool."""
    return {pool: unique.apply_async((room.path,), queue=pool) for pool, room in rooms.items()}


def senders(rooms: dict[str, Room]) -> dict[str, str | None]:
    """Return the id of the task that keeps others from being sent, by pool; "" for nobody."""
    locks = {pool: find_lock(f"sent:{unique.name}:{room.path}") for pool, room in rooms.items()}
    return {pool: lock.holder.task_id if lock else "" for pool, lock in locks.items()}


NOBODY = dict.fromkeys(POOLS, "")


def test_the_same_is_sent_again_when_the_run_ends(rooms: dict[str, Room]) -> None:
    """While it waits and runs, the second send is a duplicate, and then the third is none."""
    first = send_to_all(rooms)
    until_all(rooms, lambda pool, room: room.runs(first[pool].id))
    ids = {pool: result.id for pool, result in first.items()}
    assert senders(rooms) == ids
    assert {pool: result.id for pool, result in send_to_all(rooms).items()} == ids
    open_all(rooms)
    for _ in range(2):
        for result in first.values():
            assert result.get(timeout=SOON) == [result.id, 0]
        # The run is over once its result is there.
        assert senders(rooms) == NOBODY
        first = send_to_all(rooms)
        assert {result.is_duplicate for result in first.values()} == {False}
    assert [room.gauge.violations() for room in rooms.values()] == [[]] * len(POOLS)
