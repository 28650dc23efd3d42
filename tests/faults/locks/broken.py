"""
More stores with one deliberate fault each, beside those of tests/contract, and locks
whose holders trust them for too long.

Naming such a cache backend in CACHES registers its store in every process that loads it.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from django.core.cache.backends.redis import RedisCache

from django_celery_safe import cache_lock, conf
from django_celery_safe.leases.holder import (
    HeldLock,
    Holder,
    place_names,
    split_place,
)
from django_celery_safe.leases.store import Renewable
from django_celery_safe.locks.lock import CacheLock
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose

#: Places that a broken release looks at.
MOST_PLACES = 3


class ExtendsAnyStore(RedisStore):
    """Extends whatever is there."""

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        """Let the key live longer, whoever holds it."""
        return [bool(self._expire(renewal)) for renewal in renewals]

    def _expire(self, renewal: Renewable) -> Any:
        milliseconds = str(round(renewal.seconds * 1000))
        return self._connections.ask(("PEXPIRE", self._key(renewal.name), milliseconds))[0]


class RevivingStore(RedisStore):
    """Lets a lease that is over begin again, though others may have held the lock since."""

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        """Write the key anew if there is none."""
        extended = super().extend(renewals, within)
        return [
            ours or isinstance(self.acquire(one.name, one.token, one.seconds, Holder()), Acquired)
            for ours, one in zip(extended, renewals, strict=True)
        ]


class ShortLeaseStore(RedisStore):
    """Ends each lease before its holder stops to trust it."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire for a part of the time."""
        return super().take(request._replace(seconds=request.seconds * 0.6))


class ForgetfulFenceStore(RedisStore):
    """Counts acquisitions from 1 again after it lost its memory."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Number the acquisition by a counter that knows no time."""
        outcome = super().take(request)
        if not isinstance(outcome, Acquired):
            return outcome
        with self.errors("acquire"):
            fence = int(self._connections.ask(("INCR", self._key("fences of a broken store")))[0])
            return outcome._replace(fence=fence)


class CountsPlacesStore(RedisStore):
    """Takes the place whose number is one more than there are holders."""

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Take a place that may be held, since the first to come need not be the first to go."""
        names = place_names(request.name, request.limit)
        holders = sum(self.peek(place) is not None for place in names)
        if holders == request.limit:
            return super().take(request)
        place = names[holders]
        with self.errors("acquire"):
            self._connections.ask(("DEL", self._key(place)))[0]
        outcome = super().take(request._replace(name=place, patience=None, limit=1))
        return outcome._replace(place=holders + 1) if isinstance(outcome, Acquired) else outcome


class ReleasesLastPlaceStore(RedisStore):
    """Frees the place that was taken last, whoever has it."""

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        """Release the last place, too."""
        released = super().release(name, token, remaining)
        held = filter(None, map(self.peek, place_names(split_place(name)[0], MOST_PLACES)))
        for last in list(held)[-1:]:
            super().release(last.name, last.token)
        return released


class OtherLock(CacheLock):
    """Made as ``cache_lock`` makes its own."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, cache_lock(name, **options)._options)


class EndlessLock(OtherLock):
    """Trusts itself until it is released."""

    @property
    def held(self) -> bool:
        """Whether it was acquired."""
        return self.lease is not None

    @property
    def remaining(self) -> float:
        """The whole lease, always."""
        return 0.0 if self.lease is None else self.lease.seconds


class LateClockLock(OtherLock):
    """Gets some answers late, and trusts its lease from the answer on, not from the request."""

    def acquire(self, blocking_timeout: conf.Duration | conf.Unset | None = conf.UNSET) -> bool:
        """Acquire, now and then wait for half of the lease, then let the lease begin."""
        acquired = super().acquire(blocking_timeout)
        if acquired and self.lease is not None:
            if random.random() < 0.3:
                time.sleep(self.lease.seconds / 2)
            self.lease.began(time.monotonic())
        return acquired


#: The cache backends by whose names a setting chooses these stores.
ExtendsAnyCache = type("ExtendsAnyCache", (RedisCache,), {})
RevivingCache = type("RevivingCache", (RedisCache,), {})
ShortLeaseCache = type("ShortLeaseCache", (RedisCache,), {})
ForgetfulFenceCache = type("ForgetfulFenceCache", (RedisCache,), {})
CountsPlacesCache = type("CountsPlacesCache", (RedisCache,), {})
ReleasesLastPlaceCache = type("ReleasesLastPlaceCache", (RedisCache,), {})

let_choose(
    {
        ExtendsAnyCache: ExtendsAnyStore,
        RevivingCache: RevivingStore,
        ShortLeaseCache: ShortLeaseStore,
        ForgetfulFenceCache: ForgetfulFenceStore,
        CountsPlacesCache: CountsPlacesStore,
        ReleasesLastPlaceCache: ReleasesLastPlaceStore,
    }
)
