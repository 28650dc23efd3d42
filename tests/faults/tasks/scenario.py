"""How a run of the scenario ``tasks`` is recorded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from django.test import override_settings

from django_celery_safe import HeldLock, iter_locks
from tests.faults.lab import PREFETCH, Lab
from tests.faults.scenario import Witness
from tests.faults.tasks.nemesis import Killer
from tests.faults.tasks.oracle import History
from tests.faults.tasks.plan import LEASE, VISIBILITY_TIMEOUT, Plan
from tests.faults.tasks.sender import send
from tests.processes import run_in_processes, wait_for

#: Kills after the last send.
LATE_KILLS = 5

#: Part of the name of a lock that marks a copy on its way.
COPY = ":copy:"

#: How late something may be on a busy machine, s.
SLOWNESS = 10.0


def record(plan: Plan, lab: Lab) -> History:
    """
    Send tasks to workers whose processes are killed; return what happened.

    Raises:
        FunctionFailed: A send failed.
        TimeoutError: The sends took too long.
    """
    witness = Witness(lab.folder)
    broker: Any = lab.make_broker("redis", visibility_timeout=VISIBILITY_TIMEOUT)
    lab.use_store(broker.server)
    # No task kills its process here, whoever strikes it: none is given up.
    lab.settings |= {"DJANGO_CELERY_SAFE": {"MAX_DEATHS": None}, **broker.settings()}
    # The locks are looked for in this process, too.
    lab.enter_context(override_settings(**lab.settings))
    workers = lab.start_workers(plan, "tests.faults.tasks.work", PREFETCH)
    wait_for(lambda: broker.idle_workers() == plan.workers, 60, "the workers take no messages")
    killer = Killer(plan, workers, witness, broker)
    sends = lab.enter_context(ThreadPoolExecutor(1)).submit(
        run_in_processes, send, 2, plan, timeout=plan.at_most
    )
    while not sends.done():
        killer.strike_often()
    sends.result()
    for _ in range(LATE_KILLS):
        killer.strike_often()
    killer.strike_last(plan.patience)
    with suppress(TimeoutError):
        wait_for(lambda: broker.is_drained(plan.workers), plan.patience)
    messages = [one["id"] for one in broker.headers()]
    return History.read(witness, messages=messages, locks=wait_for_locks())


def wait_for_locks() -> list[HeldLock]:
    """Return the locks that are left when every lease of a dead run, and every copy, is over."""
    left = wait_for_none(lambda: [lock for lock in iter_locks() if COPY not in lock.name], LEASE)
    # Such a lock outlasts its copy's delay, half a visibility timeout, by a whole one.
    return left + wait_for_none(
        lambda: [lock for lock in iter_locks() if COPY in lock.name], 1.5 * VISIBILITY_TIMEOUT
    )


def wait_for_none(locks: Callable[[], list[HeldLock]], seconds: float) -> list[HeldLock]:
    """Wait until there is no such lock; return those that are left after so many seconds."""
    with suppress(TimeoutError):
        wait_for(lambda: not locks(), seconds + SLOWNESS)
    return locks()
