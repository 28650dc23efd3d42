"""
The records of a run: one for each operation, and one for each fault.

All times are ns by CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

YES = "yes"
NO = "no"

#: Actions that ask the store: these are the operations of a run.
OPERATIONS = frozenset({"acquire", "extend", "ensure", "release"})


class Record(NamedTuple):
    """
    One thing that a holder did.

    Attributes:
        process: Number of the process.
        action: acquire, extend, ensure, release, look (``held`` was read), write (to
            the guarded resource) or leave (the lock was dropped without a release).
        lock: The name of the place that the acquisition has, which is the lock's own name for
            the first one, and for an acquisition that did not succeed.
        sent: Read from the clock before the call.
        returned: Read from the clock after the call.
        outcome: ``yes``, ``no``, or the name of the error that was raised.
        token: The acquisition that it was about; None: it did not succeed.
        fence: The fence of that acquisition.
        seconds: Length of the lease that was asked for; 0: none was.
        left: The value of ``remaining`` right after ``returned``, ns.
        number: The number of a write at the resource, from 1 on.
    """

    process: int
    action: str
    lock: str
    sent: int
    returned: int
    outcome: str
    token: str | None = None
    fence: int | None = None
    seconds: float = 0.0
    left: int = 0
    number: int = 0


class Pause(NamedTuple):
    """A process stood still, from some moment before ``until`` and after ``since``."""

    process: int
    since: int
    until: int


class MemoryLoss(NamedTuple):
    """The store lost its memory: it was ended at ``since`` and surely gone at ``gone``."""

    since: int
    gone: int


def is_operation(record: Record) -> bool:
    """Whether this was a request that the store answered."""
    return record.action in OPERATIONS and record.outcome != "LockBackendError"


def iter_records(folder: Path) -> Iterator[Record]:
    """Yield what the processes of a run wrote into this folder."""
    for path in sorted(folder.glob("process-*.jsonl")):
        # One document is read four times as fast as many.
        for fields in json.loads(f"[{','.join(path.read_text().splitlines())}]"):
            yield Record(*fields)
