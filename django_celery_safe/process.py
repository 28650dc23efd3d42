"""
The id of this process, which costs a system call each time that it is asked for.

Each acquisition compares it several times, because a fork copies what belongs to its parent.
"""

from __future__ import annotations

import os


class _ThisProcess:
    """The process that runs this code."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.find_pid()

    def find_pid(self) -> None:
        """Ask the system for the id: at the start, and in each forked child."""
        self.pid = os.getpid()


this_process = _ThisProcess()
os.register_at_fork(after_in_child=this_process.find_pid)
