"""The nemesis of stages: it kills processes, and restarts the broker."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from tests.faults.brokers import Broker
from tests.faults.nemesis import WorkerNemesis
from tests.faults.stages.plan import MAX_DEATHS, Plan, Witness
from tests.processes import CeleryWorker, wait_for

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
        witness: Witness,
        broker: Broker,
        workers: Sequence[CeleryWorker],
        count_runs: Callable[[], int],
    ) -> None:
        super().__init__(plan, workers, witness.trouble)
        self.plan, self.witness, self.broker = plan, witness, broker
        self._count_runs = count_runs
        # Each comes when so many of the runs have been started.
        due = [
            (plan.runs * (place + 1) / (number + 1), what)
            for what, number in (("worker", plan.worker_kills), ("broker", plan.restarts))
            for place in range(number)
        ]
        self._due = sorted(due)
        self._kills_at = self._next()
        self._left = plan.child_kills
        #: How often a child was killed in each step.
        self._hits: Counter[str | None] = Counter()

    @property
    def is_spent(self) -> bool:
        return not self._due

    def strike(self) -> None:
        """Do what is due when so many runs have been started."""
        if self._due and self._count_runs() >= self._due[0][0]:
            _, what = self._due.pop(0)
            if what == "worker":
                self.kill_worker()
                self.witness.trouble.write("worker killed")
            else:
                self.broker.restart()
                self.witness.trouble.write("broker restarted")
        elif self._left and time.monotonic() > self._kills_at:
            self._left -= self._kill_one()
            self._kills_at = self._next()

    def _next(self) -> float:
        return time.monotonic() + self.random.uniform(*self.plan.between_kills)

    def _kill_one(self) -> bool:
        # In a folder's worker all children share a lock, and who waits for a task has it:
        # with that one killed, none gets a task any more.
        aimed = self.random.random() < AIMED or self.plan.broker == "filesystem"
        aimed |= not self._hits  # the first one, in any case
        child = self.choose_child(self.witness.room.pids() if aimed else None)
        if child is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess, TimeoutError):
            child.suspend()
            wait_for(lambda: child.status() == psutil.STATUS_STOPPED, 1)
            step = self.witness.room.what(child.pid)
            # The last step of all would be hit again and again, until it fails as one that
            # kills its process does.
            if (aimed and step is None) or self._hits[step] >= MOST_HITS:
                child.resume()
                return False
            self._hits[step] += step is not None
            self.kill_child(child)
            return True
        return False

    def record_kill(self, pid: int, what: str) -> None:
        """Record a kill, and whether it was inside a step."""
        inside = self.witness.room.clear(pid)
        self.witness.trouble.write("killed", child=pid, what=what, inside=inside)
