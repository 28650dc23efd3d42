"""The nemesis of stages: it kills processes, and restarts the broker."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from tests.faults.brokers import Broker
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.faults.stages.plan import MAX_DEATHS, Plan
from tests.processes import CeleryWorker

#: Part of the kills of children that is aimed at one inside a step; the first one is in any case.
AIMED: Final = 0.6
#: How often children are killed in the same step: a whole worker may be, besides.
MOST_HITS: Final = MAX_DEATHS // 2


class Troublemaker(WorkerNemesis):
    """
    Kills children of the workers, and whole workers, and restarts the broker.

    Args:
        count_runs: Returns how many of the runs have been started.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[CeleryWorker],
        witness: Witness,
        broker: Broker,
        count_runs: Callable[[], int],
    ) -> None:
        super().__init__(plan, workers, witness)
        self.plan, self.broker, self._count_runs = plan, broker, count_runs
        # Each comes when so many of the runs have been started.
        self._due = sorted(
            (plan.runs * (place + 1) / (number + 1), what)
            for what, number in (("worker", plan.worker_kills), ("broker", plan.restarts))
            for place in range(number)
        )
        self._kills_at, self._left = self._next(), plan.child_kills
        #: How often a child was killed in each step.
        self._hits: Counter[str | None] = Counter()

    @property
    def is_spent(self) -> bool:
        """Whether all harm is done that must be done."""
        return not self._due

    def strike(self) -> None:
        """Do what is due when so many runs have been started."""
        if self._due and self._count_runs() >= self._due[0][0]:
            _, what = self._due.pop(0)
            if what == "worker":
                self.kill_worker()
                self.witness.trouble.write("worker killed")
            else:
                self.broker.server.restart()
                self.witness.trouble.write("broker restarted")
        elif self._left and time.monotonic() > self._kills_at:
            self._left -= self._kill_one()
            self._kills_at = self._next()

    def _next(self) -> float:
        return time.monotonic() + self.random.uniform(*self.plan.between_kills)

    def _kill_one(self) -> bool:
        room = self.witness.room
        if self._hits and self.random.random() > AIMED:
            child = self.choose_child()
        else:
            # The last step of all would be hit again and again, until it fails as one that
            # kills its process does.
            child = self.stop_inside(room.pids(), lambda step: self._hits[step] < MOST_HITS)
        if child is None:
            return False
        self._hits[room.what(child.pid)] += 1
        return self.kill_child(child)
