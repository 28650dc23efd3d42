"""Scenarios: each is a plan, a function that records a run of it, and an oracle."""

import io
import logging
import os
import random
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command

from tests.app.celery import app
from tests.faults.lab import BROKEN, Lab
from tests.faults.oracle import Oracle
from tests.processes import Journal
from tests.servers.databases import SERVERS


def option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of a plan that the command line can set."""
    return field(default=default, metadata={"help": text, "choices": choices})


def option_name(name: str) -> str:
    """Return the command line's name of a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class AnyPlan:
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


@dataclass(frozen=True, kw_only=True)
class WorkersPlan(AnyPlan):
    """
    A plan with a broker, a database and workers.

    Args:
        workers: How many there are.
        concurrency: Children of each.
    """

    broker: str = option("redis", "what carries the messages", ("redis", "rabbitmq"))
    database: str = option("postgres", "what has the rows", SERVERS)
    workers: int = 2
    concurrency: int = 2


@dataclass(frozen=True)
class Room:
    """A folder with one file for each process that is inside of something, or died there."""

    folder: Path

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Show in the block that this process is inside, and of what."""
        self.folder.mkdir(exist_ok=True)
        mark = self._mark(os.getpid())
        mark.write_text(what)
        try:
            yield
        finally:
            mark.unlink()

    def pids(self) -> set[int]:
        """Return the processes that are inside, or died there."""
        return {int(mark.name) for mark in self.folder.glob("*")}

    def what(self, pid: int) -> str | None:
        """Return what a process is inside of, or died in; None: nothing."""
        mark = self._mark(pid)
        return mark.read_text() if mark.exists() else None

    def clear(self, pid: int) -> bool:
        """Forget a dead or paused process; return whether it was inside."""
        was_inside = self._mark(pid).exists()
        self._mark(pid).unlink(missing_ok=True)
        return was_inside

    def _mark(self, pid: int) -> Path:
        return self.folder / str(pid)


class Witness:
    """Files in which processes record what really happened, found by their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: What tasks and senders did.
        self.journal = Journal(folder / "journal.jsonl")
        #: The harms that were done: what was killed, paused, restarted or delivered twice.
        self.trouble = Journal(folder / "trouble.jsonl")
        #: The processes that are inside a task just now.
        self.room = Room(folder / "inside")
        #: The log of the processes.
        self.log = folder / "processes.log"


def find_witness() -> Witness:
    """Return the witness that this process is to write to."""
    return Witness(Path(settings.TEST_WITNESS))


def enter() -> None:
    """Be a process of the workers' app, which writes its log for the witness."""
    logging.basicConfig(filename=find_witness().log)
    app.finalize()


def relay() -> None:
    """Relay until told to end, or killed."""
    call_command("celery_outbox", "relay", "--database", "default", stdout=io.StringIO())


def find_fault() -> str:
    """Return the name of the fault that this worker is to have; empty: it has none."""
    return os.environ.get(BROKEN, "")


class Stillness:
    """
    Tells for how long a journal has not grown.

    Args:
        at_most: The run fails when it takes longer, s.
    """

    def __init__(self, journal: Journal, at_most: float) -> None:
        self._path, self._at_most = journal.path, at_most
        self._ends_at = time.monotonic() + at_most
        self._seen, self._since = -1, time.monotonic()

    def seconds(self) -> float:
        """
        Return for how long nothing was written.

        Raises:
            TimeoutError: The run takes too long.
        """
        seen, now = self._path.stat().st_size if self._path.exists() else 0, time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now > self._ends_at:
            raise TimeoutError(f"After {self._at_most:g} s there is no end.")
        return now - self._since

    def is_over(self, plan: Any, is_any_left: Callable[[], bool]) -> bool:
        """Return whether nothing is left and nothing moves, or nothing has moved for long."""
        seconds = self.seconds()
        return seconds > plan.patience or (seconds > plan.quiet and not is_any_left())


def draw_duration(chance: random.Random, durations: Mapping[float, int]) -> float:
    """Return how long a task takes, s: of durations with their weights, at least half of it."""
    (longest,) = chance.choices(list(durations), list(durations.values()))
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
    plan: type[AnyPlan]
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
