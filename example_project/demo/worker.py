"""The demo's worker: an ordinary ``celery worker`` with four child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
from django.conf import settings

from .errors import DemoError
from .sandbox import interruptions, wait_until_gone

#: Child processes: one more than the feeds that are imported at once, so that
#: one is always free to take a delivery and skip it.
CHILDREN: Final = 4
#: How long the worker may take to finish its work at the end, s.
STOPS_WITHIN: Final = 5.0
#: Pause between two looks at a condition, s.
LOOK_EVERY: Final = 0.05
COMMAND: Final = (
    *(sys.executable, "-m", "celery", "-A", "example_project", "worker"),
    *("--pool=prefork", f"--concurrency={CHILDREN}", "--loglevel=INFO", "--hostname=demo@%h"),
    # It has no other workers to talk to.
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)


class Worker:
    """A worker in a process of its own, and its log."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._log = folder / "worker.log"
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[Worker]:
        """Work for as long as the block runs; if that fails, stop without finishing anything."""
        patience = 0.0
        try:
            with interruptions.held_back():
                self._process = self._start()
            yield self
            patience = STOPS_WITHIN
        finally:
            with interruptions.held_back():
                self._stop(patience)

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> None:
        """
        Wait for something that the worker is to bring about.

        Raises:
            DemoError: It did not happen in time, or the worker ended.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                status = self._process.returncode
                raise DemoError(f"The worker ended with status {status} before {what}.")
            if time.monotonic() > deadline:
                raise DemoError(f"After {seconds:g} s still not: {what}.")
            time.sleep(LOOK_EVERY)

    def child(self, pid: int) -> psutil.Process:
        """
        Return the worker's child process of that id.

        Raises:
            DemoError: The worker has no such child.
        """
        for process in self._children():
            if process.pid == pid:
                return process
        raise DemoError(f"Process {pid} is no child of the worker.")

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Let the worker take no message for as long as the block runs."""
        main = psutil.Process(self._process.pid) if self._process is not None else None
        if main is None:
            raise DemoError("There is no worker that could stand still.")
        main.suspend()
        try:
            yield
        finally:
            main.resume()

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of the worker's log."""
        if not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                COMMAND,
                cwd=settings.BASE_DIR,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is meant for the demo, which then stops the worker.
                start_new_session=True,
            )

    def _stop(self, patience: float) -> None:
        if self._process is None:
            return
        children = self._children()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        # The session was made for the worker: all processes that are left in it are its children.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_until_gone(children)

    def _children(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            children: list[psutil.Process] = psutil.Process(self._process.pid).children(
                recursive=True
            )
        except psutil.NoSuchProcess:
            return []
        return children
