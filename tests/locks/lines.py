"""A line between a client and a server: it loses answers or connections, or falls silent."""

import socket
import sys
import threading
from contextlib import AbstractContextManager, closing, suppress
from functools import partial

import psutil


class Line:
    """
    A TCP proxy in front of a server.

    Args:
        port: Of the server.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        #: After how many bytes the next answer is cut off, and its connection with it; None: not.
        self.cut_after: int | None = None
        #: Of each connection that is to be cut, the next first: after how many bytes of requests.
        self.cuts: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        #: Set as soon as something was sent on a silent connection.
        self.swallowed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close everything."""
        self._shut(self._listener)
        self.drop()

    def drop(self) -> None:
        """Close all connections that are open."""
        while self._open:
            self._shut(self._open.pop())

    def silence(self) -> None:
        """Pass on nothing more on the connection that was opened last, which stays open."""
        self._silent.update(self._open[-2:])

    @property
    def count(self) -> int:
        """How many connections have been opened."""
        return len(self._open) // 2

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                most = self.cuts.pop(0) if self.cuts else sys.maxsize
                for work in (
                    partial(self._ask, client, server, most),
                    partial(self._tell, server, client),
                ):
                    threading.Thread(target=work, daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, most: int) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if client in self._silent:
                    self.swallowed.set()
                    continue
                server.sendall(data[:most])
                most -= len(data)
                if most < 0:
                    break
        self._shut(client)
        self._shut(server)

    def _tell(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if server in self._silent:
                    self.swallowed.set()
                    continue
                if self.cut_after is not None:
                    most, self.cut_after = self.cut_after, None
                    client.sendall(data[:most])
                    break
                client.sendall(data)
        self._shut(server)
        self._shut(client)

    @staticmethod
    def _shut(one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def connections_to(port: int) -> int:
    """Return how many connections this process has to a port."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port == port for one in found)


def line_to(port: int) -> AbstractContextManager[Line]:
    """Have such a line during a block."""
    return closing(Line(port))
