"""
Leases and waiting in each pool of Celery: prefork, threads, solo and gevent.

One worker of each kind serves all tests, each with a queue of its own, and a test has
all of them do the same at the same time.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_celery_safe import cache_lock, find_lock
from tests.conftest import app_on_redis
from tests.processes import wait_for
from tests.servers import RedisServer
from tests.worker import pool_tasks
from tests.worker.pool_tasks import LEASE, PARENT_HOLDS
from tests.worker.pools import POOLS, Workers, workers_of_all_pools
from tests.worker.rooms import Room

pytestmark = pytest.mark.long

TOGETHER = ["prefork", "threads", "gevent"]

PARENTS_LOCK = "the parent's"

#: Seconds until a result must be there.
SOON = 20


@pytest.fixture(scope="module", autouse=True)
def workers(redis_server: RedisServer) -> Iterator[Workers]:
    """A worker of each pool; the parent of the prefork pool holds a lock of its own."""
    env = {PARENT_HOLDS: PARENTS_LOCK}
    with (
        app_on_redis(redis_server),
        workers_of_all_pools(pool_tasks.__name__, prefork_env=env) as workers,
    ):
        yield workers


def send(task: Any, pool: str, *args: Any, **options: Any) -> Any:
    """Send a task to the worker with this pool."""
    return task.apply_async(args, queue=pool, **options)


def tokens_of(names: list[str]) -> dict[str, str]:
    """Return the token of each of these locks that is held."""
    return {name: lock.token for name in names if (lock := find_lock(name)) is not None}


def stays_true(condition: Callable[[], object], seconds: float) -> None:
    """Look again and again whether something remains as it is."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        assert condition()
        time.sleep(0.05)


def test_locks_are_kept_in_every_pool(rooms: dict[str, Room]) -> None:
    """All tasks of a pool keep ten locks each for several leases, by one thread per process."""
    results, names = {}, {}
    for pool, size in POOLS.items():
        for number in range(size):
            mine = [f"{pool} {number}:{place}" for place in range(10)]
            results[pool, number] = send(pool_tasks.keep, pool, rooms[pool].path, mine)
            names[pool, number] = mine
    for pool, size in POOLS.items():
        rooms[pool].until(lambda: len(rooms[pool].runs()) == size, f"{pool} did not begin", SOON)  # noqa: B023
    every = [name for mine in names.values() for name in mine]
    tokens = tokens_of(every)
    assert sorted(tokens) == sorted(every)
    stays_true(lambda: not any(cache_lock(name).acquire() for name in every), 3.5 * LEASE)
    assert tokens_of(every) == tokens
    for room in rooms.values():
        room.open()
    ended = {task: result.get(timeout=SOON) for task, result in results.items()}
    assert ended == {task: {"kept": True, "threads": 1} for task in results}
    assert tokens_of(every) == {}


def test_a_waiting_task_is_woken_by_another(rooms: dict[str, Room]) -> None:
    """A task that waits gets the lock when another task of its pool frees it, and not before."""
    results = {}
    for pool in TOGETHER:
        room = rooms[pool]
        send(pool_tasks.release_later, pool, room.path, f"wanted in {pool}")
        room.until(room.runs, f"{pool}: the holder did not begin", SOON)
        results[pool] = send(pool_tasks.wait_long, pool, room.path, f"wanted in {pool}")
    for pool in TOGETHER:
        room = rooms[pool]
        room.until(lambda: room.journal.entries("waits"), "nobody waits", SOON)  # noqa: B023
    # A waiting task blocks no other task of its pool; prefork has no other child here.
    doubled = [send(pool_tasks.double, pool, 21) for pool in ("threads", "gevent") * 3]
    assert [result.get(timeout=SOON) for result in doubled] == [42] * 6
    assert not any(rooms[pool].journal.entries("stopped waiting") for pool in TOGETHER)
    for pool in TOGETHER:
        rooms[pool].open()
    assert {pool: result.get(timeout=SOON) for pool, result in results.items()} == dict.fromkeys(
        TOGETHER, True
    )
    for pool in TOGETHER:
        (released,) = rooms[pool].journal.entries("releases")
        (woken,) = rooms[pool].journal.entries("stopped waiting")
        # The lease is 60 s.
        assert (woken["at_ns"] - released["at_ns"]) / 1e9 < 5, pool


def test_a_waiting_task_in_a_solo_pool_is_woken_from_outside(rooms: dict[str, Room]) -> None:
    """The only task of a solo pool gets the lock when another process frees it."""
    room = rooms["solo"]
    with cache_lock("wanted in solo", timeout=60) as lock:
        assert lock
        result = send(pool_tasks.wait_long, "solo", room.path, "wanted in solo")
        room.until(lambda: room.journal.entries("waits"), "it does not wait", SOON)
    assert result.get(timeout=SOON) is True


def test_a_task_beyond_its_time_limit_keeps_its_lock_until_it_ends(rooms: dict[str, Room]) -> None:
    """Where the pool does not end it, another run would overlap with it."""
    limit = 2 * LEASE
    hung = {}
    for pool in ("threads", "solo", "gevent"):
        hung[f"{pool}: by its message"] = (pool, pool_tasks.hang, {"time_limit": limit})
    hung["threads: by its option"] = ("threads", pool_tasks.hang_by_its_option, {})
    hung["gevent: by its option"] = ("gevent", pool_tasks.hang_by_its_option, {})
    for name, (pool, task, options) in hung.items():
        send(task, pool, rooms[pool].path, name, **options)
    for pool in ("threads", "solo", "gevent"):
        number = sum(one == pool for one, _, _ in hung.values())
        room = rooms[pool]
        room.until(lambda: len(room.journal.entries("hangs")) == number, "none began", SOON)  # noqa: B023
    stays_true(lambda: all(map(find_lock, hung)), limit + 2 * LEASE)
    for room in rooms.values():
        room.open()
    wait_for(lambda: not any(map(find_lock, hung)), SOON, "a lock is held still")


def test_a_child_inherits_nothing_of_its_parent(workers: Workers, rooms: dict[str, Room]) -> None:
    """Children forked while their parent holds a lock neither have, renew nor touch it."""
    before = find_lock(PARENTS_LOCK)
    assert before is not None
    assert before.holder.pid == workers["prefork"].pid
    seen = send(pool_tasks.look_at_the_parents_lock, "prefork").get(timeout=SOON)
    assert seen.pop("pid") in {child.pid for child in workers["prefork"].children()}
    parents = re.search(r"The parent's connection is (\d+)", workers["prefork"].log)
    assert parents is not None
    assert seen.pop("connection") != int(parents[1])
    assert seen == {"held": False, "remaining": 0.0, "refused": ["LockError"] * 3}
    stays_true(lambda: not cache_lock(PARENTS_LOCK).acquire(), 1.5 * LEASE)
    after = find_lock(PARENTS_LOCK)
    assert after is not None
    assert after.token == before.token
