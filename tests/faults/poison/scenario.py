"""How a run of the scenario ``poison`` is recorded."""

import time

from tests.faults.carried.plan import LEASE, RESEND_AFTER
from tests.faults.carried.scenario import Relaying
from tests.faults.lab import Lab
from tests.faults.poison.oracle import History, Plan
from tests.faults.poison.work import send
from tests.faults.scenario import Stillness, Witness
from tests.servers import RedisServer

#: Pause between two looks, s.
LOOK = 0.5

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = {"no-limit": ("wrong deaths",)}


def record(plan: Plan, lab: Lab) -> History:
    """Let a worker do tasks of which some kill its processes; return what happened."""
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    ours = {
        "LOCK_TIMEOUT": LEASE,
        "OUTBOX": "until_done",
        "OUTBOX_RESEND_AFTER": RESEND_AFTER,
        "MAX_DEATHS": None if plan.broken == "no-limit" else plan.max_deaths,
    }
    lab.configure(alias, lab.make_broker(plan.broker), ours)
    lab.use_store(lab.server(RedisServer))
    lab.start_workers(1, "tests.faults.poison.work", concurrency=plan.concurrency)
    began = time.monotonic()
    relaying = Relaying(plan, lab)
    lab.start(send, plan.tasks, plan.poisonous).result(plan.at_most)
    still = Stillness(witness.journal, plan.at_most)
    while not History.read(plan, witness, alias).is_over(still.seconds()):
        time.sleep(LOOK)
        relaying.check()
    lab.close()
    return History.read(plan, witness, alias, still.since - began)
