"""
The journal of the demo's worker: a file to which each of its processes appends lines.

Written by Celery's signals in the worker, read by the demo.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from celery import signals

#: A worker that listens says so by this file.
READY: Final = "worker-ready"


@dataclass(frozen=True)
class Run:
    """A run of a task that came to an end in its process."""

    task: str
    task_id: str
    #: Celery's word: SUCCESS, RETRY, FAILURE, IGNORED, REJECTED.
    state: str
    arguments: list[Any]
    returned: Any


class Journal:
    """The file, for both sides."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._ready = folder / READY

    def connect(self) -> None:
        """Write down from now on what ends in this process and the children it forks."""
        signals.task_postrun.connect(self._write, weak=False, dispatch_uid="demo-journal")
        signals.worker_ready.connect(self._note_ready, weak=False, dispatch_uid="demo-ready")

    @property
    def worker_is_ready(self) -> bool:
        """Whether the worker takes messages by now."""
        return self._ready.exists()

    def runs(self, task: str) -> list[Run]:
        """Return the runs of a task that have ended so far."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().split("\n")
        # The text behind the last line break is empty, or a line that is being written.
        runs = [Run(**json.loads(line)) for line in lines[:-1]]
        return [run for run in runs if run.task == task]

    def _note_ready(self, **_: Any) -> None:
        self._ready.touch()

    def _write(
        self, *, task_id: str, task: Any, args: Any, retval: Any, state: str | None, **_: Any
    ) -> None:
        run = {
            "task": task.name,
            "task_id": task_id,
            "state": state,
            "arguments": args,
            "returned": retval,
        }
        line = json.dumps(run, default=repr) + "\n"
        # One write at the file's end: lines of several processes don't mix.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
