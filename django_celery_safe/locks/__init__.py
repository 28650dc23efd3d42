"""
Locks that live in a cache or a database.

``lock`` has :class:`CacheLock`, and ``stores`` one file for each place where locks can live;
``leases`` renews the locks that are held.
"""

from functools import lru_cache
from typing import Any

from .. import conf
from ..leases.holder import HeldLock
from .lock import CacheLock, LockOptions
from .stores import find_lock, iter_locks, release_lock

__all__ = ["CacheLock", "HeldLock", "cache_lock", "find_lock", "iter_locks", "release_lock"]


def cache_lock(
    name: str,
    *,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | None = 0,
    limit: int = 1,
) -> CacheLock:
    """
    Return a lock that keeps two runs from overlapping, on any number of machines.

    A ``with`` block gets a lock that is truthy if it was acquired. Each call of a decorated
    function makes a new lock, and raises LockNotAcquired if someone else holds it. A lock keeps
    two runs from overlapping; it does not keep the work from being done again later
    (see ``do_once``).

    Args:
        name: The name of the resource: any non-empty text. Long or odd names are hashed.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT`` (30 s).
            A background thread renews it until the release, or the end of the thread that took
            the lock; a holder that dies leaves the lock held for at most this long.
        blocking_timeout: Longest time to wait; 0 tries once, None waits for ever.
        limit: How many may hold the lock at once, from 1 to 1,000. More than 1 needs Redis, a
            database or LocMemCache. Each acquisition counts by its own limit, so a limit that
            you change in a deployment applies to new acquisitions only.
            A Celery task takes at most one place, even if its message is delivered twice.

    Raises:
        ConfigurationError: An argument is not valid, such as ``timeout=None``.

    Example:
        >>> from django_celery_safe import cache_lock
        >>> with cache_lock("feed:42") as lock:
        ...     if lock:
        ...         print("importing")
        importing

    Source:
        The Celery task cookbook, "Ensuring a task is only executed one at a time".
    """
    given = timeout, blocking_timeout, limit
    try:
        options = _validated(*given)
    except TypeError:  # no number, nor a timedelta: it has no hash
        options = _validated.__wrapped__(*given)
    return CacheLock(name, options)


@lru_cache(typed=True)  # typed: True is no number
def _validated(timeout: Any, blocking_timeout: Any, limit: int) -> LockOptions:
    lease = timeout if timeout is conf.UNSET else conf.LEASE.seconds(timeout, "timeout")
    longest = conf.WAIT.seconds_or_none(blocking_timeout, "blocking_timeout")
    return LockOptions(lease, longest, conf.lock_limit(limit))
