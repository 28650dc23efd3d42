"""
Locks in one memcached server, through a client of our own to the server of PyMemcacheCache.

Not through Django's: its HashClient answers False, as for a lock that is held,
when it has marked the server as dead. A lock is one item, ``<token><holder>``.
memcached can compare only by ``gets`` + ``cas``, so a lock is released by writing
an item over it that has expired already. It forgets items when it is full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pymemcache.client.base import Client, PooledClient
from pymemcache.client.retrying import RetryingClient
from pymemcache.exceptions import MemcacheError, MemcacheServerError, MemcacheUnexpectedCloseError
from pymemcache.pool import ObjectPool

from ...leases.holder import HeldLock, Holder, encode_holder, hashed_name, plain_name, read_lock
from ...leases.store import Renewable
from .base import Acquired, Store

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Options of a pool, which Django's client may have.
POOLED: Final = ("max_pool_size", "pool_idle_timeout", "lock_generator")
#: Options that say how long a client waits for the server, s.
TIMEOUTS: Final = ("connect_timeout", "timeout")
#: What stands before a lock's name in its key.
PREFIX: Final = "celery_safe:lock:"
#: How often a lock that comes and goes is tried to be taken or read.
TRIES: Final = 5
#: What ``gets`` gives for every item on a server without compare-and-set.
NO_CAS: Final = b"0"
#: Longest key that memcached takes, bytes.
LONGEST_KEY: Final = 250
#: Connections that may lie idle in the pool, one for each thread that was busy at once.
MOST_IDLE: Final = 20
#: Tick of the server's clock, s.
TICK: Final = 1
#: Expiry of an item that is gone at once, as for DELETE.
GONE: Final = -1


class MemcachedStore(Store):
    """Locks in one memcached server."""

    fences: ClassVar[bool] = False
    lists: ClassVar[bool] = False
    #: memcached's clock ticks once a second: a lease of 1 s may end at once.
    shortest_lease: ClassVar[float] = 2.0
    #: Beyond 30 days it takes an expiry for a moment, and most often one in the past.
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
        # The first commands after a restart of the server find their connections closed.
        self._client = RetryingClient(
            _make_client(self._server.server, options),
            attempts=MOST_IDLE + 1,
            retry_for=(ConnectionError, MemcacheUnexpectedCloseError),
        )

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        key, value = self._key(name), (token + encode_holder(name, holder)).encode()
        with self.errors("acquire"):
            for _ in range(TRIES):
                if self._client.add(key, value, expire=_expiry(seconds)):
                    return Acquired(None)
                lock = self._find(name)
                if lock is not None:
                    return Acquired(None) if lock.token == token else lock
        # Taken by others and released each time: as good as held a moment ago.
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
            told = int(self._client.stats()[b"time"])
        # Whole seconds of a clock that may be a tick behind: the middle of what it can be.
        return float(told + TICK)

    def _find(self, name: str) -> HeldLock | None:
        key = self._key(name)
        value = self._client.get(key)
        if value is None:
            return None
        entry = self._client.raw_command(b"me " + self._client.check_key(key))
        # The sign of what is left differs between versions; before 1.6 there is no "me".
        left = re.search(rb" exp=-?(\d+)", entry)
        return _read_lock(name, value, None if left is None else float(left[1]) - TICK)

    @contextmanager
    def _client_within(self, within: float | None) -> Iterator[Any]:
        """Give a client that waits ``within`` s at a time for the server, if that is less."""
        if within is None:
            yield self._client
            return
        # A connection for this use: the others' timeouts are what the cache's options say.
        given = [self._options.get(name) for name in TIMEOUTS]
        waits = [within if own is None else min(own, within) for own in given]
        options = {**self._options, **dict(zip(TIMEOUTS, waits, strict=True))}
        with closing(Client(self._server.server, **options)) as client:
            yield client

    def _replace(
        self, client: Any, name: str, token: str, value: bytes | None, expire: int
    ) -> bool:
        """Write over the lock if ``token`` holds it; ``value`` None: what is there already."""
        key = self._key(name)
        was_ours = False
        while True:
            found, unique = client.gets(key)
            if found is None or not found.startswith(token.encode()):
                # To be freed, and gone after it was seen: by a first try of the client, whose
                # answer got lost, or by its end at this very moment.
                return was_ours and expire == GONE
            was_ours = True
            if unique == NO_CAS:
                raise MemcacheServerError("it was started with -C, without compare-and-set")
            if client.cas(key, found if value is None else value, unique, expire=expire):
                return True
            # Written since: by a renewal of ours, or it ended and someone else has it.

    def _key(self, name: str) -> str:
        key = str(self._cache.make_key(PREFIX + plain_name(name)))
        if len(key.encode()) + len(self._prefix) <= LONGEST_KEY:
            return key
        # A long KEY_PREFIX; the limit for names leaves it some 50 characters.
        return str(self._cache.make_key(PREFIX + hashed_name(name)))


class _Pool(ObjectPool):  # type: ignore[misc]
    """Connections of which each that was interrupted is closed."""

    @contextmanager
    def get_and_release(self, destroy_on_fail: bool = False) -> Iterator[Any]:
        # The original lets go of neither kind when gevent's Timeout or a SystemExit hits.
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
    # Its clock ticks once a second, and now and then twice at once: an item lives for up
    # to two seconds less. One of them is made up for here, the other one is `early`.
    return math.ceil(seconds) + TICK


def _read_lock(name: str, value: bytes, remaining: float | None = None) -> HeldLock:
    left = None if remaining is None else max(0.0, remaining)
    return read_lock(name, value.decode("utf-8", "replace"), left)
