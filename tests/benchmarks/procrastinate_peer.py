"""
The peer whose queue is PostgreSQL alone: procrastinate, with a task that does nothing.

Its worker is one process, whose concurrency is threads; it keeps the jobs that are done.
"""

import os
import sys

import procrastinate

from tests.processes import CeleryWorker

#: The variable of the environment with how to connect.
CONNECTION = "SAFE_BENCHMARK_PROCRASTINATE"

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ.get(CONNECTION, ""))
)


@app.task
def nothing(number: int) -> None:
    """Do nothing."""


class Sender:
    """Sends the task, a message at a time, as Celery's ``delay`` does."""

    def delay(self, number: int) -> None:
        """Send one."""
        nothing.defer(number=number)


class ProcrastinateWorker(CeleryWorker):
    """
    ``python -m procrastinate worker``, running while the block runs.

    Args:
        conninfo: How to connect, as libpq reads it.
        concurrency: How many tasks run at once.
    """

    def __init__(self, conninfo: str, concurrency: int) -> None:
        super().__init__("", env={CONNECTION: conninfo})
        self.command = [
            sys.executable, "-m", "procrastinate", "--app", f"{__name__}.app",
            "worker", "--concurrency", str(concurrency),
        ]  # fmt: skip

    def _is_ready(self) -> bool:
        if not self.process.running:
            raise RuntimeError(f"The worker ended instead of getting ready:\n{self.log}")
        return "Starting worker" in self.log
