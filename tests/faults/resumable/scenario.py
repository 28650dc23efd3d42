"""How a run of the scenario ``resumable`` is recorded."""

import time
from collections.abc import Sequence

from django_celery_safe.models import OutboxMessage
from tests.app.models import Person
from tests.faults.carried.plan import LEASE, RESEND_AFTER
from tests.faults.carried.scenario import Relaying
from tests.faults.lab import Lab
from tests.faults.nemesis import WorkerNemesis
from tests.faults.resumable.oracle import History, Plan
from tests.faults.resumable.work import PERIOD, send
from tests.faults.scenario import Witness
from tests.processes import CeleryWorker
from tests.servers import RedisServer

#: Pause between two looks, s.
LOOK = 0.05

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = {
    "cursor-first": ("rows left out",),
    "cursor-last": ("rows written twice",),
    "offset": ("rows left out",),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers walk a table while they are harmed; return what happened."""
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    # No task is poison here, however often its processes are killed within a chunk.
    ours = {"LOCK_TIMEOUT": LEASE, "OUTBOX": "until_done", "OUTBOX_RESEND_AFTER": RESEND_AFTER}
    lab.configure(alias, lab.make_broker(plan.broker), {**ours, "MAX_DEATHS": None})
    lab.use_store(lab.server(RedisServer))
    workers = lab.start_workers(plan, "tests.faults.resumable.work")
    began, relaying = time.monotonic(), Relaying(lab, plan.broken)
    lab.start(send, plan.rows, plan.tasks, plan.pause).result(plan.at_most)
    trouble = Troublemaker(plan, workers, witness)
    while OutboxMessage.objects.using(alias).filter(due_at__isnull=False).exists():
        if time.monotonic() > began + plan.at_most:
            break  # the oracle finds the tasks that have not ended
        written = Person.everyone.using(alias).exclude(email="").count()
        trouble.strike(written / (plan.rows * (1 - 1 / PERIOD)))
        relaying.check()
        time.sleep(LOOK)
    lab.close()
    return History.read(plan, witness, alias, time.monotonic() - began)


class Troublemaker(WorkerNemesis):
    """Does each harm of the plan when a certain part of the rows, up to two thirds, is done."""

    def __init__(self, plan: Plan, workers: Sequence[CeleryWorker], witness: Witness) -> None:
        super().__init__(plan, workers, witness)
        self._due = sorted(
            ((place + self.random.random()) / number / 1.5, what)
            for what, number in plan.harms.items()
            for place in range(number)
        )

    def strike(self, done: float) -> None:
        """Do the harm that is due, if it can be done now."""
        while self._due and self._due[0][0] <= done and self._do(self._due[0][1]):
            what = self._due.pop(0)[1]
            if what != "shutdown":
                self.witness.trouble.write("harm", what=what)

    def _do(self, what: str) -> bool:
        if what == "worker":
            return self.kill_worker()
        if what == "shutdown":
            return self._shut_down()
        child = self.stop_inside(self.witness.room.pids())
        return child is not None and self.kill_child(child)

    def _shut_down(self) -> bool:
        worker = self.random.choice(self.workers)
        pids = {child.pid for child in worker.children()} & self.witness.room.pids()
        if not pids:
            return False
        begun = time.monotonic_ns()
        worker.stop()
        self.witness.trouble.write("harm", what="shutdown", begun_ns=begun, inside=[*pids])
        worker.start()
        return True
