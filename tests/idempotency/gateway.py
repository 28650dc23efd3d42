"""A way to a server on which one answer can get lost."""

import contextlib
import socket
import threading
from typing import Self


class Gateway:
    """
    Passes on what clients and a server say to each other, while the block runs.

    Args:
        host: Where the server is.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: Where clients find it.
        self.port: int = self._listener.getsockname()[1]
        self._loses_next = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def lose_next_answer(self) -> None:
        """Let the server get the next request, and break the connection instead of the answer."""
        self._loses_next.set()

    @property
    def has_lost_it(self) -> bool:
        """Whether that has happened."""
        return not self._loses_next.is_set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                self._start(self._pass_on, client, server, False)
                self._start(self._pass_on, server, client, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_answer and self._loses_next.is_set():
                    self._loses_next.clear()
                    break
                target.sendall(data)
        _cut(source)
        _cut(target)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        _cut(self._listener)
        self._listener.close()
        for one in self._sockets:
            _cut(one)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
