"""The nemesis of stages: it kills processes, and restarts the broker."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import psutil

from tests.faults.brokers import Broker
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.faults.stages.plan import MAX_DEATHS, Plan
from tests.processes import CeleryWorker

#: How often children are killed in the same step: a whole worker may be, besides.
MOST_HITS: Final = MAX_DEATHS // 2


class Troublemaker(WorkerNemesis):
    """Kills children of the workers now and then, and does each harm of the plan."""

    def __init__(
        self, plan: Plan, workers: Sequence[CeleryWorker], witness: Witness, broker: Broker
    ) -> None:
        super().__init__(plan, workers, witness, plan.harms)
        self.ways["broker restarted"] = broker.server.restart
        self._between_kills = plan.between_kills
        self._kills_at, self._left = self._next(), plan.child_kills
        #: How often a child was killed in each step.
        self._hits: Counter[str | None] = Counter()

    def strike(self, done: float) -> bool:
        """Do what is due when this part of the runs has been started."""
        if super().strike(done):
            return True
        if self._left and time.monotonic() > self._kills_at:
            self._left -= self.kill_some_child()
            self._kills_at = self._next()
        return False

    def _next(self) -> float:
        return time.monotonic() + self.random.uniform(*self._between_kills)

    def may_kill_in(self, what: str) -> bool:
        """
        Whether a child may be killed in this step once more.

        The last step of all would be hit again and again, until it fails as one that kills its
        process does.
        """
        return self._hits[what] < MOST_HITS

    def kill_child(self, child: psutil.Process) -> None:
        """Kill a child."""
        self._hits[self.witness.room.what(child.pid)] += 1
        super().kill_child(child)
