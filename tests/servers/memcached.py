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
        places: See :class:`Server`.
        unix_socket: Whether it listens on ``socket_path``, and then on no port.
        arguments: More arguments of its command line, such as ``("-m", "1")``; of one
            that is there already, the last counts.
    """

    name = "memcached"
    program = "memcached"
    refuses_root = True
    # It has nothing to save, and looks at SIGTERM only once a second.
    stop_signal = signal.SIGKILL

    def __init__(
        self,
        places: tuple[str, ...] | None = None,
        *,
        unix_socket: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(places)
        self.unix_socket = unix_socket
        self.socket_path = self.folder / "memcached.sock"
        self.arguments = tuple(arguments)

    @property
    def url(self) -> str:
        """``host:port``, or ``unix:`` and the path, as Django's LOCATION has it."""
        return f"unix:{self.socket_path}" if self.unix_socket else f"{self.host}:{self.port}"

    def command(self) -> list[str | Path]:
        """TCP or the unix socket; no UDP."""
        where: tuple[str | Path, ...] = ("-l", self.host, "-p", str(self.port), "-U", "0")
        if self.unix_socket:
            where = ("-s", self.socket_path)
        return [
            self.programs / self.program, *where, "-m", "64", "-c", "1024", *self.arguments,
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
