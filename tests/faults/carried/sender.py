"""The processes of the scenario that commit transactions with sends, or relay the outbox."""

import io
import logging
import random
import time

from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, transaction

from tests.app.celery import app
from tests.faults.carried import broken, work
from tests.faults.carried.plan import Plan, Task, Transaction, find_witness
from tests.faults.outbox.relaying import hurry


def send(plan: Plan) -> None:
    """Run one transaction after the other."""
    enter()
    chance = random.Random(f"{plan.seed}:pauses")
    for each in plan.transactions():
        commit(each)
        time.sleep(chance.expovariate(1 / plan.pause))


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
    """Send a task when the transaction commits; for how long it is kept is a setting."""
    work.work.apply_async_on_commit((task.ending, task.seconds), task_id=task.id)


def relay(plan: Plan) -> None:
    """Relay until told to end, or killed."""
    enter()
    hurry()
    broken.break_relay(plan.broken)
    call_command("celery_outbox", "relay", "--database", DEFAULT_DB_ALIAS, stdout=io.StringIO())


def enter() -> None:
    """Be a process of the workers' app."""
    logging.basicConfig(filename=find_witness().log)
    app.finalize()
