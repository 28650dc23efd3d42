"""Something that locks protect, outside of them: it takes writes that carry fences."""

import fcntl
import os
import struct
from pathlib import Path

#: The largest fence seen, and the number of writes tried.
STATE = struct.Struct("<QQ")


def write(path: Path, fence: int) -> tuple[int, bool]:
    """
    Try to write to a resource; return which write of all it was, and whether it was accepted.

    A write is accepted if its fence is no smaller than all that the resource has seen. Each is one
    turn under the lock of the resource's file.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        largest, writes = STATE.unpack(file.read(STATE.size) or bytes(STATE.size))
        file.seek(0)
        file.write(STATE.pack(max(largest, fence), writes + 1))
    return writes + 1, fence >= largest
