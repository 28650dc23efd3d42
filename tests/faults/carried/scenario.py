"""How a run of the scenario ``carried`` is recorded."""

import time
from functools import partial
from typing import Final

from django.db import Error, connections

from django_celery_safe.models import OutboxMessage
from tests.faults.carried.history import History
from tests.faults.carried.nemesis import Troublemaker
from tests.faults.carried.plan import LEASE, RESEND_AFTER, Plan
from tests.faults.carried.sender import hurry_and_relay, send
from tests.faults.lab import SEND_TIMEOUT, Lab
from tests.faults.ledger import Ledger, Trigger
from tests.faults.scenario import Stillness, Witness
from tests.processes import wait_for
from tests.servers import MariaDBServer, PostgresServer

#: Pause between two looks, s.
LOOK: Final = 0.05

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = {
    "no-token": ("ends by others",),
    "ignores-leases": ("leases cut short", "two at once"),
    "done-first": ("lost tasks",),
    "new-id": ("lost tasks",),
}

#: What the database notes about a task's row: it is gone, its task failed, a process died in its
#: task, and it is sent again since no worker began its task.
TRIGGERS: Final = {
    "gone": Trigger(OutboxMessage, "DELETE", row="OLD"),
    "failed": Trigger(OutboxMessage, "UPDATE OF state", "NEW.state = 'failed'", "OLD"),
    "resent": Trigger(OutboxMessage, "UPDATE OF resent", "NEW.resent > OLD.resent", "OLD"),
    "death": Trigger(OutboxMessage, "UPDATE OF deaths", "NEW.deaths > OLD.deaths", "OLD"),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers run tasks while processes are killed; return the history."""
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    broker = lab.make_broker(plan.broker)
    ledger = Ledger(alias)
    ledger.open(TRIGGERS)
    ours = {
        "LOCK_TIMEOUT": LEASE,
        "OUTBOX": "until_done",
        "OUTBOX_RESEND_AFTER": RESEND_AFTER,
        "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT,
        # No task is poison here, however often its processes are killed.
        "MAX_DEATHS": None,
    }
    lab.configure(alias, broker, ours)
    relaying = Relaying(lab, plan.broken)
    workers = lab.start_workers(plan, "tests.faults.carried.work")
    began, sending = time.monotonic(), lab.start(send, plan)
    restart = partial(restart_database, plan, lab, alias)
    trouble = Troublemaker(plan, workers, witness, broker, relaying.kill, restart)
    # A task has a row that is due until it has ended.
    is_any_left = OutboxMessage.objects.using(alias).filter(due_at__isnull=False).exists
    still = Stillness(witness.journal, plan.limit)
    while sending.running or not trouble.is_spent or not still.is_over(plan, is_any_left):
        trouble.strike(ledger.count("committed") / plan.tasks)
        still.seconds()
        relaying.check()
        time.sleep(LOOK)
    sending.result(0)
    seconds, waiting = time.monotonic() - began, broker.waiting()
    lab.close()
    return History.read(plan, witness, ledger, alias, seconds=seconds, waiting=waiting)


def restart_database(plan: Plan, lab: Lab, alias: str) -> None:
    """Restart the server of the database; this process's connection ends with it."""
    connections[alias].close()
    lab.server(MariaDBServer if plan.database.startswith("mariadb") else PostgresServer).restart()
    wait_for(lambda: answers(alias), message="the database does not answer")


def answers(alias: str) -> bool:
    """Whether the database answers; PgBouncer takes a connection before its server does."""
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        connections[alias].close()
        return False
    return True


class Relaying:
    """The relay, which may be killed."""

    def __init__(self, lab: Lab, fault: str = "") -> None:
        self._start = partial(lab.start, hurry_and_relay, fault)
        self._process = self._start()

    def kill(self) -> None:
        """Kill it and start it again."""
        self._process.kill()
        self._process = self._start()

    def check(self) -> None:
        """
        See that it relays.

        Raises:
            FunctionFailed: It ended by itself.
        """
        if not self._process.running:
            self._process.result(1)
            raise RuntimeError("The relay ended.")
