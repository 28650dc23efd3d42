"""The plan of a run, and the files in which its processes record what happens."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from django.conf import settings

from tests.faults.brokers import BrokerName
from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import Witness as AnyWitness
from tests.faults.scenario import draw_duration, option
from tests.processes import Journal
from tests.servers.databases import DatabaseKind

#: Lease of a step, s: for so long a killed one keeps it from others.
LEASE: Final = 3.0

#: After so many seconds Redis gives out again what was not acknowledged.
VISIBILITY_TIMEOUT: Final = 4.0

#: How long the sweep lets a step wait to be begun, s: shorter than all has stood still, and
#: longer than it takes itself, so that it sends nothing twice.
PATIENCE: Final = 3.0

#: After so many deaths a step fails: more than there are in any.
MAX_DEATHS: Final = 20

#: Part of the messages that is delivered twice, and the longest time in between, s.
TWICE: Final = 0.2
LATEST: Final = 2.0

#: Longest time, s, that a step takes, and how often of a thousand times; the last are
#: longer than a lease.
DURATIONS: Final = {0.03: 965, 0.4: 32, LEASE + 1: 3}

#: A task that is redelivered when its process dies, and one with Celery's defaults.
TASKS: Final = ("tests.faults.stages.work.late", "tests.faults.stages.work.early")


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        durations: Longest time that a step takes, s, and how often of so many times.
        beat: Steps end when a clock shows a multiple of this, s, so that many do at once;
            0: when they will.
        pause: Mean time between the starts of two runs, s.
        between_kills: Shortest and longest time between two kills of children, s.
        child_kills: How often a child is killed, at most.
        worker_kills: How often a whole worker is killed, and started again.
        restarts: How often the broker is; one in a folder never is.
        workers: How many there are.
        concurrency: Children of each.
        quiet: When nothing has moved for so long, s, nothing will without a sweep.
        at_most: All must stand still after this time, s, and again after the sweep.
    """

    database: str = option("postgres", "what has the runs", get_args(DatabaseKind))
    broker: str = option("redis", "what carries the messages", get_args(BrokerName))
    runs: int = option(200, "how many are started")
    stages: int = option(5, "of each run")
    steps: int = option(8, "of each stage; every other one is acknowledged late")
    child_kills: int = option(1_000, "how often a worker's child is killed, at most")
    durations: tuple[tuple[float, int], ...] = tuple(DURATIONS.items())
    beat: float = 0.05
    pause: float = 0.3
    between_kills: tuple[float, float] = (0.3, 0.9)
    worker_kills: int = 5
    restarts: int = 2
    workers: int = 2
    concurrency: int = 3
    quiet: float = 7.0
    at_most: float = 900.0

    def entries(self, run: int) -> list[tuple[str, int, dict[str, Any]]]:
        """Return what is given to ``stages.start`` for the n-th run."""
        chance = random.Random(f"{self.seed}:{run}")
        return [
            (
                TASKS[step % 2],
                self.stages - stage,
                {"seconds": draw_duration(chance, self.durations), "beat": self.beat},
            )
            for stage in range(self.stages)
            for step in range(self.steps)
        ]


class Witness(AnyWitness):
    """Two journals beside that of trouble, and a room that shows which steps run just now."""

    @property
    def steps(self) -> Journal:
        """The beginnings and ends of steps."""
        return self.open("steps")

    @property
    def signals(self) -> Journal:
        """The reports of the package's signals about stages and steps."""
        return self.open("signals")

    @property
    def size(self) -> int:
        """How much was noted of steps."""
        path = self.steps.path
        return path.stat().st_size if path.exists() else 0


def find_witness() -> Witness | None:
    """Return where this process is to note what happens; None: it is none of a run's."""
    folder = getattr(settings, "TEST_WITNESS", None)
    return None if folder is None else Witness(Path(folder))
