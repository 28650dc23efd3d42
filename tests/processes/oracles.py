"""
Witnesses outside the locks: they write the real events to files.

Both are found by their folder or path alone, so any process can take part: pass
the object to ``run_in_processes``, or its path to a worker.
"""

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


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
    Counts how many processes are inside a critical section at once.

    A process that enters writes a file of its own and then counts the files. If two
    stays overlap, the later process always sees the other's file, so no overlap is
    missed. Files of dead processes do not count.
    """

    folder: Path

    @contextmanager
    def inside(self, section: str = "all") -> Iterator[int]:
        """Stay in a section during the block; gives how many are in it, this one included."""
        room = self.folder / section.encode().hex()
        room.mkdir(parents=True, exist_ok=True)
        ticket = room / f"{os.getpid()}.{uuid.uuid4().hex}"
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
        number = sum(1 for other in room.iterdir() if other == ticket or _is_alive(other))
        self._journal.write("enter", section=section, number=number)
        try:
            yield number
        finally:
            ticket.unlink()

    def entered(self) -> int:
        """Return how often sections were entered."""
        return self._journal.count("enter")

    def violations(self) -> list[dict[str, Any]]:
        """Return every entry into a section in which somebody was already."""
        return [entry for entry in self._journal.entries("enter") if entry["number"] > 1]

    @property
    def _journal(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        return Journal(self.folder / "entries.jsonl")


def _is_alive(ticket: Path) -> bool:
    try:
        status = psutil.Process(int(ticket.name.partition(".")[0])).status()
    except psutil.NoSuchProcess:
        return False
    return bool(status != psutil.STATUS_ZOMBIE)
