"""Figures: how they are measured against each other, held to limits and shown."""

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

LIMITS = Path(__file__).with_name("limits.json")

#: Seconds for which each candidate runs before it is measured.
WARM_UP = 0.2

#: Seconds for which each candidate runs in a round.
ROUND = 0.05


Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Figure:
    """
    One measured number.

    Args:
        value: A ratio, or a number of what the name says.
        limit: What the value must keep to; None: a floor or a peer, for comparison.
        better: Which way is better; ``lower``: the limit is the highest value allowed.
        note: What a reader must know to believe the number.
    """

    name: str
    value: float
    limit: float | None = None
    better: Literal["lower", "higher"] = "lower"
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value keeps to its limit; without one it always does."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


def with_limits(benchmark: str, figures: Iterable[Figure]) -> list[Figure]:
    """
    Give figures the limits that ``limits.json`` holds for this benchmark.

    Raises:
        LookupError: It holds a limit for a figure that was not measured.
    """
    limits: dict[str, float] = json.loads(LIMITS.read_text()).get(benchmark, {})
    limited = [replace(figure, limit=limits.pop(figure.name, None)) for figure in figures]
    if limits:
        raise LookupError(f"limits.json: {benchmark} did not measure {', '.join(limits)}.")
    return limited


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 25
) -> dict[str, list[float]]:
    """
    Measure candidates side by side, so that what slows the machine slows all of them.

    Each round runs each candidate once, in an order of its own, for about
    ``ROUND`` seconds. Garbage is collected between rounds, not inside.

    Returns:
        For each candidate the µs per call in each round.
    """
    calls = {name: _warm_up(call) for name, call in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(rounds):
        random.shuffle(order)
        gc.collect()
        gc.disable()
        try:
            for name in order:
                samples[name].append(_time(candidates[name], calls[name]))
        finally:
            gc.enable()
    return samples


def ratio(samples: Mapping[str, Sequence[float]], candidate: str, floor: str) -> float:
    """Return the median over all rounds of candidate / floor within one round."""
    pairs = zip(samples[candidate], samples[floor], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def least(values: Iterable[float]) -> float:
    """
    Return the mean of the fastest quarter of some rounds.

    Other work on the machine makes a round slower, never faster, so medians vary more than these.
    """
    fastest = sorted(values)
    return statistics.fmean(fastest[: len(fastest) // 4])


def take_turns(
    candidates: Mapping[str, Callable[[], Sample]], rounds: int
) -> dict[str, list[Sample]]:
    """
    Let each candidate measure itself once in each round, in an order by chance.

    The first round connects and compiles, and is not counted.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    for counted in range(rounds + 1):
        for name in random.sample(list(candidates), len(candidates)):
            gc.collect()
            sample = candidates[name]()
            samples[name] += [sample] if counted else []
    return samples


def medians_of(candidates: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Call each candidate so often, one after the other by chance; return the median µs of each."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.disable()
    for _ in range(calls):
        for name in random.sample(list(candidates), len(candidates)):
            times[name].append(seconds_of(candidates[name]))
    gc.enable()
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes, s."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _warm_up(call: Callable[[], object]) -> int:
    """Run a candidate for a while; return how many calls fill a round."""
    calls, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < WARM_UP:
        call()
        calls += 1
    return max(1, round(calls / passed * ROUND))


def _time(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def shown(value: float) -> str:
    """Return a number for readers: whole, with two decimals, or two digits of a small one."""
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def print_table(title: str, figures: Sequence[Figure]) -> None:
    """Print a table for readers."""
    print(title)
    for figure in figures:
        verdict = "ok" if figure.ok else "MISSED"
        limit = "" if figure.limit is None else f"{figure.limit:g} {verdict}"
        print(f"  {figure.name:44}{shown(figure.value):>12}{limit:>14}  {figure.note}")
