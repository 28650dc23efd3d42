"""Tasks for the tests on the pools of a worker."""

import contextlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, cache_lock, single_instance
from tests.processes import wait_for
from tests.worker.rooms import Room

#: Lease of what is renewed here, s.
LEASE = 10.0


@shared_task(base=SafeTask, bind=True)
def keep(self: Any, room: str, names: list[str]) -> bool:
    """Hold locks until the gate opens; return whether all were kept."""
    with ExitStack() as stack:
        locks = [stack.enter_context(cache_lock(name, timeout=LEASE)) for name in names]
        Room(Path(room)).stay(self)
        return all(lock.held for lock in locks)


@shared_task(base=SafeTask, bind=True)
def release_later(self: Any, room: str, name: str) -> None:
    """Hold a lock, which is not to end soon by itself, until the gate opens."""
    with cache_lock(name, timeout=60) as lock:
        assert lock
        Room(Path(room)).stay(self)


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


@shared_task(base=SafeTask, bind=True, time_limit=1)
def hang(self: Any, room: str, name: str) -> None:
    """Hold a lock beyond the time limit, and listen to nothing until the gate opens."""
    with cache_lock(name, timeout=LEASE) as lock:
        assert lock
        gate = Path(room) / "gate"
        Room(Path(room)).note("hangs", self)
        while not gate.exists():
            # The time limit of gevent's pool is no Exception.
            with contextlib.suppress(BaseException):
                wait_for(gate.exists, 60)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}", unique_until="end", on_conflict="retry", retry_delay=0.2)
def unique(self: Any, room: str) -> Any:
    """Be sent once for each room until it ends."""
    return Room(Path(room)).stay(self)
