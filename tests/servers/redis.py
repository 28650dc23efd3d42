"""A private Redis, which can count what clients ask of it, and one under Sentinel."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.processes.waiting import wait_for
from tests.servers.server import Server

#: Counters of INFO for reads and connections.
COUNTERS = ("total_reads_processed", "total_connections_received", "connected_clients")


#: How many slots a Redis Cluster has.
SLOTS = 16384


@dataclass
class Count:
    """The counts of one ``RedisServer.counting`` block; filled in when the block ends."""

    #: How often the server found something to read: one for each request of a
    #: client that waits for its answers, however many commands the request holds.
    round_trips: int = 0
    #: Calls of each command by its lower-case name, those inside scripts included.
    commands: dict[str, int] = field(default_factory=dict)


class RedisServer(Server):
    """
    Redis that keeps nothing on disk: a restart loses everything.

    Args:
        cluster: Whether it is the only node of a Redis Cluster, with all slots.
    """

    name = "redis"
    program = "redis-server"

    def __init__(self, *, cluster: bool = False) -> None:
        super().__init__()
        if cluster:  # Nodes talk to each other on a port that is 10,000 higher.
            self.port = self._reserve_port(10_000)
        self.cluster = cluster
        #: The slots that it takes at its first start, if it is a node of a cluster.
        self.slots = range(SLOTS)

    @property
    def url(self) -> str:
        """Database 0."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """Return the URL of one of the 16 numbered databases."""
        return f"redis://{self.host}:{self.port}/{number}"

    def command(self) -> list[str | Path]:
        """No snapshots, no append-only file; a replica that asks is served at once."""
        node = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
        return [
            self.programs / self.program, "--bind", self.host, "--port", str(self.port),
            "--dir", self.folder, "--save", "", "--appendonly", "no", "--daemonize", "no",
            "--repl-diskless-sync-delay", "0", *(node if self.cluster else ()),
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it answers, and has its slots if it is a cluster."""
        with self.client() as client:
            if not self.cluster:
                return bool(client.ping())
            info = client.cluster("info")
            if info["cluster_slots_assigned"] == "0" and self.slots:
                # Another one for each node, as redis-cli does: of two that claim a slot with the
                # same epoch, the later message wins.
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", self.slots.start + 1)
                client.execute_command("CLUSTER", "ADDSLOTS", *self.slots)
            return bool(info["cluster_state"] == "ok") or len(self.slots) < SLOTS

    def client(self, **options: Any) -> "redis.Redis":
        """Return a plain client, to be closed by the caller."""
        return redis.Redis(host=self.host, port=self.port, **options)

    def flush(self) -> None:
        """Remove everything from all databases."""
        with self.client() as client:
            client.flushall()

    def wait_for_waiters(self, number: int = 1) -> None:
        """Wait until so many clients wait for an answer that comes when something is there."""
        with self.client() as client:
            wait_for(lambda: client.info("clients")["blocked_clients"] == number, 20, "few wait")

    @contextmanager
    def counting(self) -> Iterator[Count]:
        """
        Count the requests and commands of all clients during the block.

        Open the clients' connections before: connecting is a round trip or two.
        """
        count = Count()
        with self.client() as client:
            before = client.info("all")
            yield count
            after = client.info("all")
        grown = {name: after[name] - before[name] for name in COUNTERS}
        # The end of a connection is a read, too: garbage collection may close an old one.
        ended = grown["total_connections_received"] - grown["connected_clients"]
        # Each INFO counts itself as read, but not yet as called.
        count.round_trips = grown["total_reads_processed"] - ended - 1
        calls = {name: _calls(after, name) - _calls(before, name) for name in after}
        calls["cmdstat_info"] -= 1
        count.commands = {
            re.sub("^cmdstat_", "", name): number for name, number in calls.items() if number
        }


class SentinelServer(Server):
    """
    A Sentinel with the two Redis servers that it watches: a master and its replica.

    It fails over within about three seconds. ``first`` is the master at the start.
    """

    name = "sentinel"
    program = "redis-server"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RedisServer(), RedisServer()
        for server in (self.first, self.second):
            self._owned.callback(server.close)
            # Asked to end, a master would wait for its replica.
            self._owned.callback(server.kill)
        #: Sentinel's name for the two servers. It differs between tests: django-redis keeps
        #: its pools by URL for as long as the process lives.
        self.service = f"redis-{self.port}"

    @property
    def url(self) -> str:
        """Database 0 of whichever is the master, as django-redis has it."""
        return f"redis://{self.service}/0"

    def prepare(self) -> None:
        """Start both servers, the second as the replica of the first."""
        for server in (self.first, self.second):
            server.start()
        with self.second.client() as client:
            client.replicaof(self.first.host, self.first.port)
            wait_for(lambda: client.info("replication")["master_link_status"] == "up")
        # Sentinel keeps its state in its configuration file.
        (self.folder / "sentinel.conf").write_text(
            f"port {self.port}\n"
            f"bind {self.host}\n"
            f"sentinel monitor {self.service} {self.first.host} {self.first.port} 1\n"
            f"sentinel down-after-milliseconds {self.service} 500\n"
            f"sentinel failover-timeout {self.service} 1000\n"
        )

    def command(self) -> list[str | Path]:
        """The same program as the servers'."""
        return [self.programs / self.program, self.folder / "sentinel.conf", "--sentinel"]

    def is_ready(self) -> bool:
        """Whether it sees the master and the replica, and could fail over."""
        with self.client() as client:
            (replica,) = client.sentinel_slaves(self.service)
            return bool(replica["master-link-status"] == "ok")

    def client(self) -> "redis.Redis":
        """Return a client of Sentinel itself, to be closed by the caller."""
        return redis.Redis(host=self.host, port=self.port, decode_responses=True)

    @property
    def master(self) -> RedisServer:
        """The server that Sentinel names to redis-py as the master now."""
        with self.client() as client:
            state = client.sentinel_master(self.service)
        return self.first if state["port"] == self.first.port else self.second

    def fail_over(self) -> None:
        """
        Let Sentinel make the replica the master, both being alive.

        The old master is a replica when this returns, and its clients are still
        connected to it. Sentinel would see to that itself, but some 20 s later.
        """
        old = self.master
        new = self.second if old is self.first else self.first
        for patience in (5, 5, 20):
            # Sentinel refuses while a failover is under way.
            with self.client() as client, suppress(redis.ResponseError):
                client.execute_command("SENTINEL", "FAILOVER", self.service)
            # On a slow machine Sentinel gives up, and has to be asked again.
            with suppress(TimeoutError):
                wait_for(lambda: self.master is new, patience)
                break
        assert self.master is new, "Sentinel did not fail over"
        with old.client() as client:
            client.replicaof(new.host, new.port)


def _calls(info: dict[str, Any], name: str) -> int:
    value = info.get(name)
    return int(value["calls"]) if name.startswith("cmdstat_") and isinstance(value, dict) else 0
