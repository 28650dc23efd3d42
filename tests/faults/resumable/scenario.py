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
    began, relaying = time.monotonic(), Relaying(lab)
    lab.start(send, plan.rows, plan.tasks, plan.pause).result(plan.at_most)
    trouble = Troublemaker(plan, workers, witness)
    while OutboxMessage.objects.using(alias).filter(due_at__isnull=False).exists():
        if time.monotonic() > began + plan.at_most:
            break  # the oracle finds the tasks that have not ended
        written = Person.everyone.using(alias).exclude(email="").count()
        # All has been harmed when two thirds of the rows are done.
        trouble.strike(1.5 * written / (plan.rows * (1 - 1 / PERIOD)))
        relaying.check()
        time.sleep(LOOK)
    lab.close()
    return History.read(plan, witness, alias, time.monotonic() - began)


class Troublemaker(WorkerNemesis):
    """Does each harm of the plan when a certain part of the rows is done."""

    aimed = 1.0

    def __init__(self, plan: Plan, workers: Sequence[CeleryWorker], witness: Witness) -> None:
        super().__init__(plan, workers, witness, plan.harms)
        self.ways["workers shut down"] = self._shut_down

    def _shut_down(self) -> bool:
        worker = self.random.choice(self.workers)
        pids = {child.pid for child in worker.children()} & self.witness.room.pids()
        if not pids:
            return False
        self.witness.trouble.write("told", inside=[*pids])
        worker.stop()
        worker.start()
        return True
