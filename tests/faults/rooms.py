"""The tasks and steps that processes of a run are inside of just now."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """A folder with one file for each process that is inside of something, or died there."""

    folder: Path

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Show in the block that this process is inside, and of what."""
        self.folder.mkdir(exist_ok=True)
        mark = self._mark(os.getpid())
        mark.write_text(what)
        try:
            yield
        finally:
            mark.unlink()

    def pids(self) -> set[int]:
        """Return the processes that are inside, or died there."""
        return {int(mark.name) for mark in self.folder.glob("*")}

    def what(self, pid: int) -> str | None:
        """Return what a process is inside of, or died in; None: nothing."""
        try:
            return self._mark(pid).read_text()
        except FileNotFoundError:
            return None

    def clear(self, pid: int) -> bool:
        """Forget a dead process; return whether it died inside."""
        try:
            self._mark(pid).unlink()
        except FileNotFoundError:
            return False
        return True

    def _mark(self, pid: int) -> Path:
        return self.folder / str(pid)
