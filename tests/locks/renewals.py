"""Leases and their renewals, as a test sees them in the store, and locks that others hold."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django_celery_safe import (
    HeldLock,
    LockBackendError,
    cache_lock,
    find_lock,
    iter_locks,
    release_lock,
)
from django_celery_safe.leases.holder import Holder
from django_celery_safe.leases.lease import clock
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks import CacheLock
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from tests.clock import HeldClock
from tests.processes import wait_for

#: The holder of a lock for which nobody else is named.
HERE = Holder("here", 1)


def take_lock(
    name: str, token: str = "t" * 32, seconds: float = 60, by: Holder = HERE, limit: int = 1
) -> Acquired:
    """Take a lock, or a place of it, that nobody renews; it has to be free."""
    outcome = get_store().take(LockRequest(name, token, seconds, by, limit=limit))
    assert isinstance(outcome, Acquired), outcome
    return outcome


def acquired(name: str, **options: Any) -> CacheLock:
    """Return a lock that this thread has just acquired."""
    lock = cache_lock(name, **options)
    assert lock.acquire()
    return lock


def uses_of(lock: CacheLock, clock: HeldClock) -> list[tuple[Callable[[], object], object]]:
    """Return each way to use a held lock of 30 s, with the answer; it is held afterwards."""

    def renew() -> bool:
        clock.advance(11)
        return lock.remaining > 25

    return [
        (lock.ensure, None),
        (renew, True),
        (lambda: lock.extend(60), None),
        (lambda: get_lock(lock.name).token == lock.token, True),
        (lambda: [one.token == lock.token for one in iter_locks()], [True]),
        (cache_lock(lock.name).acquire, False),
        (lock.release, True),
        (lock.acquire, True),
    ]


def get_lock(name: str) -> HeldLock:
    """Return the lock of this name, which has to be held."""
    found = find_lock(name)
    assert found is not None, f"{name} is free"
    return found


def get_remaining(name: str) -> float:
    """Return how long the store will keep a lock that nobody renews any more."""
    remaining = get_lock(name).remaining
    assert remaining is not None
    return remaining


@contextmanager
def held_by(
    name: str, task_id: str | None, seconds: float = 30, *, host: str = "elsewhere", pid: int = 4711
) -> Iterator[HeldLock]:
    """Let the run ``task_id`` in another process hold the lock during the block."""
    store, token = get_store(), uuid.uuid4().hex
    take_lock(name, token, seconds, Holder(host, pid, time.time(), True, "tests.other", task_id))
    yield get_lock(name)
    store.release(name, token)


def free(name: str) -> None:
    """Free a lock as an operator does."""
    assert release_lock(get_lock(name))


def is_answered(ask: Callable[[], bool]) -> bool:
    """Return the answer of a store; False if it does not answer."""
    try:
        return ask()
    except LockBackendError:
        return False


def wait_and_release(name: str) -> bool:
    """Take a lock when it is free, and give it back."""
    lock = cache_lock(name, blocking_timeout=60)
    return lock.acquire() and lock.release()


def stop_renewing(lock: CacheLock) -> None:
    """Let a held lock's lease go on to its end, as if the thread that renews it hung."""
    renewer.remove(lock.lease)  # type: ignore[arg-type] # held


def wait_for_renewals() -> None:
    """Wait until each lease of this process has begun anew."""
    since = clock.now()
    leases = [lease for lane in renewer.lanes.values() for lease in lane.leases]
    assert leases
    wait_for(lambda: all(lease.asked_at > since for lease in leases), 30, "not all were renewed")
