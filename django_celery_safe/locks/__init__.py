"""
Locks that live in a cache or a database.

``lock`` has :class:`CacheLock`, ``lease`` the thread that renews what is held,
``stores`` one file for each place where locks can live.
"""

from .lock import CacheLock, cache_lock
from .stores import find_lock, iter_locks, release_lock
from .stores.base import HeldLock

__all__ = ["CacheLock", "HeldLock", "cache_lock", "find_lock", "iter_locks", "release_lock"]
