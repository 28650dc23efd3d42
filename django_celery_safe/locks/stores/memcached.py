"""
Locks in the memcached server of a PyMemcacheCache, through our own clients.

Django's HashClient is not used: when it has marked the server as dead, it answers False, which
would look like a lock that is held. A lock is one item, ``<token><holder>``. memcached can only
compare with ``gets`` + ``cas``, so a release overwrites the lock with an item that has already
expired. memcached drops items when it is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar, Final, TypeVar

from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheError, MemcacheServerError, MemcacheUnexpectedCloseError
from pymemcache.pool import ObjectPool

from ...leases.holder import HeldLock, encode_holder, hashed_name, read_lock
from ...leases.lease import Renewals
from .base import Acquired, LockRequest, Store

T = TypeVar("T")

#: Options of Django's client that are not for ours: those of its pool, and of the items' format.
NOT_OURS: Final = {
    *("serde", "serializer", "deserializer"),
    *("max_pool_size", "pool_idle_timeout", "lock_generator"),
}
#: Prefix of a lock's name in its key.
PREFIX: Final = "celery_safe:lock:"
#: The result of ``gets`` for every item on a server without compare-and-set.
NO_CAS: Final = b"0"
#: Tick of the server's clock, s.
TICK: Final = 1
#: Expiry that removes an item at once, like DELETE.
GONE: Final = -1


class MemcachedStore(Store):
    """Locks in one memcached server."""

    #: memcached's clock ticks once a second: a lease of 1 s may end at once.
    shortest_lease: ClassVar[float] = 2.0
    #: memcached reads an expiry of more than 30 days as a timestamp, usually one in the past.
    longest_lease: ClassVar[float] = 30 * 24 * 3600.0 - TICK
    early: ClassVar[float] = 1.0
    weakness: ClassVar[str] = (
        "memcached forgets items when it is full and all of them when it restarts"
    )
    #: The last three: what answered is no memcached.
    client_errors = (MemcacheError, OSError, ValueError, TypeError, LookupError)

    def __init__(self, alias: str, cache: Any) -> None:
        self.where = f'CACHES["{alias}"] (memcached)'
        self._cache = cache
        (self._server,) = cache._cache.clients.values()
        given = {**cache._cache.default_kwargs, "default_noreply": False}
        self._options = {name: given[name] for name in given.keys() - NOT_OURS}
        #: Connections: as many as threads that were busy at the same time.
        self._pool = ObjectPool(self._connect, after_remove=Client.close)

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        name, token = request.name, request.token
        key, value = self._key(name), (token + encode_holder(name, request.holder)).encode()
        expire = _expiry(request.seconds)
        if self._use("acquire", lambda client: client.add(key, value, expire=expire)):
            return Acquired(None)
        # None: its holder released it in between: report it as held a moment ago.
        lock = self._find("acquire", name) or HeldLock(name)
        return Acquired(None) if lock.token == token else lock

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        return self._replace("release", name, token, GONE)

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        return [
            self._replace("extend", name, token, _expiry(seconds), within)
            for name, token, seconds in renewals
        ]

    def peek(self, name: str) -> HeldLock | None:
        return self._find("peek", name)

    def ask_time(self) -> float:
        # Whole seconds, of a clock that may be a tick behind: use the middle of the range.
        return float(int(self._use("tell the time", Client.stats)[b"time"]) + TICK)

    def close(self) -> None:
        while self._pool.free:  # if another thread takes the last one, a new one is closed
            self._pool.destroy(self._pool.get())

    def _find(self, action: str, name: str) -> HeldLock | None:
        key = self._key(name)
        value = self._use(action, lambda client: client.get(key))
        return None if value is None else read_lock(name, value.decode("utf-8", "replace"))

    def _replace(
        self, action: str, name: str, token: str, expire: int, within: float | None = None
    ) -> bool:
        """Overwrite the lock if ``token`` holds it: with nothing if it is to go, or with itself."""
        key, was_ours = self._key(name), False

        def replace(client: Client) -> bool:
            nonlocal was_ours
            while True:
                found, unique = client.gets(key)
                if found is None or not found.startswith(token.encode()):
                    # A release, and the lock disappeared after we saw it: the first try, whose
                    # answer was lost, freed it, or its lease expired at this moment.
                    return was_ours and expire == GONE
                was_ours = True
                if unique == NO_CAS:
                    raise MemcacheServerError("it was started with -C, without compare-and-set")
                # Otherwise the item changed in between: our own renewal wrote it, or the lease
                # expired and someone else holds the lock.
                if client.cas(key, b"" if expire == GONE else found, unique, expire=expire):
                    return True

        return self._use(action, replace, within)

    def _use(self, action: str, ask: Callable[[Client], T], within: float | None = None) -> T:
        """
        Ask the server; ask again if an idle connection broke, as in a restart of the server.

        Args:
            within: Longest time for each step, s, on a connection for this use; None: the cache's.
        """
        with self.errors(action):
            if within is not None:
                with closing(self._connect(within)) as client:
                    return ask(client)
            while True:
                is_idle = bool(self._pool.free)
                try:
                    # A late answer would be taken for another request's.
                    with self._pool.get_and_release(destroy_on_fail=True) as client:
                        return ask(client)
                except (ConnectionError, MemcacheUnexpectedCloseError):
                    if not is_idle:
                        raise

    def _connect(self, within: float = math.inf) -> Client:
        options = dict(self._options)
        for timeout in ("connect_timeout", "timeout") if within < math.inf else ():
            own = options.get(timeout)
            options[timeout] = within if own is None else min(own, within)
        return Client(self._server.server, **options)

    def _key(self, name: str) -> str:
        # A key has 250 bytes at the most, and KEY_PREFIX may be long.
        return str(self._cache.make_key(PREFIX + hashed_name(name)))


def _expiry(seconds: float) -> int:
    # The server's clock ticks once a second, and sometimes twice at once, so an item may live
    # up to two seconds less. The added TICK makes up for one second, and `early` for the other.
    return math.ceil(seconds) + TICK
