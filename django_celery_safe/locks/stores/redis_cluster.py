"""
Locks in a Redis Cluster, with the scripts of :mod:`.redis`.

A script may only use keys of one slot. So each lock belongs to one of 64 buckets, and a bucket is
like a separate Redis: the keys of its locks, fence counter and list start with the same hash tag.
A lock takes as many round trips as in a single Redis; listing all locks takes at least 64.

:func:`make_redis_store` chooses the store that fits the client; ``cluster_wire`` finds the nodes.
"""

from __future__ import annotations

import time
from binascii import crc32
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from ...exceptions import CelerySafeError, LockBackendError
from ...foreign_errors import describe_error
from ...leases.holder import HeldLock, plain_name, split_place
from ...leases.store import Renewable
from .base import Eviction, Store
from .cluster_wire import ClusterWire, is_cluster
from .redis import LISTING, REFUSALS, Keys, MakeKey, RedisStore, client_of

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Number of buckets, over which locks spread so that all nodes share them. All processes have to
#: agree on it, whatever their version of this package.
BUCKETS: Final = 64

#: Answers of nodes while slots are moved, or after a node was lost.
CLUSTER_REFUSALS: Final = {
    r"\b(TRYAGAIN|TryAgainError|ASK|AskError|MOVED|MovedError|non local key)\b": (
        "the cluster is moving this lock's slot from node to node, and was not done in time",
        "Try again later; `redis-cli --cluster fix` ends a move that was interrupted.",
    ),
    r"\b(CLUSTERDOWN|ClusterDownError|SlotNotCoveredError|is not covered)\b": (
        "a node of the cluster is down, and no other has its slots",
        "See `redis-cli --cluster check`; replicas take over from a node that is lost.",
    ),
}


def make_redis_store(alias: str, cache: BaseCache) -> RedisStore:
    """
    Return the store for a cache in Redis.

    Raises:
        LockBackendError: The cache is in a cluster, and none of its nodes answered the client.
    """
    try:
        client = client_of(cache)
    except Exception as error:
        # Only a cluster client connects here; other clients connect later.
        if not isinstance(error, OSError) and "Cluster" not in type(error).__name__:
            raise
        where = f'CACHES["{alias}"] ({type(cache).__name__})'
        raise LockBackendError(where, "connect to the cluster", describe_error(error)) from error
    kind = ClusterStore if is_cluster(client) else RedisStore
    return kind(alias, cache, client)


class ClusterStore(RedisStore):
    """Locks in one cluster, spread over its nodes."""

    has_parts: ClassVar[bool] = True
    wire_class: ClassVar[Any] = ClusterWire
    refusals = CLUSTER_REFUSALS | REFUSALS

    def __init__(self, alias: str, cache: BaseCache, client: Any = None) -> None:
        super().__init__(alias, cache, client)
        self._cluster = cast(ClusterWire, self._wire)
        self.where = f'CACHES["{alias}"] (redis cluster)'
        self._listings = [_tag(number) + str(cache.make_key(LISTING)) for number in range(BUCKETS)]

    @staticmethod
    def make_keys(make_key: MakeKey, name: str) -> Keys:
        lock = name
        # A place's lock may itself have a name that looks like a place of another lock.
        while (outer := split_place(lock)[0]) != lock:
            lock = outer
        tag = _tag(crc32(plain_name(lock).encode()) % BUCKETS)
        keys = RedisStore.make_keys(make_key, name)
        return Keys(*[tag + key for key in keys])

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        ends_at = None if within is None else time.monotonic() + within
        buckets: dict[str, list[int]] = defaultdict(list)
        for place, renewal in enumerate(renewals):
            buckets[self._keys[renewal.name].listing].append(place)
        extended = [True] * len(renewals)
        for places in buckets.values():
            # At least a moment: when time is short, still try to extend the remaining leases.
            left = None if ends_at is None else max(ends_at - time.monotonic(), 0.01)
            outcomes = super().extend([renewals[place] for place in places], left)
            for place, outcome in zip(places, outcomes, strict=True):
                extended[place] = outcome
        return extended

    def part(self, name: str) -> object:
        return self._cluster.known_node(self._keys[name].listing)

    def iter_locks(self) -> Iterator[HeldLock]:
        for listing in self._listings:
            yield from self._iter_listed(listing)

    def emptied_with(self) -> object:
        return self._cluster.nodes()

    def ask_eviction(self) -> Eviction:
        found = [self._ask_eviction(wire) for wire in self._cluster.primaries()]
        return min(found, key=lambda one: (one.spares_locks, one.max_memory == 0))

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        return Store.explain(self, action, error)


def _tag(bucket: int) -> str:
    return f"{{celery_safe:{bucket}}}"
