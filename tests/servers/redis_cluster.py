"""A Redis Cluster of three private nodes, whose slots can be moved from node to node."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.crc import key_slot

from tests.processes import wait_for
from tests.servers.redis import SLOTS, RedisServer

NODES = 3


class RedisClusterServer(RedisServer):
    """
    A Redis Cluster of three primaries without replicas; itself the first of them.

    A node that is gone takes its slots along, and the others go on with theirs.
    """

    name = "redis cluster"

    def __init__(self) -> None:
        super().__init__(cluster=True)
        others = [RedisServer(cluster=True) for _ in range(NODES - 1)]
        self.nodes: list[RedisServer] = [self, *others]
        self._moved: dict[int, RedisServer] = {}
        for number, node in enumerate(self.nodes):
            node.slots = range(SLOTS * number // NODES, SLOTS * (number + 1) // NODES)

    def prepare(self) -> None:
        """Start the other nodes."""
        for node in self.nodes[1:]:
            self._owned.enter_context(node)

    def is_ready(self) -> bool:
        """Whether each node knows all others and where all slots are."""
        if not super().is_ready():
            return False
        with self.client() as client:
            if int(client.cluster("info")["cluster_known_nodes"]) < NODES:
                for node in self.nodes[1:]:
                    client.execute_command("CLUSTER", "MEET", node.host, node.port)
        return all(self._is_joined(node) for node in self.nodes)

    def _is_joined(self, node: RedisServer) -> bool:
        with node.client() as client:
            info = client.cluster("info")
        return (info["cluster_state"], info["cluster_slots_ok"]) == ("ok", str(SLOTS))

    def flush(self) -> None:
        """Remove everything from all nodes that run."""
        for node in self.nodes:
            if node.running:
                RedisServer.flush(node) if node is self else node.flush()

    def node_of(self, key: str) -> RedisServer:
        """Return the node that has the slot of a key."""
        slot = key_slot(key.encode())
        at_first = next(node for node in self.nodes if slot in node.slots)
        return self._moved.get(slot, at_first)

    @contextmanager
    def moving(self, key: str) -> Iterator["Move"]:
        """Have the slot of a key on its way to another node during the block, and there after."""
        move = Move(self, key)
        with move.old.client() as old, move.new.client() as new:
            ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (old, new)]
            new.execute_command("CLUSTER", "SETSLOT", move.slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER", "SETSLOT", move.slot, "MIGRATING", ids[1])
            try:
                yield move
            finally:
                move.send_keys()
                for client in (new, old):
                    client.execute_command("CLUSTER", "SETSLOT", move.slot, "NODE", ids[1])
                wait_for(lambda: move.has_ended(old, new), 20, "the nodes agree on no owner")
                self._moved[move.slot] = move.new

    def move(self, key: str) -> "Move":
        """Move the slot of a key to another node."""
        with self.moving(key) as move:
            return move


class Move:
    """
    A slot that moves.

    Attributes:
        old: The node that has it.
        new: The node that gets it.
    """

    def __init__(self, cluster: RedisClusterServer, key: str) -> None:
        self.slot = key_slot(key.encode())
        self.old = cluster.node_of(key)
        self.new = next(node for node in cluster.nodes if node is not self.old)

    def has_ended(self, *nodes: Redis) -> bool:
        """Return whether these nodes say that the new one has the slot."""
        return all(self._owner_at(client) == self.new.port for client in nodes)

    def _owner_at(self, client: Redis) -> int | None:
        """Return the port of the node that has the slot, as a node says; None: no node has it."""
        ranges: Any = client.execute_command("CLUSTER", "SLOTS")
        owners = [primary[1] for first, last, primary, *_ in ranges if first <= self.slot <= last]
        return int(owners[0]) if owners else None

    def send_keys(self) -> None:
        """Send all keys that are in the slot now."""
        with self.old.client() as old:
            keys: list[Any] = old.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000)
            if keys:
                there = (self.new.host, self.new.port)
                old.execute_command("MIGRATE", *there, "", 0, 5000, "KEYS", *keys)
