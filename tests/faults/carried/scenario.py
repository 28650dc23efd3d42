"""How a run of the scenario ``carried`` is recorded."""

import time
from dataclasses import replace
from typing import Final

from django.db import Error, connections

from django_celery_safe.models import OutboxMessage
from tests.faults.brokers import Broker, FolderBroker, RabbitMQBroker, RedisBroker
from tests.faults.carried import broken
from tests.faults.carried.history import History
from tests.faults.carried.ledger import COMMITTED, Ledger
from tests.faults.carried.nemesis import Troublemaker
from tests.faults.carried.plan import LEASE, OUTBOX, RESEND_AFTER, Plan, Witness
from tests.faults.carried.sender import relay, send
from tests.faults.lab import Lab
from tests.processes import CeleryWorker
from tests.processes.waiting import wait_for
from tests.servers import MariaDBServer, PostgresServer, RabbitMQServer, RedisServer

#: Pause between two looks, s.
LOOK: Final = 0.05

#: How long a publication right after a commit may take, s.
SEND_TIMEOUT: Final = 0.5

#: Longest wait for an answer of Redis where the package sets none, s.
SILENCE: Final = 2.0

#: How long a worker waits until it takes a child for dead, s.
LOST_WAIT: Final = 1.0

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = {
    "no-token": ("ends by others",),
    "ignores-leases": ("leases cut short", "two at once"),
    "done-first": ("lost tasks",),
    "new-id": ("lost tasks",),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers run tasks while processes are killed; return the history."""
    in_files = plan.broker == "filesystem"
    if in_files:  # there is no server to restart
        plan = replace(plan, restarts=0, database_restarts=0)
    witness, broker = Witness(lab.folder), make_broker(plan.broker, lab, plan.queue)
    alias = lab.database("sqlite-immediate" if in_files else plan.database)
    ledger = Ledger(alias)
    ledger.open()
    configure(plan, lab, broker, alias)
    relaying = Relaying(plan, lab)
    workers = start_workers(plan, lab)
    began = time.monotonic()
    sending = lab.start(send, plan)
    trouble = Troublemaker(
        plan,
        witness,
        broker,
        workers,
        lambda: ledger.count(COMMITTED),
        relaying.kill,
        lambda: restart_database(plan, lab, alias),
    )
    still = Stillness(plan, witness, ledger, alias)
    while sending.running or not trouble.is_spent or not still.is_over():
        trouble.strike()
        still.check()
        relaying.check()
        time.sleep(LOOK)
    sending.result(0)
    seconds, waiting = time.monotonic() - began, broker.waiting()
    lab.close()
    history = History.read(plan, witness, ledger, alias)
    return replace(history, seconds=seconds, waiting=waiting)


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


def make_broker(name: str, lab: Lab, queue: str = "classic") -> Broker:
    """Return a broker, empty: a Redis that keeps nothing, RabbitMQ, or a folder."""
    match name:
        case "filesystem":
            return FolderBroker(lab.folder / "broker")
        case "rabbitmq":
            return RabbitMQBroker(lab.server(RabbitMQServer), queue)
    return RedisBroker(lab.server(RedisServer), silence=SILENCE)


def configure(plan: Plan, lab: Lab, broker: Broker, alias: str) -> None:
    """Set the Django settings of all processes; ``alias`` is their default database."""
    lab.use_database(alias, CONN_MAX_AGE=None)
    lab.settings |= {
        "CELERY_TASK_ACKS_LATE": plan.sent in ("acks-late", "reject-lost"),
        "CELERY_TASK_IGNORE_RESULT": True,
        "CELERY_TASK_REJECT_ON_WORKER_LOST": plan.sent == "reject-lost",
        "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        "DJANGO_CELERY_SAFE": {
            "LOCK_TIMEOUT": LEASE,
            "OUTBOX": OUTBOX.get(plan.sent, False),
            "OUTBOX_RESEND_AFTER": RESEND_AFTER,
            "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT,
            # No task is poison here, however often its processes are killed.
            "MAX_DEATHS": None,
        },
        "TEST_WITNESS": str(lab.folder),
        **broker.settings(),
    }


def start_workers(plan: Plan, lab: Lab) -> list[CeleryWorker]:
    """Start the workers, with a fault if that is planned."""
    return lab.start_workers(
        plan.workers,
        "tests.faults.carried.work",
        concurrency=plan.concurrency,
        env={broken.VARIABLE: plan.broken},
    )


class Relaying:
    """The relay, which may be killed."""

    def __init__(self, plan: Plan, lab: Lab) -> None:
        self._plan, self._lab = plan, lab
        self._process = lab.start(relay, plan)

    def kill(self) -> None:
        """Kill it and start it again."""
        self._process.kill()
        self._process = self._lab.start(relay, self._plan)

    def check(self) -> None:
        """
        See that it relays.

        Raises:
            FunctionFailed: It ended by itself.
        """
        if not self._process.running:
            self._process.result(1)
            raise RuntimeError("The relay ended.")


class Stillness:
    """
    Tells whether nothing moves any more.

    Raises:
        TimeoutError: By :meth:`check`: something has moved for too long.
    """

    def __init__(self, plan: Plan, witness: Witness, ledger: Ledger, alias: str) -> None:
        self._plan, self._witness, self._ledger, self._alias = plan, witness, ledger, alias
        self._ends_at = time.monotonic() + plan.limit
        self._seen = -1
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Return whether all tasks have ended and nothing moves, or nothing has moved for long."""
        seconds = time.monotonic() - self._since
        if seconds < self._plan.quiet:
            return False
        return seconds > self._plan.patience or not self._is_any_left()

    def _is_any_left(self) -> bool:
        """Return whether some task has not ended: carried ones have rows until then."""
        if self._plan.is_carried:
            rows = OutboxMessage.objects.using(self._alias).filter(due_at__isnull=False)
            return rows.exists()
        return self._ledger.count(COMMITTED) > self._witness.count_ended()

    def check(self) -> None:
        """See whether anything has moved."""
        seen = self._witness.size
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if time.monotonic() > self._ends_at:
            raise TimeoutError(f"After {self._plan.limit:g} s there is no end.")
