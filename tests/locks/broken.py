"""
Stores with one deliberate fault each, for the doctor, as cache backends that choose them.

Naming such a backend in CACHES registers its store in every process that loads it.
"""

from django.core.cache.backends.redis import RedisCache

from django_celery_safe.leases.holder import HeldLock
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose


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


class HastyCache(RedisCache):
    """Chooses HastyStore."""


class LateCache(RedisCache):
    """Chooses LateStore."""


class BaffledCache(RedisCache):
    """Chooses BaffledStore."""


let_choose(
    {
        HastyCache: HastyStore,
        LateCache: LateStore,
        BaffledCache: BaffledStore,
    }
)
