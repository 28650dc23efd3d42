"""How a run of the scenario ``stages`` is recorded."""

import time
from typing import Final

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from tests.faults.lab import SEND_TIMEOUT, Lab
from tests.faults.ledger import Ledger, Trigger
from tests.faults.scenario import Stillness, Witness
from tests.faults.stages.nemesis import Troublemaker
from tests.faults.stages.oracle import History
from tests.faults.stages.plan import LEASE, MAX_DEATHS, VISIBILITY_TIMEOUT, Plan
from tests.faults.stages.work import relay, start_runs, sweep_once
from tests.stages.broken import VARIABLE

#: Pause between two looks, s.
LOOK: Final = 0.05

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = dict.fromkeys(("counter", "count"), ("stages begun", "unrepaired stages"))

#: What the database notes: a message was written, and a step was recorded as succeeded.
TRIGGERS: Final = {
    "message": Trigger(OutboxMessage, "INSERT", has_lease=False),
    "success": Trigger(StageStep, "UPDATE OF status", "NEW.status = 'succeeded'", has_lease=False),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers do runs while they are killed, sweep once, and return what happened."""
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    broker = lab.make_broker(plan.broker, lasting=True, visibility_timeout=VISIBILITY_TIMEOUT)
    ledger = Ledger(alias)
    ledger.open(TRIGGERS)
    ours = {"LOCK_TIMEOUT": LEASE, "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT, "MAX_DEATHS": MAX_DEATHS}
    lab.configure(alias, broker, ours)
    relaying = lab.start(relay)
    workers = lab.start_workers(
        plan.workers,
        "tests.faults.stages.work",
        concurrency=plan.concurrency,
        env={VARIABLE: plan.broken},
    )
    began, starting = time.monotonic(), lab.start(start_runs, plan)
    runs = StageRun.objects.using(alias)
    trouble = Troublemaker(
        plan,
        workers,
        witness,
        broker,
        lambda: runs.count() if starting.running else plan.runs,
    )

    def is_over(still: Stillness) -> bool:
        """Return whether all runs have ended, or nothing has moved for long and nothing can."""
        if still.seconds() < plan.quiet:
            return not runs.active().exists()
        messages, steps = OutboxMessage.objects.using(alias), StageStep.objects.using(alias)
        if messages.pending().exists() or steps.alive().exists() or broker.waiting():
            still.since = time.monotonic()
            return not runs.active().exists()
        return True

    still = Stillness(witness.journal, plan.at_most)
    while starting.running or not trouble.is_spent or not is_over(still):
        trouble.strike()
        still.seconds()
        time.sleep(LOOK)
    starting.result(0)
    swept = time.monotonic()
    lab.start(sweep_once).result(plan.at_most)
    still = Stillness(witness.journal, plan.at_most)
    while not is_over(still):
        time.sleep(LOOK)
    ended = time.monotonic()
    relaying.process.terminate()
    relaying.result(30)
    lab.close()
    seconds = {"before the sweep": swept - began, "after it": ended - swept}
    return History.read(plan, witness, ledger, alias, seconds)
