"""Oracles: checks that read a recorded history and find the broken promises."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

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
