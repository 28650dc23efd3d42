"""A web server with one feed, which counts its visitors, and lets them wait when it is told to."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from feeds.views import FOLDER

#: The feed that is served.
FEED: Final = "slow-trains.atom"


class FeedServer(ThreadingHTTPServer):
    """A web server on a free port; it serves while it is used as a context manager."""

    # A visitor who waits can't keep the demo alive.
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(FOLDER)))
        self.url = f"http://127.0.0.1:{self.server_port}/{FEED}"
        #: Set: responses are given at once.
        self.is_open = threading.Event()
        self.is_open.set()
        self.lock = threading.Lock()
        self.started = self.active = self.most_at_once = 0

    def __enter__(self) -> "FeedServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(SimpleHTTPRequestHandler):
    server: FeedServer

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.started += 1
            self.server.active += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.active)
        try:
            self.server.is_open.wait()
            super().do_GET()
        except ConnectionError:
            pass  # the visitor was killed
        finally:
            with self.server.lock:
                self.server.active -= 1

    def log_message(self, *args: Any) -> None:
        """Say nothing: the standard error stream is the demo's."""
