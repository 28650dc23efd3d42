"""Something that locks protect, outside of them: it takes writes that carry fences."""

import fcntl
import os
import struct
from pathlib import Path

#: The largest fence seen, and the number of writes tried.
STATE = struct.Struct("<QQ")


class Resource:
    """
    Accepts a write if its fence is no smaller than all that it has seen.

    There is one file for each name; each write is one turn under that file's lock.

    Args:
        folder: Shared by all processes.
        guarded: False: accepts every write, to show that the checker notices.
    """

    def __init__(self, folder: Path, guarded: bool = True) -> None:
        self._folder = folder
        self._guarded = guarded
        self._files: dict[str, int] = {}

    def write(self, name: str, fence: int) -> tuple[int, bool]:
        """Try to write; return which write of all it was, and whether it was accepted."""
        file = self._open(name)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            largest, writes = STATE.unpack(os.pread(file, STATE.size, 0) or bytes(STATE.size))
            os.pwrite(file, STATE.pack(max(largest, fence), writes + 1), 0)
            return writes + 1, fence >= largest or not self._guarded
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _open(self, name: str) -> int:
        if name not in self._files:
            path = self._folder / f"resource-{name}"
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT)
        return self._files[name]
