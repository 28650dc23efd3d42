"""A nemesis, which harms a run again and again while it goes on."""

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress

import psutil

from tests.faults.scenario import Plan
from tests.processes import CeleryWorker, Journal


class Nemesis(ABC):
    """
    Does harm by its plan's seed.

    Args:
        plan: The plan of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self.random = random.Random(f"{plan.seed}:nemesis")

    @abstractmethod
    def strike(self) -> None:
        """Do the harm that is due now, if any is."""

    @property
    def is_spent(self) -> bool:
        """Whether all harm is done that must be done."""
        return True


class WorkerNemesis(Nemesis):
    """
    Kills children of workers, and whole workers, with SIGKILL.

    Args:
        journal: Where each kill is recorded, with the process and what it was.
    """

    def __init__(self, plan: Plan, workers: Sequence[CeleryWorker], journal: Journal) -> None:
        super().__init__(plan)
        self.workers = workers
        self._journal = journal

    def record_kill(self, pid: int, what: str) -> None:
        """Record that a process was killed."""
        self._journal.write("killed", child=pid, what=what)

    def choose_child(self, among: Collection[int] | None = None) -> psutil.Process | None:
        """
        Return some child of some worker; None: there was none just now.

        Args:
            among: Ids of which it is to be one. No other process is looked at: what such a child
                is inside of may end soon.
        """
        if among is None:
            children = self.random.choice(self.workers).children()
            return self.random.choice(children) if children else None
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(self.random.choice(sorted(among))) if among else None
            # The id of a dead one may be that of somebody else's process by now.
            if child is not None and child.ppid() in {worker.pid for worker in self.workers}:
                return child
        return None

    def kill_child(self, child: psutil.Process, what: str = "child") -> None:
        """Kill a child."""
        with suppress(psutil.NoSuchProcess):
            child.kill()
            self.record_kill(child.pid, what)

    def kill_worker(self) -> bool:
        """Kill a worker with its children and start it again; return whether that was done."""
        worker = self.random.choice(self.workers)
        # First, so that it can't start children while they are counted.
        worker.pause()
        if not self.may_kill(worker):
            worker.resume()
            return False
        # They do nothing any more, and it takes a second or two until all are gone.
        for pid in (worker.pid, *(child.pid for child in worker.children())):
            self.record_kill(pid, "worker")
        worker.kill()
        worker.start()
        return True

    def may_kill(self, worker: CeleryWorker) -> bool:
        """Whether a paused worker may be killed now."""
        return True
