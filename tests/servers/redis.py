"""A private Redis, which can count what clients ask of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.servers.server import Server


@dataclass
class Count:
    """What the server saw during ``RedisServer.counting``; filled in when the block ends."""

    #: How often the server found something to read: one for each request of a
    #: client that waits for its answers, however many commands the request holds.
    round_trips: int = 0
    #: Calls of each command by its lower-case name, those inside scripts included.
    commands: dict[str, int] = field(default_factory=dict)


class RedisServer(Server):
    """Redis that keeps nothing on disk: a restart loses everything."""

    name = "redis"
    program = "redis-server"

    @property
    def url(self) -> str:
        """Database 0."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """Return the URL of one of the 16 numbered databases."""
        return f"redis://{self.host}:{self.port}/{number}"

    def command(self) -> list[str | Path]:
        """No snapshots, no append-only file."""
        return [
            self.programs / self.program, "--bind", self.host, "--port", str(self.port),
            "--dir", self.folder, "--save", "", "--appendonly", "no", "--daemonize", "no",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it answers PING."""
        with self.client() as client:
            return bool(client.ping())

    def client(self, **options: Any) -> "redis.Redis":
        """Return a plain client, to be closed by the caller."""
        return redis.Redis(host=self.host, port=self.port, **options)

    def flush(self) -> None:
        """Remove everything from all databases."""
        with self.client() as client:
            client.flushall()

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
        # Each INFO counts itself as read, but not yet as called.
        count.round_trips = after["total_reads_processed"] - before["total_reads_processed"] - 1
        calls = {name: _calls(after, name) - _calls(before, name) for name in after}
        calls["cmdstat_info"] -= 1
        count.commands = {
            re.sub("^cmdstat_", "", name): number for name, number in calls.items() if number
        }


def _calls(info: dict[str, Any], name: str) -> int:
    value = info.get(name)
    return int(value["calls"]) if name.startswith("cmdstat_") and isinstance(value, dict) else 0
