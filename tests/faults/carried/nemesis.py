"""The nemesis of carried tasks: it kills and pauses processes, and takes the broker's memory."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from tests.faults.brokers import Broker
from tests.faults.carried.plan import LEASE, Plan
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.processes import CeleryWorker
from tests.processes.worker import start_together

#: A child is paused in tasks of at least this length, s, so that another run of the same task
#: is still going on when it lets the child continue.
LONG_TASK: Final = 0.2

#: How long a child is paused at most, s, if no other process begins its task.
LONGEST_PAUSE: Final = 3 * LEASE


class Paused:
    """
    A child that stands still inside a task.

    Attributes:
        runs: How often its task had been begun when it was paused.
    """

    def __init__(self, child: psutil.Process, task_id: str, runs: int) -> None:
        self.child, self.task_id, self.runs = child, task_id, runs
        self.ends_at = time.monotonic() + LONGEST_PAUSE


class Troublemaker(WorkerNemesis):
    """
    Does each harm of the plan when a certain part of the tasks was committed.

    Args:
        kill_relay: Kills the relay and starts it again.
        restart_database: Restarts the database's server.
    """

    #: It needs a long task, and so comes while there are many to come: in a short run first of all.
    early = "children paused"

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[CeleryWorker],
        witness: Witness,
        broker: Broker,
        kill_relay: Callable[[], None],
        restart_database: Callable[[], None],
    ) -> None:
        super().__init__(plan, workers, witness, plan.harms)
        self.ways |= {
            "children paused": self._pause_one,
            "relays killed": kill_relay,
            "broker restarted": broker.server.restart,
            "broker flushed": broker.flush,
            "database restarted": restart_database,
        }
        tasks = (task for each in plan.transactions() for task in each.tasks)
        self._long = {task.id for task in tasks if task.seconds > LONG_TASK}

    def supervise(self) -> None:
        """
        Start workers again that ended by themselves, as a supervisor does.

        A worker ends when it loses a Redis from which it has messages: kombu 5.7 restores
        them to a connection that it has already forgotten.
        """
        ended = [worker for worker in self.workers if not worker.running]
        for worker in ended:
            self.witness.trouble.write("worker ended", worker=worker.pid)
            worker.kill()
        if ended:
            start_together(ended)

    def strike(self, done: float) -> bool:
        """Do the harm that is due, and resume a paused child when another process has its task."""
        self.supervise()
        for pid, paused in list(self.paused.items()):
            begun = self.witness.journal.count("begun", id=paused.task_id)
            if begun > paused.runs or time.monotonic() > paused.ends_at:
                del self.paused[pid]
                self.resume(paused.child)
        return super().strike(done)

    def _pause_one(self) -> bool:
        child = self.stop_inside(self._long.__contains__)
        if child is None:
            return False
        task_id = self.witness.room.what(child.pid) or ""
        runs = self.witness.journal.count("begun", id=task_id)
        self.witness.trouble.write("paused", child=child.pid)
        self.paused[child.pid] = Paused(child, task_id, runs)
        return True
