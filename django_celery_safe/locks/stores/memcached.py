"""
Locks in the memcached server of a PyMemcacheCache, through our own client.

Django's HashClient is not used: when it has marked the server as dead, it answers False, which
would look like a lock that is held. A lock is one item, ``<token><holder>``. memcached can only
compare with ``gets`` + ``cas``, so a release overwrites the lock with an item that has already
expired. memcached drops items when it is full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pymemcache.client.base import Client, PooledClient
from pymemcache.client.retrying import RetryingClient
from pymemcache.exceptions import (
    MemcacheError,
    MemcacheServerError,
    MemcacheUnexpectedCloseError,
    MemcacheUnknownCommandError,
)
from pymemcache.pool import ObjectPool

from ...leases.holder import HeldLock, encode_holder, hashed_name, plain_name, read_lock
from ...leases.store import Renewable
from .base import Acquired, LockRequest, Store

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Pool options that Django's client may have.
POOLED: Final = ("max_pool_size", "pool_idle_timeout", "lock_generator")
#: Options for how long a client waits for the server, s.
TIMEOUTS: Final = ("connect_timeout", "timeout")
#: Prefix of a lock's name in its key.
PREFIX: Final = "celery_safe:lock:"
#: How many times to try to acquire or read a lock that appears and disappears in between.
TRIES: Final = 5
#: The result of ``gets`` for every item on a server without compare-and-set.
NO_CAS: Final = b"0"
#: Longest key that memcached accepts, bytes.
LONGEST_KEY: Final = 250
#: Idle connections that the pool may keep: one for each thread that was busy at the same time.
MOST_IDLE: Final = 20
#: Tick of the server's clock, s.
TICK: Final = 1
#: Expiry that removes an item at once, like DELETE.
GONE: Final = -1


class MemcachedStore(Store):
    """Locks in one memcached server."""

    fences: ClassVar[bool] = False
    lists: ClassVar[bool] = False
    #: memcached's clock ticks once a second: a lease of 1 s may end at once.
    shortest_lease: ClassVar[float] = 2.0
    #: memcached reads an expiry of more than 30 days as a timestamp, usually one in the past.
    longest_lease: ClassVar[float] = 30 * 24 * 3600.0 - TICK
    early: ClassVar[float] = 1.0
    weakness: ClassVar[str] = (
        "memcached forgets items when it is full and all of them when it restarts"
    )

    client_errors = (MemcacheError, OSError)

    def __init__(self, alias: str, cache: Any) -> None:
        self.where = f'CACHES["{alias}"] (memcached)'
        self._cache: BaseCache = cache
        (self._server,) = cache._cache.clients.values()
        options = {**cache._cache.default_kwargs, "default_noreply": False}
        for ours in ("serde", "serializer", "deserializer", *POOLED):
            options.pop(ours, None)
        self._options = options
        self._prefix = self._server.key_prefix
        # After a restart of the server, the first command on each connection finds it closed.
        self._client = RetryingClient(
            _make_client(self._server.server, options),
            attempts=MOST_IDLE + 1,
            retry_for=(ConnectionError, MemcacheUnexpectedCloseError),
        )

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        name, token = request.name, request.token
        key, value = self._key(name), (token + encode_holder(name, request.holder)).encode()
        with self.errors("acquire"):
            for _ in range(TRIES):
                if self._client.add(key, value, expire=_expiry(request.seconds)):
                    return Acquired(None)
                lock = self._find(name)
                if lock is not None:
                    return Acquired(None) if lock.token == token else lock
        # Others acquired and released it each time: report it as held a moment ago.
        return HeldLock(name)

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self.errors("release"):
            return self._replace(self._client, name, token, b"", GONE)

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        with self.errors("extend"), self._client_within(within) as client:
            return [
                self._replace(client, r.name, r.token, None, _expiry(r.seconds)) for r in renewals
            ]

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            return self._find(name)

    def emptied_with(self) -> object:
        return self._server.server

    def ask_time(self) -> float:
        with self.errors("tell the time"):
            now = int(self._client.stats()[b"time"])
        # Whole seconds, of a clock that may be a tick behind: use the middle of the range.
        return float(now + TICK)

    def _find(self, name: str) -> HeldLock | None:
        key = self._key(name)
        value = self._client.get(key)
        if value is None:
            return None
        # The sign of the remaining time differs between versions; before 1.6 there is no "me".
        left = None
        with suppress(MemcacheUnknownCommandError):
            entry = self._client.raw_command(b"me " + self._client.check_key(key))
            left = re.search(rb" exp=-?(\d+)", entry)
        return _read_lock(name, value, None if left is None else float(left[1]) - TICK)

    @contextmanager
    def _client_within(self, within: float | None) -> Iterator[Any]:
        """Yield a client whose timeouts are ``within`` seconds at most; None: as configured."""
        if within is None:
            yield self._client
            return
        # A new connection for this use: the pooled connections have the cache's timeouts.
        given = [self._options.get(name) for name in TIMEOUTS]
        waits = [within if own is None else min(own, within) for own in given]
        options = {**self._options, **dict(zip(TIMEOUTS, waits, strict=True))}
        with closing(Client(self._server.server, **options)) as client:
            yield client

    def _replace(
        self, client: Any, name: str, token: str, value: bytes | None, expire: int
    ) -> bool:
        """Overwrite the lock if ``token`` holds it; ``value`` None: rewrite the current value."""
        key = self._key(name)
        was_ours = False
        while True:
            found, unique = client.gets(key)
            if found is None or not found.startswith(token.encode()):
                # A release, and the lock disappeared after we saw it: the client's first try,
                # whose answer was lost, freed it, or its lease expired at this moment.
                return was_ours and expire == GONE
            was_ours = True
            if unique == NO_CAS:
                raise MemcacheServerError("it was started with -C, without compare-and-set")
            if client.cas(key, found if value is None else value, unique, expire=expire):
                return True
            # The item changed in between: our own renewal wrote it, or the lease expired and
            # someone else holds the lock.

    def _key(self, name: str) -> str:
        key = str(self._cache.make_key(PREFIX + plain_name(name)))
        if len(key.encode()) + len(self._prefix) <= LONGEST_KEY:
            return key
        # KEY_PREFIX is long; the limit for names leaves about 50 characters for it.
        return str(self._cache.make_key(PREFIX + hashed_name(name)))


class _Pool(ObjectPool):  # type: ignore[misc]
    """A pool that closes each connection whose use was interrupted."""

    @contextmanager
    def get_and_release(self, destroy_on_fail: bool = False) -> Iterator[Any]:
        # The original neither closes nor returns a connection when gevent's Timeout or a
        # SystemExit hits.
        client = self.get()
        try:
            yield client
        except BaseException:
            self.destroy(client)
            raise
        self.release(client)


def _make_client(server: Any, options: dict[str, Any]) -> PooledClient:
    client = PooledClient(server, **options)
    client.client_pool = _Pool(client._create_client, after_remove=lambda one: one.close())
    return client


def _expiry(seconds: float) -> int:
    # The server's clock ticks once a second, and sometimes twice at once, so an item may live
    # up to two seconds less. The added TICK makes up for one second, and `early` for the other.
    return math.ceil(seconds) + TICK


def _read_lock(name: str, value: bytes, remaining: float | None = None) -> HeldLock:
    left = None if remaining is None else max(0.0, remaining)
    return read_lock(name, value.decode("utf-8", "replace"), left)
