"""What goes wrong during the runs: processes are killed, and the broker is restarted."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import psutil

from django_celery_safe.stages.engine import MOST_DEATHS
from tests.processes import CeleryWorker, wait_for
from tests.runs.brokers import Broker
from tests.runs.plan import Plan, Witness

#: Part of the kills of children that is aimed at one inside a step.
AIMED: Final = 0.6
#: How often children are killed in the same step: a whole worker may be, besides.
MOST_HITS: Final = MOST_DEATHS // 2


class Troublemaker:
    """Kills children of the workers, and whole workers, with SIGKILL, and restarts the broker."""

    def __init__(
        self, plan: Plan, witness: Witness, broker: Broker, workers: Sequence[CeleryWorker]
    ) -> None:
        self.plan, self.witness, self.broker, self.workers = plan, witness, broker, workers
        self._random = random.Random(f"{plan.seed}:nemesis")
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
        """Whether all workers were killed, and all restarts done, that were planned."""
        return not self._due

    def strike(self, started: int) -> None:
        """Do what is due when so many runs have been started."""
        if self._due and started >= self._due[0][0]:
            _, what = self._due.pop(0)
            self._kill_worker() if what == "worker" else self._restart()
        elif self._left and time.monotonic() > self._kills_at:
            self._left -= self._kill_child()
            self._kills_at = self._next()

    def _next(self) -> float:
        return time.monotonic() + self._random.uniform(*self.plan.between_kills)

    def _kill_child(self) -> bool:
        # In a folder's worker all children share a lock, and who waits for a task has it:
        # with that one killed, none gets a task any more.
        aimed = self._random.random() < AIMED or self.plan.broker == "filesystem"
        children = self._random.choice(self.workers).children()
        if aimed:
            children = [child for child in children if child.pid in self.witness.inside()]
        if not children:
            return False
        child = self._random.choice(children)
        with contextlib.suppress(psutil.NoSuchProcess, TimeoutError):
            child.suspend()
            wait_for(lambda: child.status() == psutil.STATUS_STOPPED, 1)
            step = self.witness.step_of(child.pid)
            # The last step of all would be hit again and again, until it fails as one that
            # kills its process does.
            if (aimed and step is None) or self._hits[step] >= MOST_HITS:
                child.resume()
                return False
            child.kill()
            self._hits[step] += step is not None
            self._note(child.pid, "child")
            return True
        return False

    def _kill_worker(self) -> None:
        worker = self._random.choice(self.workers)
        # First, so that it can't start children while they are counted.
        worker.pause()
        pids = [worker.pid, *(child.pid for child in worker.children())]
        worker.kill()
        for pid in pids:
            self._note(pid, "worker")
        self.witness.trouble.write("worker killed", worker=worker.name)
        worker.start()

    def _note(self, pid: int, what: str) -> None:
        inside = self.witness.room / str(pid)
        self.witness.trouble.write("killed", child=pid, what=what, inside=inside.exists())
        inside.unlink(missing_ok=True)

    def _restart(self) -> None:
        self.broker.restart()
        self.witness.trouble.write("broker restarted")
