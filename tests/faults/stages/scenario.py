"""How a run of the scenario ``stages`` is recorded."""

import time
from typing import Final

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from tests.faults.lab import SEND_TIMEOUT, Lab
from tests.faults.ledger import Ledger, Trigger
from tests.faults.scenario import Stillness, Witness
from tests.faults.stages.nemesis import Troublemaker
from tests.faults.stages.oracle import History
from tests.faults.stages.plan import LEASE, MAX_DEATHS, PATIENCE, VISIBILITY_TIMEOUT, Plan
from tests.faults.stages.work import enter_and_relay, start_runs

#: Pause between two looks, s.
LOOK: Final = 0.05

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = dict.fromkeys(("counter", "count"), ("stages begun", "stuck runs"))

#: What the database notes: a message was written, and a step was recorded as succeeded.
TRIGGERS: Final = {
    "message": Trigger(OutboxMessage, "INSERT", has_lease=False),
    "success": Trigger(StageStep, "UPDATE OF status", "NEW.status = 'succeeded'", has_lease=False),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers do runs while they are killed, and return what happened."""
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    broker = lab.make_broker(plan.broker, lasting=True, visibility_timeout=VISIBILITY_TIMEOUT)
    ledger = Ledger(alias)
    ledger.open(TRIGGERS)
    ours = {
        "LOCK_TIMEOUT": LEASE,
        "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT,
        "OUTBOX_RESEND_AFTER": PATIENCE,
        "MAX_DEATHS": MAX_DEATHS,
    }
    lab.configure(alias, broker, ours)
    relaying = lab.start(enter_and_relay)
    workers = lab.start_workers(plan, "tests.faults.stages.work")
    began, starting = time.monotonic(), lab.start(start_runs, plan)
    runs = StageRun.objects.using(alias)
    trouble = Troublemaker(plan, workers, witness, broker)
    due = OutboxMessage.objects.using(alias).filter(due_at__isnull=False)
    still = Stillness(witness.journal, plan.at_most)
    while (
        starting.running
        or not trouble.is_spent
        or not still.is_over(plan, lambda: due.exists() or broker.waiting() > 0)
    ):
        trouble.strike(runs.count() / plan.runs if starting.running else 1.0)
        still.seconds()
        time.sleep(LOOK)
    starting.result(0)
    seconds = time.monotonic() - began
    relaying.process.terminate()
    relaying.result(30)
    lab.close()
    return History.read(plan, witness, ledger, alias, seconds)
