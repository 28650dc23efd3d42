"""A nemesis, which harms a run again and again while it goes on."""

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import psutil

from tests.faults.scenario import AnyPlan, Witness
from tests.processes import CeleryWorker, wait_for


class WorkerNemesis:
    """
    Kills children of workers, and whole workers, with SIGKILL, by its plan's seed.

    Args:
        witness: Its trouble has each kill, with the process, what it was, and whether that was
            inside a room.
    """

    def __init__(self, plan: AnyPlan, workers: Sequence[CeleryWorker], witness: Witness) -> None:
        self.random = random.Random(f"{plan.seed}:nemesis")
        self.workers, self.witness = workers, witness

    def record_kill(self, pid: int, what: str) -> None:
        """Record that a process was killed, and whether it was inside a task."""
        inside = self.witness.room.clear(pid)
        self.witness.trouble.write("killed", child=pid, what=what, inside=inside)

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

    def stop_inside(
        self, among: Collection[int], wanted: Callable[[str], bool] = lambda what: True
    ) -> psutil.Process | None:
        """Stop some of these children inside what is wanted; None: the one looked at was not."""
        child = self.choose_child(among)
        if child is None:
            return None
        with suppress(psutil.NoSuchProcess, TimeoutError):
            child.suspend()
            wait_for(lambda: child.status() == psutil.STATUS_STOPPED, 1)
            what = self.witness.room.what(child.pid)
            if what is not None and wanted(what):
                return child
        self.resume(child)
        return None

    def resume(self, child: psutil.Process) -> None:
        """Let a child go on, if it lives."""
        with suppress(psutil.NoSuchProcess):
            child.resume()

    def kill_child(self, child: psutil.Process) -> bool:
        """Kill a child; return that this was done."""
        with suppress(psutil.NoSuchProcess):
            child.kill()
            self.record_kill(child.pid, "child")
        return True

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
