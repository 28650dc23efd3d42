"""The nemesis of carried tasks: it kills and pauses processes, and takes the broker's memory."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import psutil

from tests.faults.brokers import Broker
from tests.faults.carried.plan import LEASE, Plan
from tests.faults.ledger import Ledger
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.processes import CeleryWorker

#: Part of the kills of children that is aimed at one inside a task; the first one is in any case.
AIMED: Final = 0.6

PAUSE: Final = "children paused"

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
    Does each harm of the plan when a certain number of tasks was committed.

    Args:
        ledger: Knows how many tasks were committed.
        kill_relay: Kills the relay and starts it again.
        restart_database: Restarts the database's server.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[CeleryWorker],
        witness: Witness,
        broker: Broker,
        ledger: Ledger,
        kill_relay: Callable[[], None],
        restart_database: Callable[[], None],
    ) -> None:
        super().__init__(plan, workers, witness)
        self._ledger = ledger
        self._others: dict[str, Callable[[], None]] = {
            "relays killed": kill_relay,
            "broker restarted": broker.server.restart,
            "broker flushed": broker.flush,
            "database restarted": restart_database,
        }
        # Spread over the whole run, at uneven distances. A pause needs a long task, and so comes
        # while there are many to come: in a short run first of all.
        self._due = sorted(
            (plan.tasks * (place + (what != PAUSE) * self.random.random()) / number, what)
            for what, number in plan.harms.items()
            for place in range(number)
        )
        self._paused: list[Paused] = []
        self._has_killed_inside = False
        tasks = (task for each in plan.transactions() for task in each.tasks)
        self._long = {task.id for task in tasks if task.seconds > LONG_TASK}

    @property
    def is_spent(self) -> bool:
        """Whether all harm is done that must be done."""
        return not self._due and not self._paused

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
            with ThreadPoolExecutor(len(ended)) as starters:
                list(starters.map(CeleryWorker.start, ended))

    def strike(self) -> None:
        """Do the harm that is due, and resume a paused child when another process has its task."""
        self.supervise()
        for paused in self._paused[:]:
            begun = self.witness.journal.count("begun", id=paused.task_id)
            if begun > paused.runs or time.monotonic() > paused.ends_at:
                self._paused.remove(paused)
                self.resume(paused.child)
        if self._due and self._ledger.count("committed") >= self._due[0][0]:
            began, (_, what) = time.monotonic_ns(), self._due[0]
            if self._do(what):
                del self._due[0]
                self.witness.trouble.write(what, began_ns=began)

    def _do(self, what: str) -> bool:
        """Do a harm; return whether it was possible."""
        match what:
            case "children killed":
                return self._kill_one()
            case "workers killed":
                return self.kill_worker()
            case "children paused":
                return self._pause_one()
        self._others[what]()
        return True

    def _kill_one(self) -> bool:
        if self.random.random() < AIMED or not self._has_killed_inside:
            child = self.stop_inside(self._moving())
            self._has_killed_inside |= child is not None
        else:
            child = self.choose_child()
        if child is None or self._is_paused(child.pid):
            return False
        return self.kill_child(child)

    def _pause_one(self) -> bool:
        child = self.stop_inside(self._moving(), self._long.__contains__)
        if child is None:
            return False
        task_id = self.witness.room.what(child.pid) or ""
        runs = self.witness.journal.count("begun", id=task_id)
        self.witness.trouble.write("paused", child=child.pid)
        self._paused.append(Paused(child, task_id, runs))
        return True

    def _moving(self) -> set[int]:
        """Return the processes that are inside a task and not paused."""
        return {pid for pid in self.witness.room.pids() if not self._is_paused(pid)}

    def _is_paused(self, pid: int) -> bool:
        return any(one.child.pid == pid for one in self._paused)
