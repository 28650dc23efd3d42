"""A process that sends."""

import itertools
import random
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from celery import chain, chord, group
from django.db import connections, transaction

from django_celery_safe import send_on_commit
from tests.app.models import Person
from tests.faults.outbox import broken, work
from tests.faults.outbox.plan import RELAY, Plan, Witness
from tests.faults.outbox.points import lay
from tests.faults.outbox.relaying import hurry
from tests.faults.scenario import enter

#: Threads, so that transactions overlap and commit in another order than they began.
THREADS = 2


class RolledBack(Exception):
    """Rolls a transaction back."""


def send(plan: Plan, witness: Witness, role: str, place: int, point: str | None, hit: int) -> None:
    """Run one transaction after the other until told to end, or killed."""
    enter()
    hurry()
    lay(role, point, hit, witness)
    # Each sender has every n-th number, and never one again.
    step = sum(role != RELAY for role in plan.roles)
    begun = witness.journal.entries("begun", role=role)
    first = max((entry["number"] + step for entry in begun), default=place)
    count = itertools.count(first, step)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(partial(send_often, plan, witness, role), [count] * THREADS))


def send_often(plan: Plan, witness: Witness, role: str, count: "itertools.count[int]") -> None:
    """Run transactions; none of them may fail."""
    while not witness.is_over:
        number = next(count)
        witness.journal.write("begun", number=number, role=role)
        try:
            run(plan, number)
        except RolledBack:
            pass
        except Exception:
            witness.journal.write("raised", number=number, error=traceback.format_exc())
        time.sleep(random.expovariate(1 / plan.pause))
    connections.close_all()


def run(plan: Plan, number: int) -> None:
    """Run one transaction: rows, a task for each, and a commit or a rollback."""
    kind, lingers = plan.transaction(number)
    with transaction.atomic():
        send_kind(kind, plan, number)
        time.sleep(lingers)
        if kind == "rolled back":
            raise RolledBack


def send_kind(kind: str, plan: Plan, number: int) -> None:
    """Write the rows and send the tasks of one kind of transaction."""
    parts = itertools.count()
    outbox = not plan.is_plain  # without, a send is delay_on_commit

    def write() -> str:
        """Write a row, which tells later that this committed; return its name."""
        name = f"{number}.{next(parts)}"
        Person.everyone.create(email=name)
        return name

    def send_one(task: Any = work.welcome) -> None:
        task.apply_async_on_commit((write(),), outbox=outbox)

    def sign(times: int) -> list[Any]:
        return [work.welcome.si(write()) for _ in range(times)]

    match kind:
        case "three":
            for _ in range(3):
                send_one()
        case "unique":
            send_one(work.welcome_alone)
        case "retried":
            source: Any = broken if plan.broken == "deferred-retry" else work
            send_one(source.welcome_at_last)
        case "half rolled back":
            send_one()
            with transaction.atomic():
                send_one()
                transaction.set_rollback(True)
        case "chain" | "group":
            send_on_commit((chain if kind == "chain" else group)(sign(2)), outbox=outbox)
        case "chord":
            send_on_commit(chord(sign(2), *sign(1)), outbox=outbox)
        case _:
            send_one()
