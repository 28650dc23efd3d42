"""The plan of a run."""

import random
from dataclasses import dataclass
from typing import Any, Final

from tests.faults.scenario import WorkersPlan, draw_duration, option

#: Lease of a step, s: for so long a killed one keeps it from others.
LEASE: Final = 3.0

#: After so many seconds Redis gives out again what was not acknowledged.
VISIBILITY_TIMEOUT: Final = 4.0

#: How long a relay lets a step wait to be begun, s: what a broker or a kill lost comes again.
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

#: Steps end when a clock shows a multiple of this, s, so that many do at once.
BEAT: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Plan(WorkersPlan):
    """
    The plan of one recording.

    Args:
        pause: Mean time between the starts of two runs, s.
        between_kills: Shortest and longest time between two kills of children, s.
        worker_kills: How often a whole worker is killed, and started again.
        restarts: How often the broker is.
        quiet: The run ends when no message is left and nothing has moved for this time, s.
        patience: The same, s, while messages are left.
        at_most: All must stand still after this time, s.
    """

    runs: int = option(200, "how many are started")
    stages: int = option(5, "of each run")
    steps: int = option(8, "of each stage; every other one is acknowledged late")
    child_kills: int = option(1_000, "how often a worker's child is killed, at most")
    pause: float = 0.3
    between_kills: tuple[float, float] = (0.3, 0.9)
    worker_kills: int = 5
    restarts: int = 2
    concurrency: int = 3
    quiet: float = 7.0
    patience: float = 60.0
    at_most: float = 900.0

    @property
    def harms(self) -> dict[str, int]:
        """The faults that each happen so many times, beside the kills of children."""
        return {"workers killed": self.worker_kills, "broker restarted": self.restarts}

    def entries(self, run: int) -> list[tuple[str, int, dict[str, Any]]]:
        """Return what is given to ``stages.start`` for the n-th run."""
        chance = random.Random(f"{self.seed}:{run}")
        return [
            (TASKS[step % 2], self.stages - stage, {"seconds": draw_duration(chance, DURATIONS)})
            for stage in range(self.stages)
            for step in range(self.steps)
        ]
