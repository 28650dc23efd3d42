"""
Locks that live in a cache or a database.

``lock`` has :class:`CacheLock`, ``acquisition`` one try to acquire it, ``stores`` one file for
each place where locks can live; ``leases`` renews what is held.
"""

from .. import conf
from ..leases.holder import HeldLock
from .lock import CacheLock
from .stores import find_lock, iter_locks, release_lock

__all__ = ["CacheLock", "HeldLock", "cache_lock", "find_lock", "iter_locks", "release_lock"]


def cache_lock(
    name: str,
    *,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | None = 0,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
) -> CacheLock:
    """
    Return a lock that keeps two from running at once, on any number of machines.

    As a context manager it is truthy when acquired; as a decorator each call
    makes a new lock and raises LockNotAcquired if it is held. A lock keeps two
    from running at the same time; it does not keep a thing from being done
    again later (see ``do_once``).

    Args:
        name: The name of the resource: any non-empty text. Long or odd names are hashed.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT`` (30 s).
            A holder that dies leaves the lock held for at most this long.
        blocking_timeout: Longest time to wait; 0 tries once, None waits for ever.
        renew: Renew the lease, from a background thread, until the release or
            the end of the thread that took the lock. False: the lock ends at ``timeout``, and work
            that takes longer runs unprotected. In a Celery task with a ``time_limit``
            it is renewed for that long at the most, so that a task that hangs in a
            pool which can't end it does not hold for ever.
        cache: Alias of the cache that holds the lock; unset: ``LOCK_DATABASE``
            if that is set, otherwise ``LOCK_CACHE``.

    Raises:
        ConfigurationError: A value means nothing, such as ``timeout=None``.

    Example:
        >>> from django_celery_safe import cache_lock
        >>> with cache_lock("feed:42") as lock:
        ...     if lock:
        ...         print("importing")
        importing

    Source:
        The Celery task cookbook, "Ensuring a task is only executed one at a time".
    """
    return CacheLock(
        name, timeout=timeout, blocking_timeout=blocking_timeout, renew=renew, cache=cache
    )
