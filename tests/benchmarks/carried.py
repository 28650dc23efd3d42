"""
Cost of carrying a task until it is done, on PostgreSQL and Redis, as a ratio to a plain one.

The floor is a no-op ``@shared_task`` without results on a worker of two processes, at its usual
log level INFO. Workers keep their connection to the database, as a project with such a load
would have them. The worker is paused while a batch is sent, and then works it off. Beside them,
without a limit, runs procrastinate, whose queue is PostgreSQL: ``pip install procrastinate``.
The relay's look is measured among rows that were sent and that wait for their tasks.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from celery import shared_task
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_celery_safe import SafeTask
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import BATCH as RELAYED
from tests.benchmarks import outbox
from tests.benchmarks.report import Figure
from tests.benchmarks.stages import use_app, worker_settings
from tests.benchmarks.tasks import Batch, are_left, median, ratio, send_and_run
from tests.concurrency.mailbox import Mailbox
from tests.processes import CeleryWorker, start_in_process
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases

#: Rounds, and how many tasks of each candidate are sent and run in one.
ROUNDS, BATCH = 20, 75

#: Tasks that run at once.
CONCURRENCY = 2

#: Seconds until all is measured, at the most.
LONGEST = 600

PLAIN, CARRIED, PEER = "plain", "carried", "procrastinate"

#: Whether the peer can be measured.
HAS_PEER = find_spec(PEER) is not None

#: When sent rows are due, which is when their message would be sent again, as SQL of their number.
LATER = "now() + interval '1 day'"
SENT = {
    "nothing due": LATER,
    "a batch due": f"CASE WHEN number <= {RELAYED} THEN now() ELSE {LATER} END",
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
    """
    Sends carried tasks whose rows are in one database.

    Attributes:
        alias: That of the database.
    """

    alias: str

    def delay(self, number: int) -> None:
        """Send one."""
        carried.apply_async_on_commit((number,), using=self.alias)


class Candidate(NamedTuple):
    """A way to send a task, and who runs it."""

    sender: Any
    worker: CeleryWorker
    #: Whether tasks wait to be run.
    are_left: Callable[[], object]


class Queries(NamedTuple):
    """How many queries there are, BEGIN and COMMIT aside."""

    of_a_send: int
    of_a_run: int


def run(servers: ServerPool) -> list[Figure]:
    """Measure on PostgreSQL and Redis, in a process whose Celery app is new."""
    if not HAS_PEER:
        print(f"NOT MEASURED: {PEER}, which is not installed.", file=sys.stderr)
    with TemporaryDirectory() as name, ExitStack() as stack:
        databases, folder = Databases(servers, Path(name)), Path(name)
        alias, few, many, of_peer = (
            stack.enter_context(databases.alias("postgres", folder)) for _ in range(4)
        )
        with start_in_process(measure, alias, of_peer) as measuring:
            batches = measuring.result(LONGEST)
        with start_in_process(count_queries, alias) as counting:
            queries, row = counting.result(LONGEST)
        figures = [*figures_of(batches), *figures_of_queries(queries)]
        for what, due_at in SENT.items():
            outbox.fill(few, row, outbox.FEW, due_at)
            outbox.fill(many, row, outbox.MANY, due_at)
            due = 0 if due_at == LATER else RELAYED
            figures += outbox.figures_of_looks(what, outbox.measure_looks(few, many, due=due))
        return figures


def measure(alias: str, of_peer: str, rounds: int = ROUNDS) -> dict[str, list[Batch]]:
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
        candidates = {
            PLAIN: Candidate(plain, worker, lambda: are_left(queues)),
            CARRIED: Candidate(Sender(alias), worker, lambda: are_left(queues)),
        }
        if HAS_PEER:
            candidates[PEER] = stack.enter_context(peer_in(of_peer))
        batches: dict[str, list[Batch]] = {name: [] for name in candidates}
        # The first round connects and compiles, and is not counted.
        for number in range(rounds + 1):
            for name in random.sample(list(candidates), len(candidates)):
                calls = list(islice(numbers, BATCH))
                one = candidates[name]
                batch = send_and_run(one.sender, calls, one.worker, one.are_left, redis)
                batches[name] += [batch] if number else []
    return batches


@contextmanager
def peer_in(alias: str) -> Iterator[Candidate]:
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
            yield Candidate(peer.Sender(), worker, jobs_are_left)
    connections[alias].close()


def count_queries(alias: str) -> tuple[Queries, outbox.Row]:
    """Count the queries of a send in a transaction and of a run; return the row of a send, too."""
    with closing(Mailbox()) as mailbox:

        def nothing(number: int) -> None:
            pass

        task = mailbox.task(nothing, name=f"{__name__}.nothing", base=SafeTask, outbox="until_done")
        for number in range(2):  # the first connects and compiles
            with transaction.atomic(using=alias):
                with CaptureQueriesContext(connections[alias]) as sending:
                    task.apply_async_on_commit((number,), using=alias)
                row = read_row(alias)
            with CaptureQueriesContext(connections[alias]) as running:
                assert mailbox.deliver(mailbox.take_one()).state == "SUCCESS"
            assert not OutboxMessage.objects.using(alias).exists(), "it was not carried to its end"
    connections[alias].close()
    return Queries(*map(without_brackets, (sending, running))), row


def read_row(alias: str) -> outbox.Row:
    """Return the only row of the outbox, as it is once it was sent."""
    columns = {field.attname for field in OutboxMessage._meta.fields}
    row = OutboxMessage.objects.using(alias).values(*columns - {"id", "due_at"}).get()
    sent_at = row.pop("created_at")
    return {**row, "body": bytes(row["body"]), "sent_at": sent_at}


def without_brackets(queries: CaptureQueriesContext) -> int:
    """Return how many queries there were."""
    return sum(not query["sql"].startswith(BRACKETS) for query in queries)


def figures_of(batches: Mapping[str, Sequence[Batch]]) -> list[Figure]:
    """Set the carried tasks against the plain ones of the same round."""
    notes = {PEER: "peer, one process", PLAIN: "" if HAS_PEER else f"not installed: {PEER}"}
    peers = [name for name in batches if name == PEER]
    return [
        Figure(f"{PLAIN}, µs of CPU", median(batches, PLAIN, "run_cpu"), note="worker -c 2"),
        Figure(f"{CARRIED} / {PLAIN}", ratio(batches, CARRIED, "run_cpu"), note="of the worker"),
        *[
            Figure(f"{name} / {PLAIN}", ratio(batches, name, "run_cpu"), note=notes[name])
            for name in peers
        ],
        Figure(f"{PLAIN} send, µs", median(batches, PLAIN, "send")),
        Figure(
            f"{CARRIED} send / {PLAIN}",
            ratio(batches, CARRIED, "send"),
            note="with its INSERT and COMMIT",
        ),
        *[
            Figure(f"{name} send / {PLAIN}", ratio(batches, name, "send"), note="peer")
            for name in peers
        ],
        *[
            Figure(
                f"{name}: tasks/s",
                1e6 / median(batches, name, "run"),
                better="higher",
                note=notes.get(name, ""),
            )
            for name in batches
        ],
    ]


def figures_of_queries(queries: Queries) -> list[Figure]:
    """Show what was counted."""
    note = "without BEGIN and COMMIT"
    return [
        Figure("queries of a send", queries.of_a_send, note="in the transaction"),
        Figure("queries of a run", queries.of_a_run, note=note),
    ]
