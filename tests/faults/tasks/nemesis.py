"""The nemesis of tasks: it kills their processes."""

import time
from collections.abc import Sequence

from tests.faults.brokers import RedisBroker
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.faults.tasks.plan import Plan
from tests.processes import CeleryWorker

#: Shortest and longest time between two kills, s.
BETWEEN = (0.1, 0.5)

#: Part of the kills of children that is aimed at one in which something runs.
AIMED = 0.5


class Killer(WorkerNemesis):
    """Kills children all the time, and whole workers now and then."""

    def __init__(
        self, plan: Plan, workers: Sequence[CeleryWorker], witness: Witness, broker: RedisBroker
    ) -> None:
        super().__init__(plan, workers, witness)
        self.broker = broker
        # Spread over the time that the sends take.
        part = plan.tasks * plan.pause / (plan.worker_kills + 1)
        self._due = [time.monotonic() + part * (place + 1) for place in range(plan.worker_kills)]

    def strike(self) -> None:
        """Kill one child, or a worker if it is time for that."""
        time.sleep(self.random.uniform(*BETWEEN))
        if self._kill_due_worker():
            return
        aimed = self.random.random() < AIMED
        child = self.choose_child(self.witness.room.pids()) if aimed else None
        if (child := child or self.choose_child()) is not None:
            self.kill_child(child)

    def strike_last(self, seconds: float) -> None:
        """
        Kill the workers that could not be killed in time, for so many seconds at most.

        A worker that replaces killed children all the time hardly ever waits for a message.
        """
        until = time.monotonic() + seconds
        while self._due and time.monotonic() < until:
            time.sleep(self.random.uniform(*BETWEEN))
            self._kill_due_worker()

    def _kill_due_worker(self) -> bool:
        killed = bool(self._due) and time.monotonic() > self._due[0] and self.kill_worker()
        if killed:
            self._due.pop(0)
        return killed

    def may_kill(self, worker: CeleryWorker) -> bool:
        """
        Whether the worker waits for a message just now.

        kombu takes a message from the list, and then records that it has it: if a worker
        dies in between, the broker loses the message.
        """
        return self.broker.send_away(worker.pid)
