"""Servers that start on first use and end together."""

from contextlib import ExitStack
from typing import Any, TypeVar

from tests.servers.redis import RedisServer
from tests.servers.server import Server

AnyServer = TypeVar("AnyServer", bound=Server)


class ServerPool(ExitStack):
    """One server of each kind, started when first asked for and closed at the block's end."""

    def __init__(self) -> None:
        super().__init__()
        self._servers: dict[type[Server], Any] = {}

    def get(self, kind: type[AnyServer]) -> AnyServer:
        """
        Return the running server of this class.

        Raises:
            ProgramNotFound: Its program is not on this machine.
        """
        if kind not in self._servers:
            self._servers[kind] = self.enter_context(kind())
        return self._servers[kind]

    @property
    def redis(self) -> RedisServer:
        """The Redis server."""
        return self.get(RedisServer)
