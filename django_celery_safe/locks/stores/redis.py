"""
Locks in Redis, with the connection class and options of the cache's client.

A lock is one key: ``<token><fence><holder>``, with PX as its lease. All locks share one
counter for fences and one sorted set that lists the keys, scored by the end of each lease
(ms by the server's clock). Each step is one script, so a lock, its fence and its place in
the list never disagree.

A lock that several may hold has that many places. Each place is a lock as above, and one
script takes the first free place. All waiters queue at the first place.

A waiter sets a mark, and then sends two commands at once: a blocking pop, and the acquisition,
which the server runs when the pop ends. A release that sees the mark pushes one element. This
wakes the waiter that has waited longest, and the server gives it the lock in the same moment.

In a Redis Cluster all keys have the same hash tag: a script may only use keys of one slot.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, ClassVar, Final

from redis.exceptions import NoScriptError

from ...exceptions import CelerySafeError, ConfigurationError, LockBackendError
from ...leases.holder import (
    PLACE,
    TOKEN_LENGTH,
    HeldLock,
    encode_holder,
    place_name,
    place_names,
    plain_name,
    read_lock,
    split_place,
)
from ...leases.lease import Renewal, Renewals
from ...texts import describe_error
from . import redis_scripts as scripts
from .base import SPARES_LOCKS, Acquired, LockRequest, Store
from .redis_connections import CLIENT_ERRORS, ClusterClient, Connections, Pop

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Characters of a fence: the server's time in µs.
FENCE_LENGTH: Final = 16
#: Characters of a value before its holder.
HEAD_LENGTH: Final = TOKEN_LENGTH + FENCE_LENGTH
#: Keys that one step of the listing reads, and that one script extends.
PAGE: Final = 1000
#: A waiter with a shorter lease than this, s, polls: the time that it spends in a pop is
#: subtracted from the time for which it may trust the lease.
SHORTEST_WOKEN: Final = 1.0
#: How late the server may end a pop, s: it checks ten times a second.
LATE: Final = 0.1
#: Shortest and longest pop, s; no pop is longer than half the socket timeout.
SHORTEST_POP: Final = 0.05
LONGEST_POP: Final = 1.0
#: How long a waiter's mark lasts, ms: a pop, plus the round trip.
MARK_LASTS: Final = "2000"
#: Keys without the cache's prefix: of a lock (its name follows), of the counter, of the list.
LOCK_KEY: Final = "celery_safe:lock:"
FENCE: Final = "celery_safe:fence"
LISTING: Final = "celery_safe:locks"
#: The hash tag of all keys in a Redis Cluster.
TAG: Final = "{celery_safe}"
#: Each command that locks need, with harmless arguments: keys that the last command deletes.
HARMLESS: Final = (
    "TIME", "GET {0}", "MGET {0}", "GETSET {0} x", "SET {0} x PX 1",
    "ZADD {0}:index 1 x", "ZSCAN {0}:index 0", "ZREMRANGEBYSCORE {0}:index -inf 0",
    "ZREM {0}:index x", "RPUSH {0}:wake x", "PEXPIRE {0}:wake 1000", "PTTL {0}:wake",
    "LTRIM {0}:wake 0 0", "BLPOP {0}:wake 0.05", "EVAL return 0", f"EVALSHA {'0' * 40} 0",
    "DEL {0} {0}:index {0}:wake",
)  # fmt: skip

#: Texts with which the server and redis-py refuse a request, each with its meaning (a clause)
#: and advice (a sentence).
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
    # From the nodes of a Redis Cluster, while slots are moved or after a node was lost.
    r"\b(TRYAGAIN|TryAgainError|ASK|AskError|MOVED|MovedError|non local key|TTL exhausted)\b": (
        "the cluster is moving the slot of the locks from node to node, and was not done in time",
        "Try again later; `redis-cli --cluster fix` ends a move that was interrupted.",
    ),
    r"\b(CLUSTERDOWN|ClusterDownError|SlotNotCoveredError|is not covered)\b": (
        "the node of the cluster that has the locks is down, and no other has its slots",
        "See `redis-cli --cluster check`; replicas take over from a node that is lost.",
    ),
}
#: Errors that only a Redis Cluster node returns.
OF_CLUSTER: Final = re.compile(r"\b(CROSSSLOT|MOVED|CLUSTERDOWN|Cluster\w+Error|MovedError)\b")


class RedisStore(Store):
    """Locks in one Redis database, or in one Redis Cluster."""

    carries: ClassVar[bool] = True
    limits: ClassVar[bool] = True
    refusals = REFUSALS
    #: The last four: a server, or what stands before it, answered something else than it should.
    client_errors = (*CLIENT_ERRORS, ValueError, TypeError, AttributeError, LookupError)

    def __init__(self, alias: str, cache: BaseCache) -> None:
        try:
            client = client_of(cache)
        except CLIENT_ERRORS as error:  # only a cluster client connects here; others connect later
            where, reason = f'CACHES["{alias}"] (redis cluster)', describe_error(error)
            raise LockBackendError(where, "connect to the cluster", reason) from error
        # A client of a cluster has a pool for each node.
        in_cluster = hasattr(client, "nodes_manager")
        self.where = f'CACHES["{alias}"] (redis{" cluster" if in_cluster else ""})'
        self._client = client
        self._connections: Any = (ClusterClient if in_cluster else Connections)(client)
        self.open_connections = self._connections.idle
        timeout = self._connections.options.get("socket_timeout")
        self._longest_pop = LONGEST_POP if timeout is None else min(LONGEST_POP, timeout / 2)
        tag, make_key = TAG if in_cluster else "", cache.make_key
        self._fence, self._listing = [f"{tag}{make_key(key)}" for key in (FENCE, LISTING)]

        #: Return the key of a lock, or of a place of a lock; each is needed at least twice.
        self._key = lru_cache(maxsize=10_000)(
            lambda name: f"{tag}{make_key(LOCK_KEY + plain_name(name))}"
        )

    def connect(self) -> None:
        with self.errors("acquire"):
            self._connections.connect()

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        name, token, seconds, holder, patience, limit, along = request
        keys = [self._key(name), self._fence, self._listing]
        text = encode_holder(name, holder, limit)
        pop = (keys[0] + " wake", patience) if patience else None
        args = [token, _milliseconds(seconds), text, "" if patience is None else MARK_LASTS]
        if limit > 1:
            keys += map(self._key, place_names(name, limit)[1:])
            cut = len(quoted(name))  # behind its last character, before the quote
            args += [str(cut), "" if holder.task_id is None else quoted(holder.task_id)]
        elif along is not None:
            keys.append(self._key(along.name))
            args += ["", "", along.token, _milliseconds(min(seconds, along.seconds))]
        try:  # errors() would take as long as to build the command
            place, found, *left = self._run(scripts.ACQUIRE, keys, args, pop=pop)[0]
            if not left:
                return Acquired(int(found), place)
            # The lock is held, perhaps by this token: the request may have been repeated.
            lock = _read_lock(place_name(name, place), found, *left)
        except self.client_errors as error:
            raise self.explain("acquire", error) from error
        return Acquired(lock.fence, place) if lock.token == token else lock

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        return self.release_along(name, token, remaining, None)

    def release_along(
        self, name: str, token: str, remaining: float | None, along: Renewal | None
    ) -> bool:
        of = self._key(split_place(name)[0]) if PLACE in name else ""
        keys, args = [self._key(name), self._listing], [token, of]
        if along is not None:
            keys.append(self._key(along.name))
            args.append(along.token)
        try:
            freed, is_repeat = self._run(scripts.RELEASE, keys, args)
            # The lease was certain when the first try was sent, so that try freed the lock,
            # although its answer was lost.
            return int(freed) == 1 or (is_repeat and remaining is not None and remaining > 0)
        except self.client_errors as error:
            raise self.explain("release", error) from error

    def wait(self, left: float, held_for: float, tries: int, seconds: float) -> float:
        if left <= 2 * LATE or seconds < SHORTEST_WOKEN:
            return super().wait(left, held_for, tries, seconds)
        # Each pop has a random length. Otherwise a waiter whose pops always end just before a
        # release would always be served last.
        longest = min(seconds / 4, self._longest_pop) * random.uniform(0.7, 1.0)  # noqa: S311
        return min(left - LATE, max(held_for, SHORTEST_POP), longest)

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        extended = [True] * len(renewals)
        # In pages, so that tens of thousands do not block the server.
        for start in range(0, len(renewals), PAGE):
            names, tokens, leases = zip(*renewals[start : start + PAGE], strict=True)
            keys = [self._listing, *map(self._key, names)]
            if len(set(leases)) == 1:
                leases = leases[:1]  # the script extends all that follow by the last
            args = ("".join(tokens), " ".join(map(_milliseconds, leases)))
            with self.errors("extend"):
                for lost in self._run(scripts.EXTEND, keys, args, within)[0]:
                    extended[start + int(lost)] = False
        return extended

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            (value, left), _ = self._run(scripts.PEEK, [self._key(name)], [])
            return None if value is None else _read_lock(name, value, left)

    def iter_locks(self) -> Iterator[HeldLock]:
        cursor = "0"
        while True:
            with self.errors("list"):
                args = [cursor, str(PAGE)]
                (now, after, flat), _ = self._run(scripts.PAGE_OF_LOCKS, [self._listing], args)
                cursor, keys = after.decode(), flat[::2]
                values = self._connections.ask(("MGET", *keys))[0] if keys else []
                page = [
                    _read_lock(key.decode("utf-8", "replace"), value, max(int(end) - now, 1))
                    for key, value, end in zip(keys, values, flat[1::2], strict=True)
                    if value is not None  # released, expired, or lost by the server
                ]
            yield from page
            if cursor == "0":
                return

    def ask_eviction(self) -> tuple[str, int]:
        ask = self._client.info
        with self.errors(action := "tell how it evicts keys"):
            is_one = isinstance(self._connections, Connections)
            nodes = [ask("memory")] if is_one else ask("memory", target_nodes="primaries").values()
            told = [node for node in nodes if node.get("maxmemory_policy") is not None]
            found = [(node["maxmemory_policy"], int(node.get("maxmemory", 0))) for node in told]
        if not found:
            raise LockBackendError(self.where, action, "its INFO says nothing of it")
        return min(found, key=lambda one: (one[0] == SPARES_LOCKS, not one[1]))

    def ask_refused(self) -> list[str]:
        own, refused = f"{self._listing}:doctor", []  # no lock's key begins like this
        for command in HARMLESS:
            words = tuple(word.format(own) for word in command.split())
            try:
                # No refusal: the server just does not have the script.
                with self.errors("try commands"), suppress(NoScriptError):
                    self._connections.ask(words)
            except LockBackendError as error:
                if not error.hint:
                    raise
                refused.append(f"{words[0].lower()} ({error.reason})")
        return refused

    def ask_time(self) -> float:
        with self.errors("tell the time"):
            seconds, microseconds = self._run(scripts.TIME, [self._listing], [])[0]
            return int(seconds) + int(microseconds) / 1_000_000

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        text = describe_error(error)
        if isinstance(self._connections, Connections) and OF_CLUSTER.search(text):
            return ConfigurationError(
                f"{self.where} can't hold locks: it is a node of Redis Cluster, and the cache's "
                f"client is a plain one, which asks that node for the keys of all others ({text}). "
                f"Give the cache a client for Redis Cluster (docs/how-to/choose-where-locks-live.md"
                f" shows how), or use one Redis, or set LOCK_DATABASE to a database alias."
            )
        return super().explain(action, error)

    def close(self) -> None:
        self._connections.close()

    def _run(
        self,
        script: scripts.Script,
        keys: Sequence[str],
        args: Sequence[str],
        within: float | None = None,
        pop: Pop | None = None,
    ) -> tuple[Any, bool]:
        """Run a script; return its answer, a number or a list, and whether it was repeated."""
        ask, number = self._connections.ask, str(len(keys))
        try:
            answer, is_repeat = ask(("EVALSHA", script.sha, number, *keys, *args), within, pop)
        except NoScriptError:  # first use on this server, a SCRIPT FLUSH or a restart
            command = ("EVAL", script.source, number, *keys, *args)
            answer, is_repeat = ask(command, within, pop)
        if isinstance(answer, bytes):
            raise TypeError(f"it answered {answer!r:.100}")
        return answer, is_repeat


def client_of(cache: BaseCache) -> Any:
    """Return redis-py's client that writes for ``cache``."""
    own: Any = cache
    if hasattr(own, "client"):  # django-redis
        return own.client.get_client(write=True)
    # Django makes a new client for each call; the store keeps one, as they share a pool.
    return own._cache.get_client(None, write=True)


@lru_cache(maxsize=100)
def _milliseconds(seconds: float) -> str:
    # Rounded up: a lease must not end before its holder stops trusting it.
    return str(math.ceil(seconds * 1000))


def _read_lock(name: str, value: bytes, milliseconds: float) -> HeldLock:
    text = value.decode("utf-8", "replace")
    fence = text[TOKEN_LENGTH:HEAD_LENGTH]
    # -1: a key without an expiry, which we never write.
    left = milliseconds / 1000 if milliseconds >= 0 else None
    lock = read_lock(name, text[:TOKEN_LENGTH] + text[HEAD_LENGTH:], left)
    return lock._replace(fence=int(fence) if fence.isdecimal() else None)
