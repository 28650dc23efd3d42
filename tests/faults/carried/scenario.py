"""How a run of the scenario ``carried`` is recorded."""

import time
from typing import Final

from django_celery_safe.models import OutboxMessage
from tests.faults.brokers import Broker, RabbitMQBroker, RedisBroker
from tests.faults.carried import broken
from tests.faults.carried.ledger import WRITTEN, Ledger
from tests.faults.carried.nemesis import Troublemaker
from tests.faults.carried.oracle import History
from tests.faults.carried.plan import LEASE, RESEND_AFTER, Plan, Witness
from tests.faults.carried.sender import relay, send
from tests.faults.lab import Lab
from tests.processes import CeleryWorker
from tests.servers import RabbitMQServer, RedisServer

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
    "until-a-broker": ("lost tasks",),
    "no-token": ("ends by others",),
    "ignores-leases": ("leases cut short", "two at once"),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers do what is sent while all is killed and forgotten; return what happened."""
    witness, broker, alias = Witness(lab.folder), make_broker(plan, lab), lab.database("postgres")
    ledger = Ledger(alias)
    ledger.open()
    configure(plan, lab, broker, alias)
    relaying = Relaying(plan, lab)
    workers = start_workers(plan, lab)
    began = time.monotonic()
    sending = lab.start(send, plan)
    trouble = Troublemaker(
        plan, witness, broker, workers, lambda: ledger.count(WRITTEN), relaying.kill
    )
    still = Stillness(plan, witness, alias)
    while sending.running or not trouble.is_spent or not still.is_over():
        trouble.strike()
        still.check()
        relaying.check()
        time.sleep(LOOK)
    sending.result(0)
    seconds = time.monotonic() - began
    lab.close()
    return History.read(plan, witness, ledger, alias, seconds)


def make_broker(plan: Plan, lab: Lab) -> Broker:
    """Return the broker of the plan, empty: a Redis that keeps nothing, or RabbitMQ."""
    if plan.broker == "rabbitmq":
        return RabbitMQBroker(lab.server(RabbitMQServer))
    return RedisBroker(lab.server(RedisServer), silence=SILENCE)


def configure(plan: Plan, lab: Lab, broker: Broker, alias: str) -> None:
    """Set the Django settings of all processes; ``alias`` is their default database."""
    lab.use_database(alias, CONN_MAX_AGE=None)
    lab.settings |= {
        "CELERY_TASK_IGNORE_RESULT": True,
        "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        "DJANGO_CELERY_SAFE": {
            "LOCK_TIMEOUT": LEASE,
            "OUTBOX": True if plan.broken == "until-a-broker" else "until_done",
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

    def __init__(self, plan: Plan, witness: Witness, alias: str) -> None:
        self._plan, self._witness, self._alias = plan, witness, alias
        self._ends_at = time.monotonic() + plan.at_most
        self._seen = -1
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Tell whether all tasks have ended and nothing moves, or nothing has moved for long."""
        seconds = time.monotonic() - self._since
        if seconds < self._plan.quiet:
            return False
        waiting = OutboxMessage.objects.using(self._alias).filter(due_at__isnull=False)
        return seconds > self._plan.patience or not waiting.exists()

    def check(self) -> None:
        """See whether anything has moved."""
        seen = self._witness.size
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if time.monotonic() > self._ends_at:
            raise TimeoutError(f"After {self._plan.at_most:g} s there is no end.")
