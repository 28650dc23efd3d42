"""
Stores with one deliberate fault each, for the doctor, as cache backends that choose them.

Naming such a backend in CACHES registers its store in every process that loads it.
"""

import time
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.cache.backends.redis import RedisCache

from django_celery_safe.leases.holder import HeldLock
from django_celery_safe.locks import stores
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.portable import PortableStore
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose


class GenerousStore(RedisStore):
    """Gives the lock to everybody."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Say yes, whoever holds it."""
        outcome = super().take(request)
        return outcome if isinstance(outcome, Acquired) else Acquired(outcome.fence)


class HastyStore(RedisStore):
    """Ends each lease early."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire for half of the time."""
        return super().take(request._replace(seconds=request.seconds / 2))


class LateStore(RedisStore):
    """Has a clock that is ten seconds behind."""

    def ask_time(self) -> float:
        """Tell the time of ten seconds ago."""
        return super().ask_time() - 10


class BaffledStore(RedisStore):
    """Fails in a way that nobody thought of."""

    def ask_time(self) -> float:
        """Fail."""
        raise ZeroDivisionError("division by zero")


class GenerousCache(RedisCache):
    """Chooses GenerousStore."""


class HastyCache(RedisCache):
    """Chooses HastyStore."""


class LateCache(RedisCache):
    """Chooses LateStore."""


class BaffledCache(RedisCache):
    """Chooses BaffledStore."""


class OverwritingCache(RedisCache):
    """Adds by reading and then writing; nothing but Django's API is known of it."""

    def add(
        self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> bool:
        """Write over what came after the look."""
        if self.get(key, version=version) is not None:
            return False
        time.sleep(0.001)
        self.set(key, value, timeout, version)
        return True


stores._MAKERS[stores._path(OverwritingCache)] = PortableStore

let_choose(
    {
        GenerousCache: GenerousStore,
        HastyCache: HastyStore,
        LateCache: LateStore,
        BaffledCache: BaffledStore,
    }
)
