"""Records what single-instance tasks do while their processes are killed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from django.test import override_settings

from django_celery_safe import HeldLock, iter_locks
from tests.chaos import tasks
from tests.chaos.broker import DATABASE, Broker
from tests.chaos.checker import History
from tests.chaos.nemesis import Troublemaker
from tests.chaos.plan import LEASE, VISIBILITY_TIMEOUT, Plan, Witness
from tests.chaos.sender import send
from tests.processes import CeleryWorker, run_in_processes, wait_for
from tests.servers import RedisServer

#: Messages for each child that a worker may hold: so many that there is always room for
#: one more, and the worker waits for it.
PREFETCH = 16

#: Kills after the last send.
LATE_KILLS = 5

#: Part of the name of a lock that notes a copy on its way.
NOTE = ":copy:"

#: How late something may be on a busy machine, s.
SLOWNESS = 2.0


def record(plan: Plan, server: RedisServer, folder: Path) -> History:
    """
    Send tasks to workers whose processes are killed; return what happened.

    Args:
        server: Broker and place of the locks; it is emptied before.
        folder: Where the witnesses write, empty.

    Raises:
        FunctionFailed: A send failed.
        TimeoutError: The sends took too long.
    """
    server.flush()
    witness = Witness(folder)
    with ExitStack() as stack:
        stack.enter_context(use_server(server))
        broker = stack.enter_context(Broker(server))
        workers = stack.enter_context(run_workers(plan))
        wait_for(lambda: broker.waiting() == plan.workers, 10, "the workers take no messages")
        trouble = Troublemaker(plan, witness, broker, workers)
        sends = stack.enter_context(ThreadPoolExecutor(1)).submit(
            run_in_processes, send, 2, plan, witness, timeout=plan.at_most
        )
        while not sends.done():
            trouble.strike()
        sends.result()
        for _ in range(LATE_KILLS):
            trouble.strike()
        with suppress(TimeoutError):
            wait_for(lambda: broker.is_drained(plan.workers), plan.patience)
        return History.read(witness, messages=broker.messages(), locks=wait_for_locks())


def wait_for_locks() -> list[HeldLock]:
    """Return the locks that are left when every lease of a dead run, and every note, is over."""
    left = wait_for_none(lambda: [one for one in iter_locks() if NOTE not in one.name], LEASE)
    # A note outlasts its copy's delay, half a visibility timeout, by a whole one.
    return left + wait_for_none(
        lambda: [one for one in iter_locks() if NOTE in one.name], 1.5 * VISIBILITY_TIMEOUT
    )


def wait_for_none(locks: Callable[[], list[HeldLock]], seconds: float) -> list[HeldLock]:
    """Wait until there is no such lock; return those that are left after so many seconds."""
    with suppress(TimeoutError):
        wait_for(lambda: not locks(), seconds + SLOWNESS)
    return locks()


@contextmanager
def use_server(server: RedisServer) -> Iterator[None]:
    """Let locks and messages be in this Redis, in databases of their own."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url}
    options = {
        "visibility_timeout": VISIBILITY_TIMEOUT,
        "unacked_restore_interval": 0.5,
        "unacked_restore_throttle": 1,
    }
    with override_settings(
        CACHES={"default": cache},
        CELERY_BROKER_URL=server.database_url(DATABASE),
        CELERY_BROKER_TRANSPORT_OPTIONS=options,
    ):
        yield


@contextmanager
def run_workers(plan: Plan) -> Iterator[list[CeleryWorker]]:
    """Start the workers at once; gives them when all are ready."""
    workers = [
        CeleryWorker(
            "tests.app",
            concurrency=plan.concurrency,
            arguments=["--include", tasks.__name__, "--prefetch-multiplier", str(PREFETCH)],
        )
        for _ in range(plan.workers)
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.push(worker)
        with ThreadPoolExecutor(plan.workers) as starters:
            list(starters.map(CeleryWorker.start, workers))
        yield workers
