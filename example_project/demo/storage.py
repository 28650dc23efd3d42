"""
The place for pictures, which lets some wait, and counts what was written to it.

Used by the demo's worker, told and asked by the demo, through files in the demo's folder.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from time import sleep
from typing import IO, Any, Final

from django.core.files.storage import FileSystemStorage

from .errors import DemoError
from .sandbox import find_folder

#: How often a file that is held looks whether it may be written, s.
LOOK_EVERY: Final = 0.02


class Storage(FileSystemStorage):
    """Files as they ever were, each written at once unless it is held."""

    def _save(self, name: str, content: IO[Any]) -> str:
        Gate().pass_through(name)
        written = super()._save(name, content)  # type: ignore[misc] # not in the stubs
        Gate().note_written(written)
        return str(written)


class Gate:
    """The held and written files, shared by both sides."""

    def __init__(self) -> None:
        folder = find_folder()
        if folder is None:
            raise DemoError("The demo's storage is used outside of its folder.")
        self._held = folder / "held"
        self._written = folder / "written"

    def hold(self, name: str) -> None:
        """Let the writing of a file, of which one at a time is held, wait until :meth:`release`."""
        self._held.write_text(f"{name}\n")

    def release(self) -> None:
        """Let the file be written, by whoever waits and whoever comes."""
        self._held.unlink()

    def find_waiting(self) -> list[int]:
        """Return the ids of the processes that have met the hold, in their order."""
        return [int(pid) for pid in self._held.read_text().split("\n")[1:-1]]

    def written(self) -> Counter[str]:
        """Return how often each file was written to its end."""
        return Counter(self._written.read_text().split("\n")[:-1])

    def pass_through(self, name: str) -> None:
        """Wait if the file is held."""
        if self._is_held(name):
            _append(self._held, str(os.getpid()))
        while self._is_held(name):
            sleep(LOOK_EVERY)

    def note_written(self, name: str) -> None:
        """Note that a file was written to its end."""
        _append(self._written, name)

    def _is_held(self, name: str) -> bool:
        try:
            return self._held.read_text().split("\n")[0] == name
        except FileNotFoundError:
            return False


def _append(path: Path, line: str) -> None:
    # One write at the file's end: lines of several processes don't mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
