"""The table at the end of the demo: promise, expected, seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Promise:
    """One line of the closing table."""

    promise: str
    expected: str
    seen: str
    kept: bool


def counted(promise: str, expected: int, seen: int) -> Promise:
    """Return a promise that is kept if exactly as many were seen as expected."""
    return Promise(promise, str(expected), str(seen), kept=expected == seen)


@dataclass(frozen=True)
class Report:
    """How the demo went."""

    promises: list[Promise]
    seconds: float
    #: Why it ended before its last scene; None: it did not.
    error: str | None
    #: The end of the worker's log.
    log: str

    @property
    def kept(self) -> bool:
        """Whether every promise was put to the test and kept."""
        return self.error is None and all(promise.kept for promise in self.promises)

    def as_json(self) -> dict[str, Any]:
        """Return the report for a machine."""
        report = {
            "promises": [asdict(promise) for promise in self.promises],
            "kept": self.kept,
            "seconds": round(self.seconds, 1),
        }
        return report if self.error is None else {**report, "error": self.error}

    def as_table(self) -> Table:
        """Return the report's promises for a person."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("promise", ratio=1)
        table.add_column("expected")
        table.add_column("seen")
        table.add_column("")
        for promise in self.promises:
            mark = Text("kept", "green") if promise.kept else Text("broken", "bold red")
            table.add_row(promise.promise, promise.expected, promise.seen, mark)
        return table
