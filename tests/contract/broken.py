"""
Stores with one deliberate fault each, as cache backends that choose them.

Naming such a backend in CACHES registers its store in every process that loads it.
"""

import itertools
import time

from django.core.cache.backends.redis import RedisCache

from django_celery_safe.leases.holder import HeldLock, Holder, encode_holder
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose


class NoOwnerCheckStore(RedisStore):
    """Releases whatever is there."""

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        """Delete the key, whoever holds it."""
        return bool(self._wire.ask("DEL", self._key(name)))


class NoExpiryStore(RedisStore):
    """Holds for ever."""

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """Acquire for a year."""
        return super().acquire(name, token, 365 * 24 * 3600, holder, patience)


class FencePerProcessStore(RedisStore):
    """Counts acquisitions in each process for itself."""

    _count = itertools.count(1)

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """Number the acquisition by a counter of this process."""
        outcome = super().acquire(name, token, seconds, holder, patience)
        return Acquired(next(self._count)) if isinstance(outcome, Acquired) else outcome


class ReadThenWriteStore(RedisStore):
    """Looks whether the lock is free, and then writes without a condition."""

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """Acquire in two steps."""
        held = self.peek(name)
        if held is not None:
            return held
        time.sleep(0.001)
        value = f"{token}1 {encode_holder(name, holder)}"
        self._wire.ask("SET", self._key(name), value, "PX", str(round(seconds * 1000)))
        return Acquired(1)


class NoOwnerCheckCache(RedisCache):
    """Chooses NoOwnerCheckStore."""


class NoExpiryCache(RedisCache):
    """Chooses NoExpiryStore."""


class FencePerProcessCache(RedisCache):
    """Chooses FencePerProcessStore."""


class ReadThenWriteCache(RedisCache):
    """Chooses ReadThenWriteStore."""


let_choose(
    {
        NoOwnerCheckCache: NoOwnerCheckStore,
        NoExpiryCache: NoExpiryStore,
        FencePerProcessCache: FencePerProcessStore,
        ReadThenWriteCache: ReadThenWriteStore,
    }
)
