"""
Locks in a Redis Cluster, with the scripts of :mod:`.redis`.

A script may only use keys of one slot. So each lock belongs to one of 64 buckets, and a bucket is
like a separate Redis: the keys of its locks, fence counter and list start with the same hash tag.
A lock takes as many round trips as in a single Redis; listing all locks takes at least 64.
redis-py's cluster client finds the nodes, and follows slots that move.

:func:`make_redis_store` chooses the store that fits the client.
"""

from __future__ import annotations

from binascii import crc32
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from redis import exceptions

from ...exceptions import CelerySafeError, LockBackendError
from ...leases.holder import HeldLock, plain_name, split_place
from ...leases.lease import Renewals
from ...texts import describe_error
from .base import Store
from .redis import LISTING, REFUSALS, Keys, RedisStore, client_of
from .redis_connections import CLIENT_ERRORS, Pop

if TYPE_CHECKING:
    from django.core.cache.backends.base import BaseCache

#: Number of buckets, over which locks spread so that all nodes share them. All processes have to
#: agree on it, whatever their version of this package.
BUCKETS: Final = 64

#: Answers of nodes while slots are moved, or after a node was lost.
CLUSTER_REFUSALS: Final = {
    r"\b(TRYAGAIN|TryAgainError|ASK|AskError|MOVED|MovedError|non local key|TTL exhausted)\b": (
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
    except CLIENT_ERRORS as error:  # only a cluster client connects here; others connect later
        where = f'CACHES["{alias}"] ({type(cache).__name__})'
        raise LockBackendError(where, "connect to the cluster", describe_error(error)) from error
    # A client of a cluster has a pool for each node.
    kind = ClusterStore if hasattr(client, "nodes_manager") else RedisStore
    return kind(alias, cache, client)


class ClusterClient:
    """Sends commands as :class:`Connections` does, through redis-py's client of the cluster."""

    #: The client connects to each node when it needs it.
    idle = True

    def __init__(self, client: Any) -> None:
        self._client = client
        self.options: dict[str, Any] = client.get_connection_kwargs()

    def close(self) -> None:
        """Close nothing: the connections are the cache's."""

    def node_of(self, key: str) -> Any:
        """Return the node that has the key's slot, as far as the client knows."""
        return self._client.get_node_from_key(key)

    def ask(
        self, command: tuple[Any, ...], within: float | None = None, pop: Pop | None = None
    ) -> tuple[Any, bool]:
        """
        Do what :meth:`Connections.ask` does, but for ``within``: the cache's timeouts hold.

        After a pop, another client's command may be first: a cluster takes no two at once.
        """
        if pop is not None:
            self._send("BLPOP", pop[0], str(pop[1]))
        if command[0] != "EVALSHA":
            return self._send(*command), False
        try:
            # A command for a node is sent once, unlike one for a key.
            node = self.node_of(command[3])
            return self._send(*command, target_nodes=node), False
        except (exceptions.ConnectionError, exceptions.ClusterDownError):
            return self._send(*command), True

    def ask_memory(self) -> list[dict[str, Any]]:
        """Return what INFO says of the memory of each primary."""
        return list(self._client.info("memory", target_nodes=self._client.PRIMARIES).values())

    def _send(self, *command: Any, **options: Any) -> Any:
        return self._client.execute_command(*command, NEVER_DECODE=True, **options)


class ClusterStore(RedisStore):
    """Locks in one cluster, spread over its nodes."""

    has_parts: ClassVar[bool] = True
    carries: ClassVar[bool] = False  # the other lock may be on another node
    connections_class: ClassVar[Any] = ClusterClient
    refusals = CLUSTER_REFUSALS | REFUSALS

    def __init__(self, alias: str, cache: BaseCache, client: Any = None) -> None:
        super().__init__(alias, cache, client)
        self.where = f'CACHES["{alias}"] (redis cluster)'
        self._listings = [_tag(number) + str(cache.make_key(LISTING)) for number in range(BUCKETS)]

    def make_keys(self, name: str) -> Keys:
        lock = name
        # A place's lock may itself have a name that looks like a place of another lock.
        while (outer := split_place(lock)[0]) != lock:
            lock = outer
        tag = _tag(crc32(plain_name(lock).encode()) % BUCKETS)
        return Keys(*[tag + key for key in super().make_keys(name)])

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        buckets: dict[str, list[int]] = defaultdict(list)
        for place, (name, _, _) in enumerate(renewals):
            buckets[self._keys(name).listing].append(place)
        extended = [True] * len(renewals)
        for places in buckets.values():
            outcomes = super().extend([renewals[place] for place in places])
            for place, outcome in zip(places, outcomes, strict=True):
                extended[place] = outcome
        return extended

    def part(self, name: str) -> object:
        node = self._connections.node_of(self._keys(name).listing)
        return node.host, node.port

    def iter_locks(self) -> Iterator[HeldLock]:
        for listing in self._listings:
            yield from self._iter_listed(listing)

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        return Store.explain(self, action, error)


def _tag(bucket: int) -> str:
    return f"{{celery_safe:{bucket}}}"
