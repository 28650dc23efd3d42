"""The nemesis of mails, beside their server: it kills children of the workers."""

import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty

import psutil

from tests.faults.mails.plan import Plan, Witness
from tests.faults.mails.server import MailServer
from tests.faults.nemesis import WorkerNemesis
from tests.processes import CeleryWorker


class Killer(WorkerNemesis):
    """Kills children: those whose e-mail is announced, and others."""

    def __init__(
        self, plan: Plan, witness: Witness, mail: MailServer, workers: Sequence[CeleryWorker]
    ) -> None:
        super().__init__(plan, workers, witness.kills)
        self._between, self._mail = plan.between_kills, mail
        self._due = self._next()

    def _next(self) -> float:
        return time.monotonic() + self.random.uniform(*self._between)

    def strike(self) -> None:
        """Kill the child whose e-mail was announced, and any child if it is time for that."""
        patience = min(0.1, max(0.0, self._due - time.monotonic()))
        with suppress(Empty, psutil.NoSuchProcess):
            run = self._mail.announced.get(timeout=patience)
            child = psutil.Process(int(run.partition("-")[0]))
            if child.ppid() in {worker.pid for worker in self.workers}:
                self.kill_child(child, "announced")
        if time.monotonic() > self._due:
            self._due = self._next()
            if (child := self.choose_child()) is not None:
                self.kill_child(child, "at random")
