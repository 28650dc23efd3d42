"""
Locks in Redis, through the connection of django-redis or Django's RedisCache.

A lock is one key: ``<token><fence><holder>``, with PX as its lease. Beside it
stand one counter for fences and one sorted set, scored by the end of each lease
(ms by the server's clock), that lists the keys. Each step is one script, so a
lock, its fence and its place in the list never disagree.

A waiter leaves a mark, and then sends two commands at once: a blocking pop, and
behind it the acquisition, which the server runs when the pop ends. A release that
sees the mark pushes one element, so it wakes the one who has waited longest, and
the lock is his before any client has heard of it.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from redis.exceptions import NoScriptError, RedisError

from ...exceptions import (
    BackendNotSupported,
    CelerySafeError,
    LockBackendError,
    describe_error,
)
from ...leases.holder import (
    GARBLED,
    TOKEN_LENGTH,
    HeldLock,
    Holder,
    decode_holder,
    decode_holders,
    encode_holder,
    plain_name,
)
from ...leases.store import Renewable
from .base import Acquired, Eviction, Store
from .wire import PlainWire, Wire

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Characters of a fence: the server's time in µs.
FENCE_LENGTH: Final = 16
#: Characters of a value before its holder.
HEAD_LENGTH: Final = TOKEN_LENGTH + FENCE_LENGTH
#: Keys that one step of the listing reads, and that one script extends.
PAGE: Final = 1000
#: A waiter whose lease would be shorter than this, s, asks again and again: the time of
#: the pop is taken off the time for which it may trust the lease.
SHORTEST_WOKEN: Final = 1.0
#: How late the server may end a pop, s: it looks ten times a second.
LATE: Final = 0.1
#: Shortest pop, s, and the longest; half the socket timeout if that is less.
SHORTEST_POP: Final = 0.05
LONGEST_POP: Final = 1.0
#: How long a waiter's mark lasts, ms: a pop, and the way there and back.
MARK_LASTS: Final = "2000"


class Script:
    """A Lua script and its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


# A command that the server refuses (an ACL, a key of another type) ends a script where it
# stands, and nothing is undone. So SET comes last, when nothing can fail any more, and what
# comes after the end of a lock (the list, the waiter) is asked by pcall, and costs it nothing.
#
# The fence is the larger of last + 1 and the server's time in µs, so it grows
# even when the counter was lost with the server's memory. It is kept as text of
# 16 digits (until the year 2286), which compares as the number does: turning
# numbers into text is what costs most in a script as short as this. A try that
# fails uses up a number, which harms nothing, and fails on a replica at once. Keys
# that nobody released are taken off the list in about one of a hundred acquisitions.
ACQUIRE = Script("""
local index = KEYS[3]
local time = redis.call('TIME')
local fence = time[1] .. string.sub(time[2] + 1000000, 2)
local last = redis.call('GETSET', KEYS[2], fence)
if last and last >= fence then
    fence = string.format('%.0f', last + 1)
    redis.call('SET', KEYS[2], fence)
end
local value = redis.call('GET', KEYS[1])
if value then
    if (ARGV[4] or '') ~= '' then
        redis.call('SET', KEYS[1] .. ' waiting', '', 'PX', ARGV[4])
    end
    return {value, redis.call('PTTL', KEYS[1])}
end
redis.call('ZADD', index, time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], KEYS[1])
if string.sub(fence, -2) == '00' then
    -- Not worth an acquisition: the doctor tells of a user who may not.
    redis.pcall('ZREMRANGEBYSCORE', index, '-inf', time[1] * 1000)
end
redis.call('SET', KEYS[1], ARGV[1] .. fence .. ARGV[3], 'PX', ARGV[2])
return fence
""")

# KEYS: the lock, the list, and another lock that is looked at, if one is wanted. Names have
# no space, so no lock is called like another's mark or list.
RELEASE = Script("""
local other = KEYS[3] and redis.pcall('EXISTS', KEYS[3]) == 1 and 1 or 0
local value = redis.call('GET', KEYS[1])
if not value or string.sub(value, 1, 32) ~= ARGV[1] then return {0, other} end
redis.call('DEL', KEYS[1])
-- Also when it is handed on: the waiter may be gone.
redis.pcall('ZREM', KEYS[2], KEYS[1])
if redis.pcall('EXISTS', KEYS[1] .. ' waiting') == 1 then
    local wake = KEYS[1] .. ' wake'
    if redis.pcall('RPUSH', wake, '') ~= 1 then redis.pcall('LTRIM', wake, 0, 0) end
    redis.pcall('PEXPIRE', wake, 1000)
end
return {1, other}
""")

# KEYS: the list, then the locks; ARGV: all tokens without anything in between, and all
# leases with spaces, since a client takes its time over each argument. Answers with
# the places, from 0, of the locks that were not extended.
EXTEND = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local each_lease = string.gmatch(ARGV[2], '%d+')
local lost = {}
for i = 2, #KEYS do
    local token, lease = string.sub(ARGV[1], 32 * i - 63, 32 * i - 32), each_lease()
    -- A key of another type must not cost the other leases.
    local value = redis.pcall('GET', KEYS[i])
    if type(value) == 'string' and string.sub(value, 1, 32) == token then
        redis.call('PEXPIRE', KEYS[i], lease)
        -- Nor must the list, which is for people.
        redis.pcall('ZADD', KEYS[1], now + lease, KEYS[i])
    else
        lost[#lost + 1] = i - 2
    end
end
return lost
""")

PEEK = Script("""
return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
""")

# One step through the list, and the time. Whatever is on the list all the while is in
# one of the steps, however much comes, goes or is renewed meanwhile.
PAGE_OF_LOCKS = Script("""
local time = redis.call('TIME')
local page = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {time[1] * 1000 + math.floor(time[2] / 1000), page[1], page[2]}
""")


#: Each command that a user of the server needs for locks, with arguments that harm nothing:
#: ``{key}``, ``{index}`` and ``{wake}`` are keys that are gone at the end.
HARMLESS: Final = (
    "TIME", "GET {key}", "MGET {key}", "GETSET {key} x", "SET {key} x PX 1", "EXISTS {key}",
    "ZADD {index} 1 x", "ZSCAN {index} 0", "ZREMRANGEBYSCORE {index} -inf 0", "ZREM {index} x",
    "RPUSH {wake} x", "PEXPIRE {wake} 1000", "PTTL {wake}", "LTRIM {wake} 0 0", "BLPOP {wake} 0.05",
    "EVAL return 0", f"EVALSHA {'0' * 40} 0", "DEL {key} {index} {wake}",
)  # fmt: skip
#: These commands, as an ACL names them.
COMMANDS: Final = tuple(sorted(command.split()[0].lower() for command in HARMLESS))

#: How the server and redis-py say that it will not do something; what that means, as a
#: clause; and what to do, as a sentence.
REFUSALS: Final = {
    r"\b(READONLY|ReadOnlyError)\b": (
        "this server is a replica, which takes no writes",
        "Let the cache's LOCATION name the primary, or ask Sentinel for it.",
    ),
    r"\b(NOPERM|NoPermissionError|ACL failure|The user executing the script can't)\b": (
        "its ACL does not let this user do what locks need",
        "Allow its user what `manage.py celery_locks doctor` says is missing.",
    ),
    r"\b(AuthenticationError|NOAUTH|WRONGPASS)\b": (
        "it does not take this user and password",
        "See the user and the password in the cache's settings.",
    ),
    r"\b(OOM|OutOfMemoryError)\b": (
        "its memory is full, and its maxmemory-policy lets it delete nothing",
        "Raise the server's maxmemory, or give the locks a server of their own.",
    ),
    r"\b(MISCONF|NOREPLICAS)\b": (
        "it takes no writes while it can't save or replicate them",
        "See the server's log, its disk and its replicas.",
    ),
    r"\b(WRONGTYPE)\b": (
        "a key of the locks holds something that this app did not write",
        "Give the locks a database number of their own, or another KEY_PREFIX.",
    ),
}
#: Errors that only a node of Redis Cluster gives.
OF_CLUSTER: Final = re.compile(
    r"\b(CROSSSLOT|MOVED|CLUSTERDOWN|ClusterCrossSlotError|MovedError|ClusterDownError)\b"
)
USE_SINGLE: Final = (
    "Use one Redis for the locks, or a primary with replicas behind Sentinel, or set "
    "LOCK_DATABASE to a database alias."
)
NO_CLUSTER: Final = (
    "it is a Redis Cluster, whose nodes refuse scripts that use keys of several slots: a lock, "
    "its counter and the list are three keys"
)


class RedisStore(Store):
    """Locks in one Redis database."""

    wakes: ClassVar[bool] = True
    #: The client that sends the commands; PlainWire keeps no connections of its own.
    wire_class: ClassVar[type[PlainWire]] = Wire
    client_errors = (RedisError, OSError)
    refusals = REFUSALS

    def __init__(self, alias: str, cache: BaseCache) -> None:
        self.where = f'CACHES["{alias}"] (redis)'
        client = _client_of(cache)
        # A client for Redis Cluster has a pool for each node, and none of its own.
        if not hasattr(client, "connection_pool"):
            raise BackendNotSupported(self.where, NO_CLUSTER, USE_SINGLE)
        self._pool = client.connection_pool
        self._wire = self.wire_class(client)
        timeout = self._pool.connection_kwargs.get("socket_timeout")
        self._longest_pop = LONGEST_POP if timeout is None else min(LONGEST_POP, timeout / 2)
        self._fence_key = str(cache.make_key("celery_safe:fence"))
        self._index_key = str(cache.make_key("celery_safe:locks"))
        # Kept, since each lock is asked about at least twice.
        self._key = lru_cache(maxsize=10_000)(partial(_lock_key, cache))

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        keys = [self._key(name), self._fence_key, self._index_key]
        args = [token, _milliseconds(seconds), encode_holder(name, holder)]
        ask = self._wire.ask
        if patience is not None:
            args.append(MARK_LASTS)
            if patience:
                ask = partial(self._wire.ask_after_pop, keys[0] + " wake", patience)
        answer = self._run("acquire", ACQUIRE, keys, args, ask)
        if not isinstance(answer, list):
            return Acquired(int(answer))
        # Held, unless the value went between SET and GET, which one script rules out.
        lock = _read_lock(name, *answer)
        return Acquired(lock.fence) if lock.token == token else lock

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        return self._release([self._key(name), self._index_key], token, remaining)[0]

    def release_and_peek(
        self, name: str, token: str, other: str, remaining: float | None = None
    ) -> tuple[bool, bool]:
        keys = [self._key(name), self._index_key, self._key(other)]
        return self._release(keys, token, remaining)

    def _release(self, keys: list[str], token: str, remaining: float | None) -> tuple[bool, bool]:
        answer, is_repeated = self._run("release", RELEASE, keys, [token], self._wire.ask_counted)
        released, other = map(bool, answer)
        # It was held when the first try was sent, whose answer is lost: that has freed it.
        return released or (is_repeated and remaining is not None and remaining > 0), other

    def wait(self, left: float, held_for: float, tries: int, seconds: float) -> float:
        if left <= 2 * LATE or seconds < SHORTEST_WOKEN:
            return super().wait(left, held_for, tries, seconds)
        # Of lengths of their own: else those whose pops end at the wrong moments, each time
        # a moment before a release, would always be last.
        longest = min(seconds / 4, self._longest_pop) * random.uniform(0.7, 1.0)  # noqa: S311
        return min(left - LATE, max(held_for, SHORTEST_POP), longest)

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        extended = [True] * len(renewals)
        # In pages, so that a server with tens of thousands does not stand still.
        for start in range(0, len(renewals), PAGE):
            for place in self._extend_page(renewals[start : start + PAGE], within):
                extended[start + place] = False
        return extended

    def _extend_page(self, renewals: Sequence[Renewable], within: float | None) -> list[int]:
        """Return the places of those that are not ours any more."""
        keys = [self._index_key, *[self._key(renewal.name) for renewal in renewals]]
        tokens = "".join([renewal.token for renewal in renewals])
        leases = " ".join([_milliseconds(renewal.seconds) for renewal in renewals])
        ask = partial(self._wire.ask, within=within)
        lost: list[int] = self._run("extend", EXTEND, keys, (tokens, leases), ask)
        return lost

    def peek(self, name: str) -> HeldLock | None:
        value, milliseconds = self._run("peek", PEEK, [self._key(name)], [])
        return None if value is None else _read_lock(name, value, milliseconds)

    def iter_locks(self) -> Iterator[HeldLock]:
        cursor = "0"
        while True:
            now, after, flat = self._run(
                "list", PAGE_OF_LOCKS, [self._index_key], [cursor, str(PAGE)]
            )
            keys, ends = flat[::2], flat[1::2]
            if keys:
                with self.errors("list"):
                    values = self._wire.ask("MGET", *keys)
                yield from _read_page(
                    (key, value, float(end) - now)
                    for key, end, value in zip(keys, ends, values, strict=True)
                    # None: freed or ended, or lost by the server without the list.
                    if value is not None
                )
            cursor = after.decode()
            if cursor == "0":
                return

    def emptied_with(self) -> object:
        kept = self._pool.connection_kwargs
        service = getattr(self._pool, "service_name", None)  # Sentinel
        return service, kept.get("host"), kept.get("port"), kept.get("path"), kept.get("db") or 0

    def ask_eviction(self) -> Eviction:
        action = "tell how it evicts keys"
        with self.errors(action):
            answer = self._wire.ask("INFO", "memory").decode()
        info = dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)
        policy = info.get("maxmemory_policy")
        if policy is None:
            raise LockBackendError(self.where, action, "its INFO says nothing of it")
        return Eviction(policy, int(info.get("maxmemory", "0")), policy == "noeviction")

    def ask_refused(self) -> list[str]:
        name = f"doctor:{uuid.uuid4().hex}"
        keys = {part: self._key(f"{name}:{part}") for part in ("key", "index", "wake")}
        refused = {}
        for command in HARMLESS:
            words = [word.format(**keys) for word in command.split()]
            try:
                self._wire.ask(*words)
            except NoScriptError:
                continue  # not refused, but not known there yet
            except self.client_errors as error:
                explained = self.explain("try commands", error)
                if not isinstance(explained, LockBackendError) or not explained.hint:
                    raise explained from error
                refused[words[0].lower()] = explained.reason
        return [f"{command} ({reason})" for command, reason in sorted(refused.items())]

    def ask_time(self) -> float:
        with self.errors("tell the time"):
            seconds, microseconds = self._wire.ask("TIME")
        return int(seconds) + int(microseconds) / 1_000_000

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        text = describe_error(error)
        if OF_CLUSTER.search(text):
            return BackendNotSupported(self.where, f"{NO_CLUSTER} ({text})", USE_SINGLE)
        return super().explain(action, error)

    def close(self) -> None:
        self._wire.close()

    def _run(
        self,
        action: str,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str],
        ask: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a script by a method of the wire; None: by :meth:`Wire.ask`."""
        ask = ask or self._wire.ask
        words = (str(len(keys)), *keys, *args)
        # Not through errors(): a context manager costs as much as building the command.
        try:
            try:
                return ask("EVALSHA", script.sha, *words)
            except NoScriptError:  # first use on this server, or SCRIPT FLUSH, or a restart
                return ask("EVAL", script.source, *words)
        except self.client_errors as error:
            raise self.explain(action, error) from error


def _lock_key(cache: BaseCache, name: str) -> str:
    return str(cache.make_key("celery_safe:lock:" + plain_name(name)))


def _client_of(cache: BaseCache) -> Any:
    """Return the redis-py client that writes for ``cache``."""
    own: Any = cache
    if hasattr(own, "client"):  # django-redis
        return own.client.get_client(write=True)
    # Django makes a new client at each call; one is enough, the pool is the same.
    return own._cache.get_client(None, write=True)


@lru_cache(maxsize=100)
def _milliseconds(seconds: float) -> str:
    # Rounded up: a lease must not end before its holder stops to trust it.
    return str(math.ceil(seconds * 1000))


def _read_page(page: Iterable[tuple[bytes, bytes, float]]) -> Iterable[HeldLock]:
    """Return the locks of keys, values and the ms that are left of them."""
    parsed = [
        _parse(key.decode("utf-8", "replace"), value, max(left, 1)) for key, value, left in page
    ]
    try:
        return decode_holders([text for text, _ in parsed], [lock for _, lock in parsed])
    except GARBLED:
        return [decode_holder(*one) for one in parsed]


def _read_lock(name: str, value: bytes, milliseconds: float) -> HeldLock:
    return decode_holder(*_parse(name, value, milliseconds))


def _parse(name: str, value: bytes, milliseconds: float) -> tuple[str, HeldLock]:
    """Return the holder's text and the lock without it."""
    text = value.decode("utf-8", "replace")
    fence = text[TOKEN_LENGTH:HEAD_LENGTH]
    lock = HeldLock(
        name,
        text[:TOKEN_LENGTH],
        # -1: a key without an end, which we never write.
        milliseconds / 1000 if milliseconds >= 0 else None,
        int(fence) if fence.isdecimal() else None,
    )
    return text[HEAD_LENGTH:], lock
