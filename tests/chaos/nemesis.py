"""What goes wrong during a run: processes are killed."""

import contextlib
import random
import time
from collections.abc import Sequence

import psutil

from tests.chaos.broker import Broker
from tests.chaos.plan import Plan, Witness
from tests.processes import CeleryWorker

#: Shortest and longest time between two kills, s.
BETWEEN = (0.1, 0.5)

#: Part of the kills of children that is aimed at one in which something runs.
AIMED = 0.5


class Troublemaker:
    """Kills children of the workers, and whole workers, with SIGKILL."""

    def __init__(
        self, plan: Plan, witness: Witness, broker: Broker, workers: Sequence[CeleryWorker]
    ) -> None:
        self.witness = witness
        self.broker = broker
        self.workers = workers
        self.random = random.Random(f"{plan.seed}:nemesis")
        # Spread over the time that the sends take.
        part = plan.tasks * plan.pause / (plan.worker_kills + 1)
        self._due = [time.monotonic() + part * (place + 1) for place in range(plan.worker_kills)]

    def strike(self) -> None:
        """Kill one child, or a worker if it is time for that."""
        time.sleep(self.random.uniform(*BETWEEN))
        worker = self.random.choice(self.workers)
        if self._due and time.monotonic() > self._due[0] and self._kill_worker(worker):
            self._due.pop(0)
        else:
            self._kill_child(worker)

    def _kill_child(self, worker: CeleryWorker) -> None:
        children, inside = worker.children(), self.witness.inside()
        if self.random.random() < AIMED:
            children = [child for child in children if child.pid in inside] or children
        if children:
            child = self.random.choice(children)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
                self.witness.journal.write("killed", child=child.pid, what="child")

    def _kill_worker(self, worker: CeleryWorker) -> bool:
        """
        Kill a worker and start it again, if it waits for a message just now; tell whether it did.

        kombu takes a message from the list, and then notes that it has it: of a worker
        that dies in between, the broker loses the message.
        """
        worker.pause()
        if self.broker.send_away() < len(self.workers):
            worker.resume()
            return False
        pids = [worker.pid, *(child.pid for child in worker.children())]
        worker.kill()
        for pid in pids:
            self.witness.journal.write("killed", child=pid, what="worker")
        worker.start()
        return True
