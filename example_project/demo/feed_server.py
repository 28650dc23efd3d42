"""
A web server of the bundled feeds that counts its visitors, and lets them wait when told to.

Its counts judge the demo: the server stands outside all locks.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, Final

from feeds import bundled

#: How often a held response looks whether its visitor is still there, s.
LOOK_EVERY: Final = 0.02


@dataclass
class Fetches:
    """The counts of one feed's fetches."""

    started: int = 0
    completed: int = 0
    #: Fetches whose visitor went away before the response.
    cut_off: int = 0
    active: int = 0
    most_at_once: int = 0
    #: When the latest fetch began, on the monotonic clock.
    latest_at: float = 0.0
    #: Set: responses are given at once.
    open: threading.Event = field(default_factory=threading.Event)


class FeedServer:
    """A web server on this machine with one page for each bundled feed."""

    def __init__(self) -> None:
        self._fetches = {name: Fetches() for name in bundled.CONTENT_TYPES}
        for fetches in self._fetches.values():
            fetches.open.set()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.feeds = self

    def url(self, name: str) -> str:
        """Return where a feed is served."""
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def fetches(self, name: str) -> Fetches:
        """Return what was seen of a feed so far."""
        return self._fetches[name]

    def hold(self, name: str) -> None:
        """Let the visitors of a feed wait for their response until :meth:`release`."""
        self._fetches[name].open.clear()

    def release(self, name: str) -> None:
        """Give the responses of a feed, those that wait and those to come."""
        self._fetches[name].open.set()

    @contextmanager
    def running(self) -> Iterator[FeedServer]:
        """Serve for as long as the block runs."""
        # A daemon, so that even a shutdown that was cut short can't keep the process alive.
        thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_EVERY,), daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            for name in self._fetches:
                self.release(name)
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    @contextmanager
    def counted(self, name: str) -> Iterator[Fetches]:
        """Count the block as a fetch of the feed."""
        fetches = self._fetches[name]
        with self._lock:
            fetches.started += 1
            fetches.active += 1
            fetches.most_at_once = max(fetches.most_at_once, fetches.active)
            fetches.latest_at = monotonic()
        try:
            yield fetches
        finally:
            with self._lock:
                fetches.active -= 1

    def note_end(self, fetches: Fetches, *, completed: bool) -> None:
        """Note how a fetch ended."""
        with self._lock:
            if completed:
                fetches.completed += 1
            else:
                fetches.cut_off += 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    feeds: FeedServer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        try:
            content = bundled.read(name)
        except KeyError:
            self.send_error(404)
            return
        with self.server.feeds.counted(name) as fetches:
            completed = self._wait_for(fetches.open) and self._respond(name, content)
            self.server.feeds.note_end(fetches, completed=completed)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the standard error stream is the demo's."""

    def _wait_for(self, released: threading.Event) -> bool:
        while not released.wait(LOOK_EVERY):
            if self._visitor_left():
                return False
        return True

    def _visitor_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def _respond(self, name: str, content: bytes) -> bool:
        try:
            self.send_response(200)
            self.send_header("Content-Type", bundled.CONTENT_TYPES[name])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            return False
        return True
