"""How a run of the scenario ``poison`` is recorded."""

import time

from tests.faults.carried.plan import LEASE, RESEND_AFTER, Witness
from tests.faults.carried.scenario import LOST_WAIT, Relaying, make_broker
from tests.faults.lab import Lab
from tests.faults.poison.oracle import History
from tests.faults.poison.plan import Plan
from tests.faults.poison.sender import send
from tests.servers import RedisServer

#: Pause between two looks, s.
LOOK = 0.5

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = {"no-limit": ("wrong deaths",)}


def record(plan: Plan, lab: Lab) -> History:
    """Let a worker do tasks of which some kill its processes; return what happened."""
    witness, alias = Witness(lab.folder), lab.database("postgres")
    configure(plan, lab, alias)
    lab.start_workers(1, "tests.faults.poison.work", concurrency=plan.concurrency)
    began = time.monotonic()
    relaying = Relaying(plan, lab) if plan.tasks_kind == "until-done" else None
    lab.start(send, plan).result(plan.at_most)
    history, moved = History(plan), time.monotonic()
    while not history.is_over(time.monotonic() - moved):
        time.sleep(LOOK)
        if relaying is not None:
            relaying.check()
        before = history
        history = History.read(plan, witness, alias, moved - began)
        if history.movement != before.movement:
            moved = time.monotonic()
    lab.close()
    return History.read(plan, witness, alias, moved - began)


def configure(plan: Plan, lab: Lab, alias: str) -> None:
    """Set the Django settings of all processes; ``alias`` is their default database."""
    lab.use_database(alias, CONN_MAX_AGE=None)
    lab.use_store(lab.server(RedisServer))
    is_plain = plan.tasks_kind == "plain"
    lab.settings |= {
        "CELERY_TASK_IGNORE_RESULT": True,
        "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        "CELERY_TASK_ACKS_LATE": is_plain,
        "CELERY_TASK_REJECT_ON_WORKER_LOST": is_plain,
        "DJANGO_CELERY_SAFE": {
            "LOCK_TIMEOUT": LEASE,
            "OUTBOX": False if is_plain else "until_done",
            "OUTBOX_RESEND_AFTER": RESEND_AFTER,
            "MAX_DEATHS": None if plan.broken == "no-limit" else plan.max_deaths,
        },
        "TEST_WITNESS": str(lab.folder),
        **make_broker(plan.broker, lab).settings(),
    }
