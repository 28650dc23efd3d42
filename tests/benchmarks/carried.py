"""
Cost of carrying a task until it is done, on PostgreSQL and Redis, as a ratio to a plain one.

The floor is a no-op ``@shared_task`` without results on a worker of two processes, at its usual
log level INFO. Workers keep their connection to the database, as a project with such a load
would have them. The worker is paused while a batch is sent, and then works it off. Beside them,
without a limit, runs procrastinate, whose queue is PostgreSQL: ``pip install procrastinate``.
The relay's look is measured among rows that were sent and that wait for their tasks.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple

from celery import shared_task
from django.db import connections, transaction
from django.utils import timezone

from django_celery_safe import SafeTask
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import BATCH as RELAYED
from tests.benchmarks import outbox
from tests.benchmarks.report import Figure
from tests.benchmarks.tasks import (
    Batch,
    Measured,
    are_left,
    beside_floor,
    median_of,
    ratio,
    send_and_run,
    speeds,
)
from tests.benchmarks.tools import count_queries, databases, in_process, use_app, worker_settings
from tests.concurrency.mailbox import Mailbox
from tests.processes import CeleryWorker
from tests.servers import RedisServer, ServerPool

ROUNDS = 20

#: Tasks that run at once.
CONCURRENCY = 2


PLAIN, CARRIED, PEER = "plain", "carried", "procrastinate"

#: Whether the peer can be measured.
HAS_PEER = find_spec(PEER) is not None

#: When sent rows are due, which is when their message would be sent again, as SQL of their number.
LATER = "now() + interval '1 day'"
SENT = {
    "nothing due": (LATER, 0),
    "a batch due": (f"CASE WHEN number <= {RELAYED} THEN now() ELSE {LATER} END", RELAYED),
}

#: Statements that open and close transactions.
BRACKETS = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task(base=SafeTask, outbox="until_done")
def carried(number: int) -> None:
    """Do nothing, and be carried until it is done."""


class Sender(NamedTuple):
    """Sends carried tasks whose rows are in one database."""

    alias: str

    def delay(self, number: int) -> None:
        """Send one."""
        carried.apply_async_on_commit((number,), using=self.alias)


def run(servers: ServerPool) -> list[Figure]:
    """Measure on PostgreSQL and Redis, in a process whose Celery app is new."""
    with databases(servers, None, None, None, None) as (alias, few, many, of_peer):
        figures = figures_of([in_process(measure, alias, of_peer)])
        of_a_send, of_a_run, row = in_process(count_all, alias)
        figures.append(Figure("queries of a send", of_a_send, note="in the transaction"))
        figures.append(Figure("queries of a run", of_a_run, note="without BEGIN and COMMIT"))
        for what, (due_at, due) in SENT.items():
            outbox.fill(few, row, outbox.FEW, due_at)
            outbox.fill(many, row, outbox.MANY, due_at)
            figures += outbox.measure_looks(what, few, many, due=due)
        return figures


def measure(alias: str, of_peer: str) -> dict[str, list[tuple[Batch, Batch]]]:
    """Let each candidate in turn send a batch to its worker, and be run by it."""
    numbers = count()
    with RedisServer() as redis, ExitStack() as stack:
        settings = worker_settings(alias, redis)
        use_app(settings)
        queues = stack.enter_context(redis.client(db=1))
        worker = CeleryWorker(
            "tests.stages.worker_app",
            concurrency=CONCURRENCY,
            settings=settings,
            arguments=["--include", __name__],
        )
        stack.enter_context(worker)
        send = partial(send_and_run, numbers, worker, partial(are_left, queues), redis)
        candidates = {PLAIN: partial(send, plain), CARRIED: partial(send, Sender(alias))}
        if HAS_PEER:
            sender, peer_worker, jobs_are_left = stack.enter_context(peer_in(of_peer))
            candidates[PEER] = partial(
                send_and_run, numbers, peer_worker, jobs_are_left, redis, sender
            )
        return beside_floor(candidates, ROUNDS)


@contextmanager
def peer_in(alias: str) -> Iterator[Any]:
    """Have the peer in a database, with a worker of its own."""
    from tests.benchmarks import procrastinate_peer as peer  # may not be installed

    given = connections.settings[alias]
    names = {"dbname": "NAME", "user": "USER", "host": "HOST", "port": "PORT"}
    conninfo = " ".join(f"{name}={given[key]}" for name, key in names.items())

    def jobs_are_left() -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))"
            )
            return bool(cursor.fetchone()[0])

    connector = peer.procrastinate.PsycopgConnector(conninfo=conninfo)
    with peer.app.replace_connector(connector) as app, app.open():
        app.schema_manager.apply_schema()
        with peer.ProcrastinateWorker(conninfo, CONCURRENCY) as worker:
            yield peer.Sender(), worker, jobs_are_left
    connections[alias].close()


def count_all(alias: str) -> tuple[int, int, outbox.Row]:
    """Count the queries of a send in a transaction and of a run; return the row of a send, too."""
    with closing(Mailbox()) as mailbox:

        def nothing(number: int) -> None:
            pass

        task = mailbox.task(nothing, name=f"{__name__}.nothing", base=SafeTask, outbox="until_done")

        def run_one() -> None:
            assert mailbox.deliver(mailbox.take_one()).state == "SUCCESS"

        def send() -> None:
            task.apply_async_on_commit((1,), using=alias)

        for _ in range(2):  # the first connects and compiles
            with transaction.atomic(using=alias):
                of_a_send = count_queries(alias, send, *BRACKETS)
                row = outbox.read_row(alias)
            of_a_run = count_queries(alias, run_one, *BRACKETS)
            assert not OutboxMessage.objects.using(alias).exists(), "it was not carried to its end"
    connections[alias].close()
    # As it is once it was sent.
    return of_a_send, of_a_run, {**row, "state": "sent", "sent_at": timezone.now()}


def figures_of(measured: Measured) -> list[Figure]:
    """Set the carried tasks against the plain ones of the same round."""
    notes = {PEER: "peer, one process", PLAIN: "" if HAS_PEER else f"not installed: {PEER}"}
    figures = [
        Figure(f"{PLAIN}, µs of CPU", median_of(measured, PLAIN, "run_cpu"), note="worker -c 2")
    ]
    figures.append(Figure(f"{PLAIN} send, µs", median_of(measured, PLAIN, "send")))
    for name in measured[0]:
        if name != PLAIN:
            note = notes.get(name, "of the worker")
            figures.append(Figure(f"{name} / {PLAIN}", ratio(measured, name, "run_cpu"), note=note))
            note = "with its INSERT and COMMIT" if name == CARRIED else "peer"
            value = ratio(measured, name, "send")
            figures.append(Figure(f"{name} send / {PLAIN}", value, note=note))
    return figures + speeds(measured, notes)
