"""A process that sends."""

import itertools
import logging
import os
import random
import threading
import time
import traceback
from functools import partial
from typing import Any

from celery import chain, chord, group
from django.db import connections, transaction

from django_celery_safe import send_on_commit
from django_celery_safe.sending import sender
from tests.app.celery import app
from tests.app.models import Person
from tests.faults.outbox import broken, work
from tests.faults.outbox.plan import Plan, Witness
from tests.faults.outbox.points import lay

#: Threads, so that transactions overlap and commit in another order than they began.
THREADS = 2

#: How long a relay leaves a new row alone, beyond the time for sending it, s.
GRACE = 1.0


class RolledBack(Exception):
    """Rolls a transaction back."""


def send(
    plan: Plan, witness: Witness, role: str, numbers: tuple[int, int], point: str | None, hit: int
) -> None:
    """
    Run one transaction after the other until told to end, or killed.

    Args:
        numbers: The first transaction's, and the step to the next.
    """
    logging.basicConfig(filename=witness.log)
    assert hasattr(sender, "GRACE")
    sender.GRACE = GRACE  # type: ignore[misc]
    app.finalize()
    if point is not None:
        lay(role, point, hit, partial(witness.record_kill, role, point, os.getpid()))
    count = itertools.count(*numbers)
    threads = [
        threading.Thread(target=send_often, args=(plan, witness, role, count))
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_often(plan: Plan, witness: Witness, role: str, count: "itertools.count[int]") -> None:
    """Run transactions; none of them may fail."""
    while not witness.is_over:
        number = next(count)
        witness.journal.write("begun", number=number, role=role)
        try:
            run(plan, witness, number)
        except RolledBack:
            pass
        except Exception:
            witness.journal.write("raised", number=number, error=traceback.format_exc())
        time.sleep(random.expovariate(1 / plan.pause))
    connections.close_all()


def run(plan: Plan, witness: Witness, number: int) -> None:
    """Run one transaction: rows, a task for each, and a commit or a rollback."""
    kind, lingers = plan.transaction(number)
    with transaction.atomic():
        Sends(plan, witness, number).make(kind)
        time.sleep(lingers)
        if kind == "rolled back":
            raise RolledBack


class Sends:
    """The rows and sends of one transaction."""

    def __init__(self, plan: Plan, witness: Witness, number: int) -> None:
        self._plan, self._folder, self._number = plan, str(witness.folder), number
        self._parts = itertools.count()

    def make(self, kind: str) -> None:
        """Write and send what this kind of transaction does."""
        match kind:
            case "three":
                for _ in range(3):
                    self._send(work.welcome)
            case "unique":
                self._send(work.welcome_alone)
            case "retried":
                source: Any = broken if self._plan.broken == "deferred-retry" else work
                self._send(source.welcome_at_last)
            case "half rolled back":
                self._send(work.welcome)
                with transaction.atomic():
                    self._send(work.welcome)
                    transaction.set_rollback(True)
            case "chain" | "group":
                make: Any = chain if kind == "chain" else group
                self._send_canvas(make(self._signature(), self._signature()))
            case "chord":
                self._send_canvas(chord([self._signature(), self._signature()], self._signature()))
            case _:
                self._send(work.welcome)

    def _write(self) -> tuple[str, str]:
        """Write a row, which tells later that this committed; return its task's arguments."""
        name = f"{self._number}.{next(self._parts)}"
        Person.everyone.create(email=name)
        return self._folder, name

    def _send(self, task: Any) -> None:
        arguments = self._write()
        # Without an outbox this is delay_on_commit.
        task.apply_async_on_commit(arguments, outbox=not self._plan.is_plain)

    def _signature(self) -> Any:
        return work.welcome.si(*self._write())

    def _send_canvas(self, canvas: Any) -> None:
        send_on_commit(canvas, outbox=not self._plan.is_plain)
