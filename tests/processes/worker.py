"""Real Celery workers for tests."""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.processes.kept import KeptProcess
from tests.processes.settings import settings_environment
from tests.processes.started import Started
from tests.processes.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

#: Seconds until a worker must be ready.
PATIENCE = 90

#: The line that a worker prints, at INFO, when it takes messages.
READY = re.compile(r"\S+@\S+ ready\.")


class CeleryWorker(Started):
    """
    ``python -m celery -A <app> worker``, running while the block runs.

    It is ready when the block begins and leaves no process when it ends. It gets
    the settings of the test, as ``run_in_processes`` gives them. If the block
    raises, the worker's log is printed, so pytest shows it.

    Args:
        app: The module, as for ``celery -A``.
        pool: prefork, solo, threads or gevent.
        concurrency: Children, threads or greenlets.
        arguments: More arguments of ``celery worker``.
        settings: Django settings on top of the test's own.
        env: Environment variables on top of ours.

    Example:
        with CeleryWorker("tests.worker.app", concurrency=2) as worker:
            ...
            worker.kill()
    """

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        arguments: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"worker-{uuid.uuid4().hex[:8]}"
        self.command = [
            sys.executable, "-m", "celery", "-A", app, "worker",
            "--hostname", f"{self.name}@%h", "--pool", pool, "--concurrency", str(concurrency),
            "--loglevel", "INFO", "--without-gossip", "--without-mingle", *arguments,
        ]  # fmt: skip
        self.settings = settings
        self.env = dict(env or {})
        self._stack = ExitStack()

    #: The workers that were started and not closed, by name.
    open: ClassVar[dict[str, "CeleryWorker"]] = {}

    def start(self) -> None:
        """Start the worker and wait until it takes messages."""
        folder = Path(tempfile.mkdtemp(prefix="safe-worker-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._process = KeptProcess(
            self.command,
            folder=ROOT,
            log_path=folder / "worker.log",
            env={**os.environ, **settings_environment(self.settings), **self.env},
            owned_folder=folder,
        )
        self._process.start()
        self.open[self.name] = self
        wait_for(self._is_ready, PATIENCE, "the worker was not ready")

    def _is_ready(self) -> bool:
        if not self.process.running:
            raise RuntimeError(f"The worker ended instead of getting ready:\n{self.log}")
        return READY.search(self.log) is not None

    def children(self) -> list[psutil.Process]:
        """Return the pool's processes; other pools than prefork have none."""
        return self.process.children()

    def stop(self, timeout: float = 30) -> None:
        """Warm shutdown: SIGTERM, wait for running tasks and the end of the worker."""
        self.process.stop(timeout)

    def kill(self) -> None:
        """End the worker and its children with SIGKILL, each by its id."""
        self.process.kill()

    def show_stacks(self) -> None:
        """Have the worker and its children print where they are into its log."""
        for process in [self.process.process, *self.children()] if self.running else []:
            with suppress(psutil.NoSuchProcess):
                if catches(process.pid, signal.SIGUSR2):  # else it would end by it
                    process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)

    def close(self) -> None:
        """End what still runs, with SIGKILL, and remove the log."""
        self.open.pop(self.name, None)
        if self._process is not None:
            self._process.kill()
        self._stack.close()

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(f"--- log of {self.name} ---\n{self.log}")
        super().__exit__(*error)


def start_together(workers: Sequence[CeleryWorker]) -> None:
    """Start workers at once, and wait until all of them take messages."""
    with ThreadPoolExecutor(len(workers)) as starters:
        list(starters.map(CeleryWorker.start, workers))


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, as Linux tells; a dead one has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)
