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

from django_celery_safe import conf
from django_celery_safe.leases.holder import HeldLock, Holder
from django_celery_safe.leases.store import Renewable
from django_celery_safe.locks.lock import CacheLock
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.locks.stores.redis import RedisStore
from tests.faulty import let_choose


class ExtendsAnyStore(RedisStore):
    """Extends whatever is there."""

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        """Let the key live longer, whoever holds it."""
        return [bool(self._expire(renewal)) for renewal in renewals]

    def _expire(self, renewal: Renewable) -> Any:
        milliseconds = str(round(renewal.seconds * 1000))
        return self._wire.ask("PEXPIRE", self._key(renewal.name), milliseconds)


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

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """Acquire for a part of the time."""
        return super().acquire(name, token, seconds * 0.6, holder, patience)


class ForgetfulFenceStore(RedisStore):
    """Counts acquisitions from 1 again after it lost its memory."""

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """Number the acquisition by a counter that knows no time."""
        outcome = super().acquire(name, token, seconds, holder, patience)
        if not isinstance(outcome, Acquired):
            return outcome
        with self.errors("acquire"):
            return Acquired(int(self._wire.ask("INCR", self._key("fences of a broken store"))))


class EndlessLock(CacheLock):
    """Trusts itself until it is released."""

    @property
    def held(self) -> bool:
        """Whether it was acquired."""
        return self._lease is not None

    @property
    def remaining(self) -> float:
        """The whole lease, always."""
        return 0.0 if self._lease is None else self._lease.seconds


class SlowAnswerLock(CacheLock):
    """Not broken: gets some answers late, as over a slow network."""

    def acquire(self, blocking_timeout: conf.Duration | conf.Unset | None = conf.UNSET) -> bool:
        """Acquire, and now and then wait for half of the lease."""
        acquired = super().acquire(blocking_timeout)
        if acquired and self._lease is not None and random.random() < 0.3:
            time.sleep(self._lease.seconds / 2)
        return acquired


class LateClockLock(SlowAnswerLock):
    """Trusts its lease from the answer on, not from before the request."""

    def acquire(self, blocking_timeout: conf.Duration | conf.Unset | None = conf.UNSET) -> bool:
        """Acquire, then let the lease begin."""
        acquired = super().acquire(blocking_timeout)
        if acquired and self._lease is not None:
            self._lease.began(time.monotonic())
        return acquired


class ExtendsAnyCache(RedisCache):
    """Chooses ExtendsAnyStore."""


class RevivingCache(RedisCache):
    """Chooses RevivingStore."""


class ShortLeaseCache(RedisCache):
    """Chooses ShortLeaseStore."""


class ForgetfulFenceCache(RedisCache):
    """Chooses ForgetfulFenceStore."""


let_choose(
    {
        ExtendsAnyCache: ExtendsAnyStore,
        RevivingCache: RevivingStore,
        ShortLeaseCache: ShortLeaseStore,
        ForgetfulFenceCache: ForgetfulFenceStore,
    }
)
