"""A private memcached."""

import signal
from pathlib import Path

from pymemcache.client.base import Client

from tests.servers.server import Server


class MemcachedServer(Server):
    """memcached with 64 MB; a restart loses everything."""

    name = "memcached"
    program = "memcached"
    refuses_root = True
    # It has nothing to save, and looks at SIGTERM only once a second.
    stop_signal = signal.SIGKILL

    @property
    def url(self) -> str:
        """``host:port``, as Django's LOCATION has it."""
        return f"{self.host}:{self.port}"

    def command(self) -> list[str | Path]:
        """TCP only."""
        return [
            self.programs / self.program, "-l", self.host, "-p", str(self.port),
            "-U", "0", "-m", "64", "-c", "1024",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it says its version."""
        client = self.client()
        try:
            return bool(client.version())
        finally:
            client.close()

    def client(self) -> Client:
        """Return a plain client, to be closed by the caller."""
        return Client((self.host, self.port), connect_timeout=2, timeout=5)

    def flush(self) -> None:
        """Remove everything."""
        client = self.client()
        try:
            client.flush_all(noreply=False)
        finally:
            client.close()
