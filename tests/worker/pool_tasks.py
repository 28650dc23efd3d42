"""
Tasks for the tests on the pools of a worker.

A worker with ``PARENT_HOLDS`` in its environment takes the lock of that name before
its pool starts, and keeps it.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import shared_task
from celery.signals import worker_init

from django_celery_safe import CacheLock, LockError, SafeTask, cache_lock
from django_celery_safe.locks.stores import locate
from tests.processes import wait_for
from tests.worker.rooms import Room

#: Names the environment variable with the name of the parent's lock.
PARENT_HOLDS = "SAFE_PARENT_HOLDS"

#: Lease of what is renewed here, s.
LEASE = 3.0

parents: CacheLock | None = None


@worker_init.connect
def take_before_the_pool_starts(**_: Any) -> None:
    """Use locks before there are children, and go on holding one."""
    global parents
    if name := os.environ.get(PARENT_HOLDS):
        parents = cache_lock(name, timeout=LEASE)
        assert parents.acquire()
        print(f"The parent's connection is {connection_id()}.", flush=True)


def connection_id() -> int:
    """Return the number that Redis gave to this thread's connection for locks."""
    store: Any = locate().store()
    return int(store._wire.ask("CLIENT", "ID"))


def count_renewing_threads(locks: list[CacheLock]) -> int:
    """Return how many threads of this process renew these locks."""
    # Lanes of other tests' locks may still be there, and end soon.
    return len({lock.lease.lane for lock in locks if lock.lease is not None})


@shared_task(base=SafeTask, bind=True)
def keep(self: Any, room: str, names: list[str]) -> dict[str, Any]:
    """Hold locks until the gate opens; return whether all were kept, and by how many threads."""
    with ExitStack() as stack:
        locks = [stack.enter_context(cache_lock(name, timeout=LEASE)) for name in names]
        Room(Path(room)).stay(self)
        return {"kept": all(lock.held for lock in locks), "threads": count_renewing_threads(locks)}


@shared_task(base=SafeTask, bind=True)
def release_later(self: Any, room: str, name: str) -> None:
    """Hold a lock, which is not to end soon by itself, until the gate opens."""
    with cache_lock(name, timeout=60) as lock:
        assert lock
        Room(Path(room)).stay(self)
        Room(Path(room)).note("releases", self)


@shared_task(base=SafeTask, bind=True)
def wait_long(self: Any, room: str, name: str) -> bool:
    """Wait for a lock; return whether it came."""
    Room(Path(room)).note("waits", self)
    with cache_lock(name, blocking_timeout=40) as lock:
        Room(Path(room)).note("stopped waiting", self)
        return bool(lock)


@shared_task(base=SafeTask)
def double(number: int) -> int:
    """Do something that takes no time."""
    return number * 2


@contextmanager
def _hanging_on(name: str) -> Iterator[None]:
    with cache_lock(name, timeout=LEASE) as lock:
        assert lock
        yield


@shared_task(base=SafeTask, bind=True)
def hang(self: Any, room: str, name: str) -> None:
    """Hold a lock and listen to nothing until the gate opens."""
    with _hanging_on(name):
        _listen_to_nothing(self, room)


@shared_task(base=SafeTask, bind=True, time_limit=2 * LEASE)
def hang_by_its_option(self: Any, room: str, name: str) -> None:
    """Hold a lock and listen to nothing; the time limit is the task's own."""
    with _hanging_on(name):
        _listen_to_nothing(self, room)


def _listen_to_nothing(task: Any, room: str) -> None:
    Room(Path(room)).note("hangs", task)
    gate = Path(room) / "gate"
    while not gate.exists():
        # The time limit of gevent's pool is no Exception.
        with contextlib.suppress(BaseException):
            wait_for(gate.exists, 60)


@shared_task(base=SafeTask)
def look_at_the_parents_lock() -> dict[str, Any]:
    """Return what a child of the pool makes of the lock that its parent holds."""
    assert parents is not None
    seen: dict[str, Any] = {
        "pid": os.getpid(),
        "held": parents.held,
        "remaining": parents.remaining,
        "connection": connection_id(),
    }
    for action in (parents.release, parents.ensure, lambda: parents.extend(60)):
        try:
            action()
        except LockError as error:
            seen.setdefault("refused", []).append(type(error).__name__)
    return seen
