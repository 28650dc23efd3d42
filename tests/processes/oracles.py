"""
Witnesses outside the locks: they write the real events to files.

Both are found by their folder or path alone, so any process can take part: pass
the object to ``run_in_processes``, or its path to a worker.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Journal:
    """A file to which processes append effects, one JSON object for each line."""

    path: Path

    def write(self, effect: str, **details: Any) -> None:
        """
        Append one effect, with the monotonic time in ns and the process id.

        The time is the same clock in all processes of this machine.
        """
        entry = {"effect": effect, "at_ns": time.monotonic_ns(), "pid": os.getpid(), **details}
        line = json.dumps(entry).encode() + b"\n"
        # One write with O_APPEND: lines of several processes never mix.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def entries(self, effect: str | None = None, **details: Any) -> list[dict[str, Any]]:
        """Return the entries of this effect (None: any) with these details, as written."""
        wanted = details if effect is None else {"effect": effect, **details}
        if not self.path.exists():
            return []
        # Another process may be writing the last line just now.
        lines = self.path.read_text().rpartition("\n")[0].splitlines()
        return [entry for entry in map(json.loads, lines) if wanted.items() <= entry.items()]

    def count(self, effect: str | None = None, **details: Any) -> int:
        """Return how often this happened."""
        return len(self.entries(effect, **details))

    def tally(self, detail: str, effect: str | None = None) -> Counter[Any]:
        """Return how often each value of one detail occurs."""
        return Counter(entry[detail] for entry in self.entries(effect) if detail in entry)


@dataclass(frozen=True)
class Gauge:
    """
    Sees whether two are inside a critical section at once.

    An entry takes the kernel's lock of the section's file, which ends with the process. If somebody
    else has that lock, the entry is not alone.
    """

    folder: Path

    @contextmanager
    def inside(self, section: str = "all") -> Iterator[None]:
        """Stay in a section during the block."""
        journal = self._journal
        with (self.folder / section.encode().hex()).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                is_alone = False
            journal.write("enter", section=section, is_alone=is_alone)
            yield

    def entered(self) -> int:
        """Return how often sections were entered."""
        return self._journal.count("enter")

    def violations(self) -> list[dict[str, Any]]:
        """Return the entries into a section in which somebody was already."""
        return self._journal.entries("enter", is_alone=False)

    @property
    def _journal(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        return Journal(self.folder / "entries.jsonl")
