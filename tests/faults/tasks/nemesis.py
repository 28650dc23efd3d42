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


class Killer(WorkerNemesis):
    """Kills children all the time, and whole workers now and then."""

    aimed = 0.5

    def __init__(
        self, plan: Plan, workers: Sequence[CeleryWorker], witness: Witness, broker: RedisBroker
    ) -> None:
        super().__init__(plan, workers, witness, {"workers killed": plan.worker_kills})
        self.broker = broker
        self._began, self._seconds = time.monotonic(), plan.tasks * plan.pause

    def strike_often(self) -> None:
        """Kill one child, or a worker if it is time for that: they share the time of the sends."""
        time.sleep(self.random.uniform(*BETWEEN))
        if self.strike((time.monotonic() - self._began) / self._seconds):
            return
        is_aimed = self.random.random() < self.aimed
        if (child := self.choose_child(is_aimed) or self.choose_child()) is not None:
            self.kill_child(child)

    def strike_last(self, seconds: float) -> None:
        """
        Kill the workers that could not be killed in time, for so many seconds at most.

        A worker that replaces killed children all the time hardly ever waits for a message.
        """
        until = time.monotonic() + seconds
        while not self.is_spent and time.monotonic() < until:
            time.sleep(self.random.uniform(*BETWEEN))
            self.strike(1.0)

    def may_kill(self, worker: CeleryWorker) -> bool:
        """
        Whether the worker waits for a message just now.

        kombu takes a message from the list, and then records that it has it: if a worker
        dies in between, the broker loses the message.
        """
        return self.broker.send_away(worker.pid)
