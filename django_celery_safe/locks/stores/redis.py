"""
Locks in Redis, through the connection of django-redis or Django's RedisCache.

A lock is one key: ``<token><fence> <holder>``, with PX as its lease. Beside it
stand one counter for fences and one sorted set, scored by the end of each lease
(ms by the server's clock), that lists the keys. Each step is one script, so a
lock, its fence and its place in the list never disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError, RedisError

from ...exceptions import LockBackendError, describe_error
from .base import (
    Acquired,
    HeldLock,
    Holder,
    Renewal,
    Store,
    decode_holder,
    encode_holder,
    plain_name,
)

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Characters of a token: a hexadecimal UUID.
TOKEN_LENGTH: Final = 32
#: Keys that one step of the listing reads.
PAGE: Final = 1000


class Script:
    """A Lua script and its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


# The fence is the larger of last + 1 and the server's time in µs, so it grows
# even when the counter was lost with the server's memory. Doubles are exact up
# to 2^53, which µs since the epoch reach in the year 2255.
ACQUIRE = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence = math.max((tonumber(redis.call('GET', KEYS[2])) or 0) + 1, now)
local text = string.format('%.0f', fence)
if not redis.call('SET', KEYS[1], ARGV[1] .. text .. ' ' .. ARGV[3], 'NX', 'PX', ARGV[2]) then
    return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
end
redis.call('SET', KEYS[2], text)
now = math.floor(now / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('ZADD', KEYS[3], now + ARGV[2], KEYS[1])
return fence
""")

RELEASE = Script("""
local value = redis.call('GET', KEYS[1])
if not value or string.sub(value, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], KEYS[1])
return 1
""")

# KEYS: the list, then the locks; ARGV: token and lease of each lock in turn.
EXTEND = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local extended = {}
for i = 2, #KEYS do
    local token, lease = ARGV[2 * i - 3], ARGV[2 * i - 2]
    local value = redis.call('GET', KEYS[i])
    extended[i - 1] = 0
    if value and string.sub(value, 1, #token) == token then
        redis.call('PEXPIRE', KEYS[i], lease)
        redis.call('ZADD', KEYS[1], now + lease, KEYS[i])
        extended[i - 1] = 1
    end
end
return extended
""")

PEEK = Script("""
return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
""")

# One page of the list: members with a live lease, from an offset.
PAGE_OF_LOCKS = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local keys = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf',
    'WITHSCORES', 'LIMIT', ARGV[1], ARGV[2])
return {now, keys}
""")


class RedisStore(Store):
    """Locks in one Redis database."""

    def __init__(self, alias: str, cache: BaseCache) -> None:
        self.where = f'CACHES["{alias}"] (redis)'
        self._cache = cache
        self._client = _client_of(cache)
        self._fence_key = self._make_key("celery_safe:fence")
        self._index_key = self._make_key("celery_safe:locks")

    def acquire(self, name: str, token: str, seconds: float, holder: Holder) -> Acquired | HeldLock:
        key = self._key(name)
        answer = self._run(
            "acquire",
            ACQUIRE,
            (key, self._fence_key, self._index_key),
            (token, _milliseconds(seconds), encode_holder(name, holder)),
        )
        if isinstance(answer, int):
            return Acquired(answer)
        # Held, unless the value went between SET and GET, which one script rules out.
        lock = _read_lock(name, *answer)
        return Acquired(lock.fence) if lock.token == token else lock

    def release(self, name: str, token: str) -> bool:
        return bool(self._run("release", RELEASE, (self._key(name), self._index_key), (token,)))

    def extend(self, renewals: Sequence[Renewal]) -> list[bool]:
        if not renewals:
            return []
        keys = [self._index_key, *(self._key(renewal.name) for renewal in renewals)]
        args = [x for r in renewals for x in (r.token, _milliseconds(r.seconds))]
        return [bool(extended) for extended in self._run("extend", EXTEND, keys, args)]

    def peek(self, name: str) -> HeldLock | None:
        value, milliseconds = self._run("peek", PEEK, (self._key(name),), ())
        return None if value is None else _read_lock(name, value, milliseconds)

    def iter_locks(self) -> Iterator[HeldLock]:
        offset, seen = 0, 0
        while True:
            now, flat = self._run("list", PAGE_OF_LOCKS, (self._index_key,), (offset, PAGE))
            ends = dict(zip(flat[::2], flat[1::2], strict=True))
            if not ends:
                return
            with self.errors("list"):
                values = self._client.mget(list(ends))
            for (key, end), value in zip(ends.items(), values, strict=True):
                # None: released since, or lost by the server without the list.
                if value is not None:
                    yield _read_lock(_text(key), value, max(float(end) - now, 0))
            seen += len(ends)
            offset = seen

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            raise LockBackendError(self.where, action, describe_error(error)) from error

    def _run(self, action: str, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        with self.errors(action):
            try:
                return self._client.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                # First use on this server, or SCRIPT FLUSH, or a restart.
                return self._client.eval(script.source, len(keys), *keys, *args)

    def _key(self, name: str) -> str:
        return self._make_key("celery_safe:lock:" + plain_name(name))

    def _make_key(self, key: str) -> str:
        return str(self._cache.make_key(key))


def _client_of(cache: BaseCache) -> Any:
    """Return the redis-py client that writes for ``cache``."""
    own: Any = cache
    if hasattr(own, "client"):  # django-redis
        return own.client.get_client(write=True)
    # Django makes a new client at each call; one is enough, the pool is the same.
    return own._cache.get_client(None, write=True)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _read_lock(name: str, value: bytes | str, milliseconds: float) -> HeldLock:
    text = _text(value)
    token, rest = text[:TOKEN_LENGTH], text[TOKEN_LENGTH:]
    fence, _, holder = rest.partition(" ")
    lock = HeldLock(
        name,
        token=token,
        # -1: a key without an end, which we never write.
        remaining=milliseconds / 1000 if milliseconds >= 0 else None,
        fence=int(fence) if fence.isdecimal() else None,
    )
    return decode_holder(holder, lock)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
