"""Scenarios: each is a plan, a function that records a run of it, and an oracle."""

import random
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.faults.lab import Lab
from tests.faults.oracle import Oracle
from tests.faults.rooms import Room
from tests.processes import Journal


def option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of a plan that the command line can set."""
    return field(default=default, metadata={"help": text, "choices": choices})


def option_name(name: str) -> str:
    """Return the command line's name of a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """
    The settings of a run, as plain data that goes to every process.

    Args:
        seed: Decides what is done and who is hit; the timing is the machine's.
        broken: Name of the variant with a deliberate fault; empty: nothing is broken.
    """

    seed: int = 0
    broken: str = ""

    @classmethod
    def options(cls) -> dict[str, Field[Any]]:
        """Return the fields that the command line can set, by their names."""
        return {each.name: each for each in fields(cls) if "help" in each.metadata}

    def objection(self) -> str | None:
        """Return why a run of this plan would prove nothing; None: it can be run."""
        return None


@dataclass(frozen=True)
class Witness:
    """Files in which processes record what really happened, found by their folder."""

    folder: Path

    def open(self, name: str) -> Journal:
        """Return the journal of this name."""
        return Journal(self.folder / f"{name}.jsonl")

    @property
    def journal(self) -> Journal:
        """The journal of a run that needs only one."""
        return self.open("journal")

    @property
    def trouble(self) -> Journal:
        """The harms that were done: what was killed, paused, restarted or delivered twice."""
        return self.open("trouble")

    @property
    def room(self) -> Room:
        """The processes that are inside a task just now."""
        return Room(self.folder / "inside")

    @property
    def log(self) -> Path:
        """The log of the processes."""
        return self.folder / "processes.log"


def draw_duration(chance: random.Random, durations: Sequence[tuple[float, int]]) -> float:
    """Return how long a task takes, s: of durations with their weights, at least half of it."""
    times, weights = zip(*durations, strict=True)
    (longest,) = chance.choices(times, weights)
    return chance.uniform(longest / 2, longest)


@dataclass(frozen=True)
class Scenario:
    """
    Something that goes wrong on purpose, and what must hold all the same.

    Args:
        name: Its name on the command line.
        summary: One line for the list of scenarios.
        plan: Its fields made by ``option`` are the options of the command line.
        record: Runs a plan in a lab and returns the history of what happened.
        oracle: Finds the broken promises in the history.
        variants: Names of deliberate faults, each with the checks of which one must find it.
    """

    name: str
    summary: str
    plan: type[Plan]
    record: Callable[[Any, Lab], Any]
    oracle: Oracle[Any]
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def add_options(self, parser: ArgumentParser) -> None:
        """Let a parser read the options."""
        for name, each in self.plan.options().items():
            parser.add_argument(
                option_name(name),
                type=type(each.default),
                default=each.default,
                choices=each.metadata["choices"],
                help=f"{each.metadata['help']}; default: %(default)s",
            )
        if self.variants:
            parser.add_argument(
                "--broken", choices=self.variants, default="", help="break this on purpose"
            )
