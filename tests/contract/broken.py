"""
Stores with one deliberate fault each, as cache backends that choose them.

Naming such a backend in CACHES registers its store in every process that loads it.
"""

import itertools
import time

from django.core.cache.backends.redis import RedisCache

from django_celery_safe.leases.holder import HeldLock, encode_holder
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose


class NoOwnerCheckStore(RedisStore):
    """Releases whatever is there."""

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        """Delete the key, whoever holds it."""
        return bool(self._connections.ask(("DEL", self._key(name)))[0])


class NoExpiryStore(RedisStore):
    """Holds for ever."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire for a year."""
        return super().take(request._replace(seconds=365 * 24 * 3600))


class FencePerProcessStore(RedisStore):
    """Counts acquisitions in each process for itself."""

    _count = itertools.count(1)

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Number the acquisition by a counter of this process."""
        outcome = super().take(request)
        if isinstance(outcome, Acquired):
            return outcome._replace(fence=next(self._count))
        return outcome


class ReadThenWriteStore(RedisStore):
    """Looks whether the lock is free, and then writes without a condition."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire in two steps."""
        held = self.peek(request.name)
        if held is not None:
            return held
        time.sleep(0.001)
        value = f"{request.token}1 {encode_holder(request.name, request.holder)}"
        lease = str(round(request.seconds * 1000))
        self._connections.ask(("SET", self._key(request.name), value, "PX", lease))[0]
        return Acquired(1)


class OneTooManyStore(RedisStore):
    """Has a place more than it was asked for."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire one of the places, or the one too many."""
        return super().take(request._replace(limit=request.limit + 1))


class NoOwnerCheckCache(RedisCache):
    """Chooses NoOwnerCheckStore."""


class NoExpiryCache(RedisCache):
    """Chooses NoExpiryStore."""


class FencePerProcessCache(RedisCache):
    """Chooses FencePerProcessStore."""


class ReadThenWriteCache(RedisCache):
    """Chooses ReadThenWriteStore."""


class OneTooManyCache(RedisCache):
    """Chooses OneTooManyStore."""


let_choose(
    {
        OneTooManyCache: OneTooManyStore,
        NoOwnerCheckCache: NoOwnerCheckStore,
        NoExpiryCache: NoExpiryStore,
        FencePerProcessCache: FencePerProcessStore,
        ReadThenWriteCache: ReadThenWriteStore,
    }
)
