"""Leases and their renewals, as a test sees them in the store."""

from django_celery_safe import HeldLock, cache_lock, find_lock
from django_celery_safe.leases.lease import clock
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks import CacheLock
from tests.processes import wait_for


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


def wait_and_release(name: str) -> bool:
    """Take a lock when it is free, and give it back."""
    lock = cache_lock(name, blocking_timeout=60)
    return lock.acquire() and lock.release()


def stop_renewing(lock: CacheLock) -> None:
    """Let a held lock's lease go on to its end, as if the thread that renews it hung."""
    assert lock.lease is not None
    renewer.remove(lock.lease)


def wait_for_renewals(*locks: CacheLock) -> None:
    """Wait until each lock's lease, or each lease of this process, has begun anew; still held."""
    since = clock.now()
    leases = [lock.lease for lock in locks]
    if not locks:
        leases = [lease for lane in renewer.lanes.values() for lease in lane.leases]
    assert leases
    wait_for(
        lambda: all(lease is not None and lease.asked_at > since for lease in leases),
        30,
        "not all were renewed",
    )
    assert all(lock.held for lock in locks)
