"""Programs that can't outlive the tests: each runs under a ``keeper`` of its own."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from tests.processes.waiting import wait_for

KEEPER = Path(__file__).with_name("keeper.py")


class KeptProcess:
    """
    One program, started and ended by its own process id.

    Its output goes to ``log_path``. If the test process dies in any way, the
    program and its children are ended by the keeper.

    Args:
        folder: The working directory.
        log_path: File for its output; unset: ``output.log`` in the folder.
        env: Its whole environment; None: ours.
        identity: ``user``, ``group`` and ``extra_groups`` as for ``subprocess.Popen``.
        stop_signal: The signal that asks it to end in order.
        owned_folder: A folder that the keeper removes if the tests die.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        folder: Path,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        identity: Mapping[str, Any] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        owned_folder: Path | None = None,
    ) -> None:
        self.command = [str(part) for part in command]
        self.folder = folder
        self.log_path = log_path or folder / "output.log"
        self.env = env
        self.identity = dict(identity or {})
        self.stop_signal = stop_signal
        self.owned_folder = owned_folder
        self._keeper: subprocess.Popen[str] | None = None
        self._process: psutil.Process | None = None

    def start(self) -> None:
        """Start the program; it may not be ready yet when this returns."""
        plan = {
            "command": self.command,
            "folder": str(self.folder),
            "log": str(self.log_path),
            "env": None if self.env is None else dict(self.env),
            "identity": self.identity,
            "stop_signal": self.stop_signal,
            "owned_folder": str(self.owned_folder) if self.owned_folder else None,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", KEEPER, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            self._forget()
            raise RuntimeError(f"Could not start {self.command[0]}; its keeper said why above.")
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(int(line))

    @property
    def pid(self) -> int:
        """The program's own process id."""
        return int(self.process.pid)

    @property
    def process(self) -> psutil.Process:
        """The running program, safe against reuse of its id."""
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} is not running.")
        return self._process

    @property
    def running(self) -> bool:
        """Whether the program lives; a paused one does."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def log(self) -> str:
        """Everything it has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def children(self) -> list[psutil.Process]:
        """Return all its descendants that live now."""
        try:
            return list(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def wait(self, timeout: float = 60) -> int:
        """Wait for the program to end by itself and return its exit status."""
        assert self._keeper is not None
        status = self._keeper.wait(timeout)
        self._forget()
        return status

    def stop(self, timeout: float = 15) -> None:
        """
        Ask it to end and wait until it has; nothing of it is left then.

        Raises:
            TimeoutError: It did not end by itself and was killed.
        """
        if self._process is None:
            return
        family = self._family()
        self._signal(self.process, self.stop_signal)
        self.resume()
        try:
            wait_for(lambda: not self.running, timeout, f"{self.command[0]} did not end")
        finally:
            self._end(family)

    def kill(self) -> None:
        """Kill it and its children with SIGKILL, each by its id, and wait for the end."""
        if self._process is None:
            return
        # Stopped first, so that it can't start children while they are counted.
        self._signal(self.process, signal.SIGSTOP)
        self._end(self._family())

    def pause(self) -> None:
        """Stop it and its children with SIGSTOP: they live, but do nothing."""
        self._signal(self.process, signal.SIGSTOP)
        for child in self.children():
            self._signal(child, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        for member in reversed(self._family()):
            self._signal(member, signal.SIGCONT)

    def _family(self) -> list[psutil.Process]:
        return [self.process, *self.children()]

    def _end(self, family: Sequence[psutil.Process]) -> None:
        for member in family:
            self._signal(member, signal.SIGKILL)
        psutil.wait_procs(family, timeout=10)
        self._forget()

    def _forget(self) -> None:
        if self._keeper is not None:
            # It takes the end of its input for the end of the tests, and would remove the folder.
            self._keeper.wait(10)
            self._keeper.communicate()
        self._keeper = None
        self._process = None

    @staticmethod
    def _signal(process: psutil.Process, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
