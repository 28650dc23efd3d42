"""
The outbox on a database + Redis: what a send costs its transaction, and how fast relays are.

The floor of the relays is a process that sends the same message with ``apply_async`` and
one producer; that of a send is the INSERT of one row of a small model, in the same
transaction. The relays' rows are copies, made by SQL, of a row that was really sent.
"""

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from celery import current_app, shared_task
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_celery_safe import SafeTask, send_on_commit
from django_celery_safe.inspection.messages import status_of
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import BATCH, LEASE, Relay
from tests.app.models import Person
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.processes import meet, run_in_processes, start_in_process
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases

#: Rounds of relaying, and how many messages each process sends in one.
ROUNDS, MESSAGES = 12, 5000

#: Messages that each process sends before it is measured, to be connected.
WARM_UP = BATCH

#: Transactions in which sends are measured, and how many of each kind are in one.
TRANSACTIONS, SENDS = 40, 50

#: Rows of the outboxes in which is looked, and how many are due where most are not.
MANY, FEW, SOME_DUE = 1_000_000, 1000, 2 * BATCH

#: Calls of ``celery_outbox status`` with many rows.
STATUS_CALLS = 5

#: Seconds until a part is measured, at the most.
LONGEST = 300

#: Where kombu keeps messages that are to be delivered.
QUEUE = "celery"

PRODUCER, RELAY, TWO_RELAYS = "one producer", "relay", "two relays"
INSERT, ON_COMMIT, OUTBOX = "INSERT", "on-commit send", "outbox send"

#: For each server, SQL for now, a random part of an hour, a day, and a source of numbers.
DIALECTS = {
    "postgresql": ("now()", "random() * interval '1 hour'", "interval '1 day'",
                   "generate_series(1, {}) AS number"),
    "mysql": ("utc_timestamp(6)", "interval rand() * 3600000000 microsecond", "interval 1 day",
              "(SELECT seq AS number FROM seq_1_to_{}) AS numbers"),
}  # fmt: skip

#: When rows are due, as SQL of their number.
ALL_DUE = "{now} - {hour}"
MOST_LATER = f"CASE WHEN number <= {SOME_DUE} THEN {{now}} ELSE {{now}} + {{day}} END"
MIXTURES = {"all due": ALL_DUE, "few due": MOST_LATER}


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task(base=SafeTask)
def safe(number: int) -> None:
    """Do nothing."""


#: Columns of a row by name.
Row = dict[str, Any]


class Send(NamedTuple):
    """The time of a send in one transaction, in µs, for each kind of send."""

    insert: float
    on_commit: float
    outbox: float


def run(servers: ServerPool) -> list[Figure]:
    """Measure relays, sends and looks for what is due, in processes whose Celery app is new."""
    with outboxes(servers, 3) as (alias, few, many):
        row = a_row(alias)
        rates = measure_relays(servers.redis, alias, row, ROUNDS, MESSAGES)
        with start_in_process(measure_sends, alias, TRANSACTIONS, SENDS) as measuring:
            sends, queries = measuring.result(LONGEST)
        figures = [*figures_of_relays(rates), *figures_of_sends(sends, queries)]
        for name, due_at in MIXTURES.items():
            fill(few, row, FEW, due_at)
            fill(many, row, MANY, due_at)
            figures += figures_of_looks(name, measure_looks(few, many))
        return [*figures, Figure(f"status of {MANY:,}, ms", time_status(many) * 1000)]


@contextmanager
def outboxes(servers: ServerPool, number: int) -> Iterator[list[str]]:
    """Have so many databases, and Redis as the broker of this process's children."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(override_settings(CELERY_BROKER_URL=servers.redis.url))
        databases = Databases(servers, folder)
        yield [
            stack.enter_context(databases.alias(servers.database, folder)) for _ in range(number)
        ]


def measure_relays(
    redis: RedisServer, alias: str, row: Row, rounds: int, messages: int
) -> dict[str, list[float]]:
    """Return for each round the messages a second of a producer, of one relay, and of two."""
    rates: dict[str, list[float]] = {PRODUCER: [], RELAY: [], TWO_RELAYS: []}
    for _ in range(rounds):
        for name in random.sample(list(rates), len(rates)):
            processes = 2 if name == TWO_RELAYS else 1
            redis.flush()
            if name == PRODUCER:
                times = run_in_processes(send_directly, 1, messages, timeout=LONGEST)
            else:
                fill(alias, row, processes * (messages + WARM_UP), ALL_DUE)
                times = run_in_processes(relay_all, processes, alias, timeout=LONGEST)
            with redis.client() as queues:
                arrived = queues.llen(QUEUE)
            assert arrived == processes * (messages + WARM_UP), f"{name}: {arrived} arrived"
            began, ended = min(time[0] for time in times), max(time[1] for time in times)
            rates[name].append(processes * messages / (ended - began))
    return rates


def send_directly(messages: int) -> tuple[float, float]:
    """Send with one producer, as Celery's manual has it; return when that began and ended."""
    with current_app.producer_or_acquire() as producer:
        for number in range(-WARM_UP, messages):
            if number == 0:
                gc.collect()
                meet()
                began = time.monotonic()
            plain.apply_async((7,), producer=producer)
        return began, time.monotonic()


def relay_all(alias: str) -> tuple[float, float]:
    """Send what is in the outbox; return when that began and ended."""
    relay = Relay(alias)
    relay.housekeeping.take_turn_if_due()
    assert relay.relay_batch() == WARM_UP
    gc.collect()
    meet()
    began = time.monotonic()
    relay.drain()
    return began, time.monotonic()


def fill(alias: str, row: Row, rows: int, due_at: str) -> None:
    """Let the outbox hold so many copies of a row that was sent, and nothing else."""
    table = OutboxMessage._meta.db_table
    vendor = connections[alias].vendor
    now, hour, day, numbers = DIALECTS[vendor]
    due_at = due_at.format(now=now, hour=hour, day=day)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(f"TRUNCATE {table}")
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(row)}, created_at, due_at) "
            f"SELECT {', '.join(['%s'] * len(row))}, {now}, {due_at} "
            f"FROM {numbers.format(rows)}",
            list(row.values()),
        )
        # Autovacuum would do that.
        cursor.execute(f"ANALYZE {'TABLE' if vendor == 'mysql' else ''} {table}")


def a_row(alias: str) -> Row:
    """Return what a send through the outbox writes into a row, moments apart."""
    (row,) = run_in_processes(send_and_look, 1, alias)
    return dict(row)


def send_and_look(alias: str) -> Row:
    """Send through an empty outbox, return its row, and roll that back."""
    rows = OutboxMessage.objects.using(alias)
    with transaction.atomic(using=alias):
        send_on_commit(plain.s(7), using=alias, outbox=True)
        columns = {field.attname for field in OutboxMessage._meta.fields}
        row = rows.values(*columns - {"id", "created_at", "due_at"}).get()
        transaction.set_rollback(True, using=alias)
    return {**row, "body": bytes(row["body"])}


def measure_sends(alias: str, transactions: int, sends: int) -> tuple[list[Send], int]:
    """Return what sends took in each of so many transactions, and the queries of one."""

    def insert() -> None:
        Person.everyone.using(alias).create(email="someone@example.org")

    def on_commit() -> None:
        safe.apply_async_on_commit((7,), using=alias)

    def outbox() -> None:
        safe.apply_async_on_commit((7,), using=alias, outbox=True)

    candidates = (insert, on_commit, outbox)
    medians = []
    # The first transaction connects and compiles, and is not counted.
    for _ in range(transactions + 1):
        with rolled_back(alias):
            times: dict[Any, list[float]] = {candidate: [] for candidate in candidates}
            for _ in range(sends):
                for candidate in random.sample(candidates, len(candidates)):
                    began = time.perf_counter()
                    candidate()
                    times[candidate].append(time.perf_counter() - began)
        medians.append(Send(*(statistics.median(times[one]) * 1e6 for one in candidates)))
    with rolled_back(alias), CaptureQueriesContext(connections[alias]) as queries:
        outbox()
    return medians[1:], len(queries)


@contextmanager
def rolled_back(alias: str) -> Iterator[None]:
    """Have a transaction of which nothing is left, without collections of garbage."""
    gc.collect()
    gc.disable()
    try:
        with transaction.atomic(using=alias):
            yield
            transaction.set_rollback(True, using=alias)
    finally:
        gc.enable()


def measure_looks(
    few: str, many: str, rounds: int = 25, *, due: int = BATCH
) -> dict[str, list[float]]:
    """
    Return the µs of looks into a small outbox and into a large one, in each round.

    Args:
        due: How many messages each look finds.
    """

    def find(alias: str) -> list[OutboxMessage]:
        return list(OutboxMessage.objects.using(alias).due()[:BATCH])

    def claim(alias: str) -> list[OutboxMessage]:
        with transaction.atomic(using=alias):
            rows = OutboxMessage.objects.using(alias).claim(BATCH, LEASE + timedelta(days=2))
            transaction.set_rollback(True, using=alias)
        return rows

    assert [len(look(alias)) for look in (find, claim) for alias in (few, many)] == [due] * 4
    return interleaved(
        {
            "due(), few": lambda: find(few),
            "due(), many": lambda: find(many),
            "claim, few": lambda: claim(few),
            "claim, many": lambda: claim(many),
        },
        rounds,
    )


def time_status(alias: str) -> float:
    """Return the median time of ``celery_outbox status``, s."""
    times = []
    for _ in range(STATUS_CALLS):
        began = time.perf_counter()
        status_of(alias)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def figures_of_relays(rates: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Set the relays against the producer of the same round."""
    floor = f"{statistics.median(rates[PRODUCER]):,.0f} messages/s"
    return [
        Figure(f"{name} / {PRODUCER}", ratio(rates, name, PRODUCER), better="higher", note=note)
        for name, note in ((RELAY, f"floor: {floor}"), (TWO_RELAYS, "in two processes"))
    ] + [
        Figure(f"{name}: messages/s", statistics.median(values), better="higher", note="±15 %")
        for name, values in rates.items()
    ]


def figures_of_sends(sends: Sequence[Send], queries: int) -> list[Figure]:
    """Set what the outbox adds to a send against an INSERT of the same transaction."""
    median = Send(*map(statistics.median, zip(*sends, strict=True)))
    added = [(send.outbox - send.on_commit) / send.insert for send in sends]
    whole = [send.outbox / send.insert for send in sends]
    return [
        Figure(f"{OUTBOX}, added / {INSERT}", statistics.median(added), note="to an on-commit one"),
        Figure(f"{OUTBOX} / {INSERT}", statistics.median(whole), note="all of it"),
        Figure(f"queries of an {OUTBOX}", queries, note="in the transaction"),
        Figure(f"{INSERT}, µs", median.insert, note="floor, by the ORM"),
        Figure(f"{ON_COMMIT}, µs", median.on_commit, note="until the commit"),
        Figure(f"{OUTBOX}, µs", median.outbox, note="until the commit"),
    ]


def figures_of_looks(name: str, samples: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Set looks into the large outbox against those into the small one."""
    return [
        Figure(
            f"{look} at {MANY:,} / {FEW:,}, {name}",
            ratio(samples, f"{look}, many", f"{look}, few"),
            note=f"{statistics.median(samples[f'{look}, many']) / 1000:.1f} ms",
        )
        for look in ("due()", "claim")
    ]
