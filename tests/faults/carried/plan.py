"""The plan of a run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.faults.scenario import WorkersPlan, draw_duration, option

#: Endings of a run after which its task does not run again.
FINAL: Final = {"done", "failed"}

#: Lease of a run, s: a killed run keeps other runs away for that long.
LEASE: Final = 3.0

#: ``OUTBOX_RESEND_AFTER``, s: a relay then re-sends a message that no worker began.
RESEND_AFTER: Final = 3.0

#: Pause of a relay between two looks, s.
RELAY_LOOK: Final = 0.05

#: Longest time, s, that a task takes, and how many of a thousand tasks take it; the last
#: is longer than a lease.
DURATIONS: Final = {0.06: 640, 0.4: 355, LEASE + 1: 5}

#: Part of the transactions that is rolled back, and part in which only a savepoint is.
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
        tasks: The tasks that it commits; empty: the transaction is rolled back.
        dropped: The tasks that are rolled back, with a savepoint or with the transaction.
    """

    tasks: list[Task]
    dropped: list[Task]


@dataclass(frozen=True, kw_only=True)
class Plan(WorkersPlan):
    """
    The plan of one recording.

    Args:
        pause: Mean time between two transactions, s.
        quiet: The run ends when all rows have ended and nothing has moved for this time, s.
        patience: The same, s, while there are tasks that have not ended.
        at_most: The run fails if it takes longer, s, plus a little for each task.
        grace: How late the task of a killed process may begin again while a worker is idle, s.
    """

    tasks: int = option(2_000, "how many tasks; a tenth retries, a hundredth fails")
    child_kills: int = option(40, "how often a worker's child is killed")
    worker_kills: int = option(4, "how often a whole worker is")
    relay_kills: int = option(2, "how often the relay is")
    pauses: int = option(4, "how often a child stands still for longer than its lease")
    restarts: int = option(3, "how often the broker is restarted; Redis forgets all by that")
    flushes: int = option(2, "how often the broker loses what waits in it")
    database_restarts: int = option(1, "how often the database's server is")
    pause: float = 0.12
    concurrency: int = 3
    quiet: float = 5.0
    patience: float = 60.0
    at_most: float = 600.0
    grace: float = 2.0

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
            "database restarted": self.database_restarts,
        }

    @property
    def limit(self) -> float:
        """The seconds after which all tasks must have ended."""
        return self.at_most + 0.15 * self.tasks

    def transactions(self) -> Iterator[Transaction]:
        """Yield the transactions, until the planned number of tasks is committed."""
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
        return Task(f"{name}-{number}", ending, draw_duration(chance, DURATIONS))
