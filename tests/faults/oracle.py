"""Oracles: checks that read a recorded history and find the broken promises."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

HistoryType = TypeVar("HistoryType")

#: What is shown of many durations, as parts of all.
PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}

#: The check of each oracle that enough has happened. A violation of it breaks no promise.
TOO_LITTLE = "too little"


class Violation(NamedTuple):
    """A broken promise: the check that found it, and its text."""

    check: str
    text: str


Findings: TypeAlias = Iterator[str]


@dataclass(frozen=True)
class Oracle(Generic[HistoryType]):
    """
    Reads from a history alone whether the promises were kept.

    A check that found nothing says something only if there was something to be found, so each
    oracle has a check ``too_little``, too.

    Args:
        count: Counts what happened, for readers.
        checks: Each yields a text for whatever violates it, and is named by its function.
        measure: Returns lists of measured values by their names, for the saved files.
    """

    count: Callable[[HistoryType], Mapping[str, float]]
    checks: Sequence[Callable[[HistoryType], Iterable[str]]]
    measure: Callable[[HistoryType], Mapping[str, Sequence[float]]] = lambda history: {}

    def check(self, history: HistoryType) -> list[Violation]:
        """Run every check and return all violations."""
        return [
            Violation(check.__name__.replace("_", " "), finding)
            for check in self.checks
            for finding in check(history)
        ]


class WithKills:
    """A history that knows what processes were in when they were killed."""

    #: The moments at which a process with this id was killed; a new one may get the id of a dead.
    killed: dict[int, list[int]]

    def all_begun(self) -> Iterator[Any]:
        """Yield what processes began, each with its ``pid`` and the moment ``begun``."""
        raise NotImplementedError

    def kill_of(self, one: Any) -> int | None:
        """Return the moment of a kill in something or right after it; None: there was none."""
        return next((at for at in self.killed.get(one.pid, ()) if self.was_in(one, at)), None)

    def was_in(self, one: Any, moment: int) -> bool:
        """Return whether this is what a process had begun last at a moment."""
        begun = self._begun[one.pid]
        place = bisect.bisect(begun, moment)
        return place > 0 and begun[place - 1] == one.begun

    @cached_property
    def _begun(self) -> dict[int, list[int]]:
        begun: dict[int, list[int]] = defaultdict(list)
        for one in sorted(self.all_begun(), key=attrgetter("begun")):
            begun[one.pid].append(one.begun)
        return begun


def scarce(counts: Mapping[str, float], wanted: Mapping[str, float]) -> Iterator[str]:
    """Yield a text for each thing that happened less often than it is wanted."""
    for name, number in wanted.items():
        if (found := counts.get(name, 0)) < number:
            yield f"{name}: {found:g}, and {number:g} are wanted."


def percentiles(name: str, values: list[float]) -> dict[str, float]:
    """Return the median, two higher percentiles and the maximum of sorted values."""
    return {f"{name}, {part}": percentile(values, share) for part, share in PARTS.items()}


def percentile(values: list[float], part: float) -> float:
    """Return the value below which this part of the sorted values lies; 0: there are none."""
    place = min(len(values) - 1, int(part * len(values)))
    return round(values[place], 2) if values else 0.0
