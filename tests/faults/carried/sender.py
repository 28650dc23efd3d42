"""The processes of the scenario that commit transactions with sends, or relay the outbox."""

import random
import time
from contextlib import suppress
from typing import Final

from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connection, transaction

from tests.faults.carried import broken, work
from tests.faults.carried.plan import Plan, Task, Transaction
from tests.faults.ledger import Ledger
from tests.faults.outbox.relaying import hurry
from tests.faults.scenario import enter, relay

#: Pause before a database that was away is asked again, s.
PAUSE: Final = 0.1


def send(plan: Plan) -> None:
    """Run one transaction after the other."""
    enter()
    chance = random.Random(f"{plan.seed}:pauses")
    for each in plan.transactions():
        insist(each)
        time.sleep(chance.expovariate(1 / plan.pause))


def insist(each: Transaction) -> None:
    """Run a transaction, again if it was lost because the database went away."""
    while True:
        try:
            return commit(each)
        except (OperationalError, InterfaceError):
            if was_committed(each):
                return None


def was_committed(each: Transaction) -> bool:
    """Return whether a transaction was committed; wait until the database answers."""
    ledger = Ledger(DEFAULT_DB_ALIAS)
    while True:
        connection.close()
        time.sleep(PAUSE)
        with suppress(OperationalError, InterfaceError):
            return any(ledger.count("committed", task.id) for task in each.tasks[:1])


def commit(each: Transaction) -> None:
    """Send what a transaction commits, and what it rolls back."""
    with transaction.atomic():
        for task in each.tasks:
            send_one(task)
        with transaction.atomic():
            for task in each.dropped:
                send_one(task)
            transaction.set_rollback(bool(each.dropped))
        transaction.set_rollback(not each.tasks)


def send_one(task: Task) -> None:
    """Send a task when the transaction commits."""
    Ledger(DEFAULT_DB_ALIAS).record("committed", task.id)
    work.work.apply_async_on_commit((task.ending, task.seconds), task_id=task.id)


def hurry_and_relay(fault: str) -> None:
    """Relay until told to end, or killed."""
    enter()
    hurry()
    if fault:
        setattr(*broken.FAULTS[fault])
    relay()
