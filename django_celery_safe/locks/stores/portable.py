"""
Locks in any other cache that processes share, based only on ``add``.

Such a cache can't compare and delete in one step, so a release first reads who holds the
lock, and deletes nothing in the last seconds of a lease, when someone else might hold the
lock a moment later. Mutual exclusion depends on the cache's ``add``. Redis, memcached and
databases have better stores.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, ClassVar, Final

from django.core.cache import caches

from ...exceptions import LockBackendError
from ...leases.holder import HeldLock, encode_holder, plain_name, read_lock
from ...leases.lease import Renewals
from .base import Acquired, LockRequest, Store

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: How many times to try to acquire a lock that appears and disappears in between, and the
#: longest pause between two tries, s.
TRIES: Final = 5
PAUSE: Final = 0.01
#: A lock with less of its lease left than this, s, is not deleted but left to expire.
NO_DELETE: Final = 3.0


class PortableStore(Store):
    """Locks in a cache that is only known to have Django's cache API."""

    #: A lock with a shorter lease would never be freed before its end, see NO_DELETE;
    #: caches count whole seconds.
    shortest_lease: ClassVar[float] = 5.0
    early: ClassVar[float] = 1.0
    weakness: ClassVar[str] = (
        "nothing is known of this cache, neither whether its add() excludes nor when it drops what "
        "it holds, and a lock is compared and deleted in two steps"
    )

    #: Such a cache may raise any error.
    client_errors = (Exception,)

    def __init__(self, alias: str, cache: BaseCache) -> None:
        self.where = f'CACHES["{alias}"] ({type(cache).__name__})'
        self._alias = alias

    @property
    def _cache(self) -> BaseCache:
        # Django keeps a cache object for each thread; most must not be shared.
        return caches[self._alias]

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        name = request.name
        value = request.token + encode_holder(name, request.holder)
        with self.errors("acquire"):
            for _ in range(TRIES):
                added = self._cache.add(_key(name), value, timeout=math.ceil(request.seconds))
                lock = self._find(name)
                if lock is not None:
                    return Acquired(None) if lock.token == request.token else lock
                if added:
                    break
                # Released in between, unless the cache returns False for a failed request.
                time.sleep(random.uniform(0, PAUSE))  # noqa: S311
        raise LockBackendError(
            self.where, "acquire", "it neither keeps a value that is added nor shows another one"
        )

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self.errors("release"):
            if not self._is_held_by(name, token):
                return False
            if remaining is None or remaining > NO_DELETE:
                self._cache.delete(_key(name))
        return True

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        with self.errors("extend"):
            return [self._extend(*renewal) for renewal in renewals]

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            return self._find(name)

    def _extend(self, name: str, token: str, seconds: float) -> bool:
        # Checked again afterwards, because touch() may have extended another holder's lock.
        # Extending that lock does less harm than letting two processes rely on one lock.
        return (
            self._is_held_by(name, token)
            and self._cache.touch(_key(name), timeout=math.ceil(seconds))
            and self._is_held_by(name, token)
        )

    def _is_held_by(self, name: str, token: str) -> bool:
        return str(self._cache.get(_key(name), "")).startswith(token)

    def _find(self, name: str) -> HeldLock | None:
        value = self._cache.get(_key(name))
        return None if value is None else read_lock(name, str(value))


def _key(name: str) -> str:
    return "celery_safe:lock:" + plain_name(name)
