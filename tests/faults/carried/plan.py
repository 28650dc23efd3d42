"""The plan of a run, and the files in which its processes record what happens."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from django.conf import settings

from tests.faults.rooms import Room
from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import Witness as AnyWitness
from tests.faults.scenario import option
from tests.processes import Journal

#: Lease of a run, s: for so long a killed one keeps its task from others.
LEASE: Final = 3.0

#: ``OUTBOX_RESEND_AFTER``, s: after that a relay sends again what no worker began.
RESEND_AFTER: Final = 3.0

#: Longest time, s, that a task takes, and how often of a thousand times; the last are
#: longer than a lease.
DURATIONS: Final = {0.06: 640, 0.4: 355, LEASE + 1: 5}

#: Part of the transactions that is rolled back, and of those in which a savepoint is.
ROLLED_BACK, HALF_ROLLED_BACK = 0.1, 0.05

#: The most tasks that a transaction sends.
MOST_TASKS: Final = 4


class Task(NamedTuple):
    """
    A task as it is sent.

    Attributes:
        ending: How it is to end: ``done``, ``failed``, or ``retried``, and done the next time.
        seconds: How long each of its runs takes.
    """

    id: str
    ending: str
    seconds: float


class Transaction(NamedTuple):
    """
    The tasks that one transaction sends.

    Attributes:
        tasks: What it commits; empty: all is rolled back.
        dropped: What is rolled back, with a savepoint or with the whole.
    """

    tasks: list[Task]
    dropped: list[Task]


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        pause: Mean time between two transactions, s.
        durations: Longest time that a task takes, s, and how often of so many times.
        workers: How many there are.
        concurrency: Children of each.
        quiet: When all rows have ended and nothing has moved for so long, s, nothing will.
        patience: The same while there are rows whose task has not ended.
        at_most: All must have ended after this time, s.
    """

    broker: str = option("redis", "what carries the messages", ("redis", "rabbitmq"))
    tasks: int = option(2_000, "how many are committed; every tenth retries")
    child_kills: int = option(40, "how often a worker's child is killed")
    worker_kills: int = option(4, "how often a whole worker is")
    relay_kills: int = option(2, "how often the relay is")
    pauses: int = option(4, "how often a child stands still for longer than its lease")
    restarts: int = option(3, "how often the broker is restarted; Redis forgets all by that")
    flushes: int = option(2, "how often the broker loses what waits in it")
    pause: float = 0.12
    durations: tuple[tuple[float, int], ...] = tuple(DURATIONS.items())
    workers: int = 2
    concurrency: int = 2
    quiet: float = 5.0
    patience: float = 60.0
    at_most: float = 900.0

    @property
    def harms(self) -> dict[str, int]:
        """The faults of the run, and how often each happens."""
        return {
            "children killed": self.child_kills,
            "workers killed": self.worker_kills,
            "relays killed": self.relay_kills,
            "children paused": self.pauses,
            "broker restarted": self.restarts,
            "broker flushed": self.flushes,
        }

    def transactions(self) -> Iterator[Transaction]:
        """Yield what the transactions send, until so many tasks are committed."""
        chance = random.Random(f"{self.seed}:transactions")
        committed, dropped = 0, 0
        while committed < self.tasks:
            size = min(self.tasks - committed, chance.randint(1, MOST_TASKS))
            kind = chance.random()
            tasks: list[Task] = []
            if kind >= ROLLED_BACK:
                tasks = [self._task(committed + one, "task", chance) for one in range(size)]
            # Whole transactions, or one more task in a savepoint.
            extra = size if not tasks else 1 if kind < ROLLED_BACK + HALF_ROLLED_BACK else 0
            lost = [self._task(dropped + one, "dropped", chance) for one in range(extra)]
            yield Transaction(tasks, lost)
            committed, dropped = committed + len(tasks), dropped + len(lost)

    def _task(self, number: int, name: str, chance: random.Random) -> Task:
        ending = "failed" if number % 100 == 7 else "retried" if number % 10 == 3 else "done"
        times, weights = zip(*self.durations, strict=True)
        (longest,) = chance.choices(times, weights)
        return Task(f"{name}-{number}", ending, chance.uniform(longest / 2, longest))


class Witness(AnyWitness):
    """Two journals, and a room that shows what goes on just now."""

    @property
    def runs(self) -> Journal:
        """The runs of tasks that began and ended, and the processes that were paused in one."""
        return self.open("runs")

    @property
    def trouble(self) -> Journal:
        """The kills and pauses of processes, and the restarts and flushes of servers."""
        return self.open("trouble")

    @property
    def room(self) -> Room:
        """Which process is inside a task."""
        return Room(self.folder / "inside")

    @property
    def size(self) -> int:
        """How much was noted of runs."""
        path = self.runs.path
        return path.stat().st_size if path.exists() else 0


def find_witness() -> Witness:
    """Return where this process is to note what happens."""
    return Witness(Path(settings.TEST_WITNESS))
