"""Where tasks of the tests meet: each stays in a room until the test opens its gate."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Task

from django_celery_safe import iter_locks
from tests.processes import Gauge, Journal, wait_for


@dataclass(frozen=True)
class Room:
    """A folder that a task finds by its path, with witnesses of who was there."""

    folder: Path

    @property
    def path(self) -> str:
        """The path as a text, which is sent to the task."""
        return str(self.folder)

    @property
    def gauge(self) -> Gauge:
        """How many were inside at once."""
        return Gauge(self.folder / "gauge")

    @property
    def journal(self) -> Journal:
        """The journal that the tasks write."""
        return Journal(self.folder / "journal")

    @contextmanager
    def entered(self, task: "Task[Any, Any]") -> Iterator[None]:
        """Be inside, and note the run and the lock that it holds."""
        held = {lock.name for lock in iter_locks() if lock.holder.task_id == task.request.id}
        with self.gauge.inside():
            self.note("started", task, locks=list(held))
            yield

    def stay(self, task: "Task[Any, Any]") -> list[Any]:
        """Be inside until the gate opens; return the task's id and its retries."""
        with self.entered(task):
            wait_for((self.folder / "gate").exists, 60)
        return [task.request.id, task.request.retries]

    def note(self, effect: str, task: "Task[Any, Any]", **details: Any) -> None:
        """Note something with the task's id."""
        self.journal.write(effect, id=task.request.id, retries=task.request.retries, **details)

    def open(self) -> None:
        """Let everybody go, those who come later too."""
        (self.folder / "gate").touch()

    def kill_run(self) -> None:
        """Wait for a run in the room, and end the process of the latest."""
        self.until(self.runs, "it does not run", 40)
        os.kill(self.runs()[-1]["pid"], signal.SIGKILL)

    def runs(self, task_id: str | None = None) -> list[dict[str, Any]]:
        """Return the runs that began, of this id or of all."""
        details = {} if task_id is None else {"id": task_id}
        return self.journal.entries("started", **details)

    def until(self, condition: Callable[[], Any], message: str, timeout: float = 20) -> Any:
        """Wait for a condition; the error tells what was noted here."""
        try:
            return wait_for(condition, timeout, message)
        except TimeoutError as error:
            raise TimeoutError(f"{error} Noted: {self.journal.entries()}") from None
