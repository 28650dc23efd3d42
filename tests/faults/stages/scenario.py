"""How a run of the scenario ``stages`` is recorded."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from tests.faults.brokers import (
    Broker,
    FolderBroker,
    LastingRedis,
    RabbitMQBroker,
    RedisBroker,
)
from tests.faults.lab import Lab
from tests.faults.stages.ledger import Ledger
from tests.faults.stages.nemesis import Troublemaker
from tests.faults.stages.oracle import History
from tests.faults.stages.plan import LEASE, MAX_DEATHS, VISIBILITY_TIMEOUT, Plan, Witness
from tests.faults.stages.starter import relay, start_runs, sweep_once
from tests.processes import CeleryWorker
from tests.servers import RabbitMQServer
from tests.servers.databases import DatabaseKind

#: Pause between two looks, s.
LOOK: Final = 0.05

#: How long a publication right after a commit may take, s.
SEND_TIMEOUT: Final = 0.5

#: Longest wait for an answer of Redis where the package sets none, s.
SILENCE: Final = 2.0

#: How long a worker waits until it takes a child for dead, s.
LOST_WAIT: Final = 1.0

#: Deliberate faults, and the checks of which one must find each.
VARIANTS = dict.fromkeys(("counter", "count"), ("stages begun", "unrepaired stages"))


def record(plan: Plan, lab: Lab) -> History:
    """Let workers do runs while they are killed, sweep once, and return what happened."""
    if plan.broker == "filesystem":
        plan = replace(plan, restarts=0)
    kind: DatabaseKind = plan.database  # type: ignore[assignment]
    witness, broker, alias = Witness(lab.folder), make_broker(plan, lab), lab.database(kind)
    ledger = Ledger(alias)
    ledger.open()
    configure(lab, broker, alias)
    relaying = lab.start(relay)
    workers = start_workers(plan, lab)
    began = time.monotonic()
    start_and_strike(plan, lab, witness, broker, alias, workers)
    swept = time.monotonic()
    lab.start(sweep_once).result(plan.at_most)
    still = Stillness(plan, witness, broker, alias)
    while not still.is_over():
        time.sleep(LOOK)
    ended = time.monotonic()
    relaying.process.terminate()
    relaying.result(30)
    lab.close()
    seconds = {"before the sweep": swept - began, "after it": ended - swept}
    return History.read(plan, witness, ledger, alias, seconds)


def start_workers(plan: Plan, lab: Lab) -> list[CeleryWorker]:
    """Start the workers, with a broken engine if that is planned."""
    return lab.start_workers(
        plan.workers,
        "tests.faults.stages.work",
        app="tests.stages.worker_app",
        concurrency=plan.concurrency,
        env={"SAFE_TESTS_BROKEN_ENGINE": plan.broken} if plan.broken else {},
    )


def start_and_strike(
    plan: Plan,
    lab: Lab,
    witness: Witness,
    broker: Broker,
    alias: str,
    workers: Sequence[CeleryWorker],
) -> None:
    """Start the runs, and let the nemesis strike until nothing moves any more."""
    still = Stillness(plan, witness, broker, alias)
    starting = lab.start(start_runs, plan)
    runs = StageRun.objects.using(alias)
    trouble = Troublemaker(
        plan, witness, broker, workers, lambda: runs.count() if starting.running else plan.runs
    )
    while starting.running or not trouble.is_spent or not still.is_over():
        trouble.strike()
        still.check()
        time.sleep(LOOK)
    starting.result(0)


def make_broker(plan: Plan, lab: Lab) -> Broker:
    """Return the broker of the plan, empty."""
    match plan.broker:
        case "filesystem":
            return FolderBroker(lab.folder / "broker")
        case "rabbitmq":
            return RabbitMQBroker(lab.server(RabbitMQServer))
    return RedisBroker(lab.server(LastingRedis), VISIBILITY_TIMEOUT, SILENCE)


class Stillness:
    """
    Tells whether nothing moves any more.

    Raises:
        TimeoutError: By :meth:`check`: something has moved for too long.
    """

    def __init__(self, plan: Plan, witness: Witness, broker: Broker, alias: str) -> None:
        self._plan, self._witness, self._broker, self._alias = plan, witness, broker, alias
        self._ends_at = time.monotonic() + plan.at_most
        self._seen = -1
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Tell whether all runs have ended, or nothing has moved for long and nothing can."""
        self.check()
        if not StageRun.objects.using(self._alias).active().exists():
            return True
        if time.monotonic() < self._since + self._plan.quiet:
            return False
        if any(look() for look in self._looks()):
            self._since = time.monotonic()
            return False
        return True

    def _looks(self) -> Iterator[Callable[[], object]]:
        yield OutboxMessage.objects.using(self._alias).pending().exists
        yield StageStep.objects.using(self._alias).alive().exists
        yield self._broker.waiting

    def check(self) -> None:
        """See whether anything has moved."""
        seen = self._witness.size
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if time.monotonic() > self._ends_at:
            raise TimeoutError(f"After {self._plan.at_most:g} s there is no end.")


def configure(lab: Lab, broker: Broker, alias: str) -> None:
    """Set the Django settings of all processes; ``alias`` is their default database."""
    lab.use_database(alias, CONN_MAX_AGE=None)
    lab.settings |= {
        "CELERY_TASK_IGNORE_RESULT": True,
        "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        "DJANGO_CELERY_SAFE": {
            "LOCK_TIMEOUT": LEASE,
            "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT,
            "MAX_DEATHS": MAX_DEATHS,
        },
        "TEST_WITNESS": str(lab.folder),
        **broker.settings(),
    }
