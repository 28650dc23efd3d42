"""Records what becomes of runs while everything around them is killed."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, connections

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from tests.processes import CeleryWorker, run_in_processes, start_in_process
from tests.runs.brokers import Broker
from tests.runs.checker import History
from tests.runs.ledger import Ledger
from tests.runs.nemesis import Troublemaker
from tests.runs.plan import LEASE, Plan, Witness
from tests.runs.starter import relay, start_runs, sweep_once

#: Pause between two looks, s.
LOOK: Final = 0.05

#: How long a publication right after a commit may take, s.
SEND_TIMEOUT: Final = 0.5

#: How long a worker waits until it takes a child for dead, s.
LOST_WAIT: Final = 1.0


def record(plan: Plan, broker: Broker, alias: str, folder: Path) -> History:
    """
    Let workers do runs while they are killed, sweep once, and return what happened.

    Args:
        broker: Empty.
        alias: A database, empty but migrated.
        folder: Where the witnesses write, empty.
    """
    witness, ledger = Witness(folder), Ledger(alias)
    ledger.open()
    settings = make_settings(broker, alias, witness)
    began = time.monotonic()
    with ExitStack() as stack:
        relaying = stack.enter_context(start_in_process(relay, settings=settings))
        workers = stack.enter_context(run_workers(plan, settings))
        still = Stillness(plan, witness, broker, alias)
        trouble = Troublemaker(plan, witness, broker, workers)
        starting = stack.enter_context(start_in_process(start_runs, plan, settings=settings))
        runs = StageRun.objects.using(alias)
        while starting.running or not trouble.is_spent or not still.is_over():
            started = plan.runs if not starting.running else runs.count()
            trouble.strike(started)
            still.check()
            time.sleep(LOOK)
        starting.result(0)
        swept = time.monotonic()
        (repairs,) = run_in_processes(sweep_once, 1, settings=settings, timeout=plan.at_most)
        still = Stillness(plan, witness, broker, alias)
        while not still.is_over():
            time.sleep(LOOK)
        ended = time.monotonic()
        relaying.process.terminate()
        relaying.result(30)
    seconds = {"before the sweep": swept - began, "after it": ended - swept}
    return History.read(plan, witness, ledger, alias, repairs, seconds)


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


def make_settings(broker: Broker, alias: str, witness: Witness) -> dict[str, Any]:
    """Return the Django settings of all processes; ``alias`` is their default database."""
    database = connections.settings[alias]
    names = ("ENGINE", "NAME", "USER", "HOST", "PORT", "OPTIONS")
    return {
        "DATABASES": {
            DEFAULT_DB_ALIAS: {**{name: database[name] for name in names}, "CONN_MAX_AGE": None}
        },
        "CELERY_TASK_IGNORE_RESULT": True,
        "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        "DJANGO_CELERY_SAFE": {"LOCK_TIMEOUT": LEASE, "OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT},
        "TEST_WITNESS": str(witness.folder),
        **broker.settings(),
    }


@contextmanager
def run_workers(plan: Plan, settings: dict[str, Any]) -> Iterator[list[CeleryWorker]]:
    """Start the workers at once; gives them when all are ready."""
    engine = {} if plan.engine == "right" else {"SAFE_TESTS_BROKEN_ENGINE": plan.engine}
    workers = [
        CeleryWorker(
            "tests.stages.worker_app",
            concurrency=plan.concurrency,
            arguments=["--include", "tests.runs.tasks"],
            settings=settings,
            env=engine,
        )
        for _ in range(plan.workers)
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.push(worker)
        with ThreadPoolExecutor(plan.workers) as starters:
            list(starters.map(CeleryWorker.start, workers))
        yield workers
