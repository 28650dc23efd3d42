"""
Stores with one deliberate fault each, as cache backends that choose them.

Naming such a backend, ``tests.faulty.NoExpiryCache``, in CACHES registers its store in every
process that loads it.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from django.core.cache.backends.redis import RedisCache

from django_celery_safe.leases.holder import HeldLock, Holder, encode_holder
from django_celery_safe.leases.lease import Renewal
from django_celery_safe.locks import stores
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.redis import RedisStore


class FaultyStore(RedisStore):
    """A store whose classes each make a cache backend, called like them, that chooses them."""

    def __init_subclass__(cls) -> None:
        name = cls.__name__.replace("Store", "Cache")
        globals()[name] = type(name, (RedisCache,), {"__module__": __name__})
        stores._STORES[f"{__name__}.{name}"] = f"{__name__}.{cls.__name__}"


class NoOwnerCheckStore(FaultyStore):
    """Releases whatever is there."""

    def release_along(self, name: str, *others: Any) -> bool:
        """Delete the key, whoever holds it."""
        return bool(self._connections.ask(("DEL", self._key(name)))[0])


class NoExpiryStore(FaultyStore):
    """Holds for ever."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire for a year."""
        return super().take(request._replace(seconds=365 * 24 * 3600))


class HastyStore(FaultyStore):
    """Ends each lease early."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire for half of the time."""
        return super().take(request._replace(seconds=request.seconds / 2))


class FencePerProcessStore(FaultyStore):
    """Counts acquisitions in each process for itself."""

    _count = itertools.count(1)

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Number the acquisition by a counter of this process."""
        outcome = super().take(request)
        if isinstance(outcome, Acquired):
            return outcome._replace(fence=next(self._count))
        return outcome


class ReadThenWriteStore(FaultyStore):
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


class OneTooManyStore(FaultyStore):
    """Has a place more than it was asked for."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire one of the places, or the one too many."""
        return super().take(request._replace(limit=request.limit + 1))


class RevivingStore(FaultyStore):
    """Lets a lease that is over begin again, though others may have held the lock since."""

    def extend(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool]:
        """Write the key anew if there is none."""
        extended = super().extend(renewals, within)
        return [
            ours
            or isinstance(
                self.take(LockRequest(one.name, one.token, one.seconds, Holder())), Acquired
            )
            for ours, one in zip(extended, renewals, strict=True)
        ]


class ForgetfulFenceStore(FaultyStore):
    """Counts acquisitions from 1 again after it lost its memory."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Number the acquisition by a counter that knows no time."""
        outcome = super().take(request)
        if not isinstance(outcome, Acquired):
            return outcome
        with self.errors("acquire"):
            fence = int(self._connections.ask(("INCR", self._key("fences")))[0])
            return outcome._replace(fence=fence)


class LateStore(FaultyStore):
    """Has a clock that is ten seconds behind."""

    def ask_time(self) -> float:
        """Tell the time of ten seconds ago."""
        return super().ask_time() - 10


class BaffledStore(FaultyStore):
    """Fails in a way that nobody thought of."""

    def ask_time(self) -> float:
        """Fail."""
        raise ZeroDivisionError("division by zero")
