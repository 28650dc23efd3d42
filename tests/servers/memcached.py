"""A private memcached."""

import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pymemcache.client.base import Client

from tests.servers.server import Server


class MemcachedServer(Server):
    """
    memcached with 64 MB; a restart loses everything.

    Args:
        arguments: More arguments of its command line, such as ``("-m", "1")``; of one
            that is there already, the last counts.
    """

    name = "memcached"
    program = "memcached"
    refuses_root = True
    # It has nothing to save, and looks at SIGTERM only once a second.
    stop_signal = signal.SIGKILL

    def __init__(self, *, arguments: Sequence[str] = ()) -> None:
        super().__init__()
        self.arguments = tuple(arguments)

    @property
    def url(self) -> str:
        """``host:port``, as Django's LOCATION has it."""
        return f"{self.host}:{self.port}"

    def command(self) -> list[str | Path]:
        """TCP; no UDP."""
        return [
            self.programs / self.program, "-l", self.host, "-p", str(self.port), "-U", "0",
            "-m", "64", "-c", "1024", *self.arguments,
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it says its version."""
        with closing(self.client()) as client:
            return bool(client.version())

    def client(self) -> Client:
        """Return a plain client, to be closed by the caller."""
        return Client(self.url, connect_timeout=2, timeout=5)

    def flush(self) -> None:
        """Remove everything."""
        with closing(self.client()) as client:
            client.flush_all(noreply=False)

    def count(self, statistic: str) -> int:
        """Return a number that it keeps, such as ``cmd_set``."""
        with closing(self.client()) as client:
            return int(client.stats()[statistic.encode()])
