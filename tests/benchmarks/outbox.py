"""
The outbox on PostgreSQL + Redis: what a send costs its transaction, and how fast relays are.

The floor of the relays is a process that sends the same message with ``apply_async`` and
one producer; that of a send is the INSERT of one row of a small model, in the same
transaction. The relays' rows are copies, made by SQL, of a row that was really sent.
"""

import gc
import statistics
import time
from datetime import timedelta
from functools import partial
from typing import Any

from celery import current_app, shared_task
from django.db import connections, transaction
from django.test import override_settings

from django_celery_safe import SafeTask, send_on_commit
from django_celery_safe.inspection.overview import outbox_figures
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import BATCH, LEASE, Relay
from tests.app.models import Person
from tests.benchmarks.report import Figure, interleaved, medians_of, ratio, seconds_of, take_turns
from tests.benchmarks.tools import LONGEST, count_queries, databases, in_process, insert_copies
from tests.processes import meet, run_in_processes
from tests.sending.conftest import rolled_back
from tests.servers import RedisServer, ServerPool

#: Rounds of relaying, and how many messages each process sends in one.
ROUNDS, MESSAGES = 12, 5000

#: Messages that each process sends before it is measured, to be connected.
WARM_UP = BATCH

#: Transactions in which sends are measured, and how many of each kind are in one.
TRANSACTIONS, SENDS = 40, 50

#: Rows of the outboxes in which is looked, and how many are due where most are not.
MANY, FEW, SOME_DUE = 1_000_000, 1000, 2 * BATCH


PRODUCER, RELAY, TWO_RELAYS = "one producer", "relay", "two relays"
INSERT, ON_COMMIT, OUTBOX = "INSERT", "on-commit send", "outbox send"

#: When rows are due, as SQL of their number.
ALL_DUE = "now() - random() * interval '1 hour'"
MOST_LATER = f"CASE WHEN number <= {SOME_DUE} THEN now() ELSE now() + interval '1 day' END"
MIXTURES = {"all due": ALL_DUE, "few due": MOST_LATER}


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task(base=SafeTask)
def safe(number: int) -> None:
    """Do nothing."""


#: Columns of a row by name.
Row = dict[str, Any]


def run(servers: ServerPool) -> list[Figure]:
    """Measure relays, sends and looks for what is due, in processes whose Celery app is new."""
    redis = servers.redis  # the broker of this process's children
    with (
        override_settings(CELERY_BROKER_URL=redis.url),
        databases(servers, None, None, None) as (alias, few, many),
    ):
        (row,) = run_in_processes(send_and_look, 1, alias)
        rate = partial(rate_of_relays, redis, alias, row)
        producer = partial(rate_of_producer, redis)
        rates = take_turns(
            {PRODUCER: producer, RELAY: partial(rate, 1), TWO_RELAYS: partial(rate, 2)}, ROUNDS
        )
        floor = f"floor: {statistics.median(rates[PRODUCER]):,.0f} messages/s"
        figures = [
            Figure(f"{name} / {PRODUCER}", ratio(rates, name, PRODUCER), better="higher", note=note)
            for name, note in ((RELAY, floor), (TWO_RELAYS, "in two processes"))
        ]
        figures += [
            Figure(f"{name}: messages/s", statistics.median(values), better="higher", note="±15 %")
            for name, values in rates.items()
        ]
        figures += in_process(measure_sends, alias)
        for name, due_at in MIXTURES.items():
            fill(few, row, FEW, due_at)
            fill(many, row, MANY, due_at)
            figures += measure_looks(name, few, many)
        status = statistics.median(seconds_of(partial(outbox_figures, many)) for _ in range(5))
        return [*figures, Figure(f"status of {MANY:,}, ms", status * 1000)]


def rate_of_relays(redis: RedisServer, alias: str, row: Row, relays: int) -> float:
    """Return the messages a second of so many relays on one outbox."""
    redis.flush()
    fill(alias, row, relays * (MESSAGES + WARM_UP), ALL_DUE)
    times = run_in_processes(relay_all, relays, alias, timeout=LONGEST)
    return rate_in(redis, times)


def rate_of_producer(redis: RedisServer) -> float:
    """Return the messages a second of one producer."""
    redis.flush()
    return rate_in(redis, run_in_processes(send_directly, 1, timeout=LONGEST))


def rate_in(redis: RedisServer, times: list[tuple[float, float]]) -> float:
    """Return the messages a second of processes that began and ended at these times."""
    with redis.client() as queues:
        arrived = queues.llen("celery")
    assert arrived == len(times) * (MESSAGES + WARM_UP), f"{arrived} arrived"
    seconds = max(ended for _, ended in times) - min(began for began, _ in times)
    return len(times) * MESSAGES / seconds


def send_directly() -> tuple[float, float]:
    """Send with one producer, as Celery's manual has it; return when that began and ended."""
    with current_app.producer_or_acquire() as producer:
        for number in range(-WARM_UP, MESSAGES):
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
    moments = {"created_at": "now()", "due_at": due_at}
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(f"TRUNCATE {OutboxMessage._meta.db_table}")
        insert_copies(alias, OutboxMessage, row, moments, f"generate_series(1, {rows}) AS number")


def send_and_look(alias: str) -> Row:
    """Send through an empty outbox, return its row, and roll that back."""
    with rolled_back(alias):
        send_on_commit(plain.s(7), using=alias, outbox=True)
        return read_row(alias)


def read_row(alias: str) -> Row:
    """Return the only row of the outbox, without its moments."""
    columns = {field.attname for field in OutboxMessage._meta.fields}
    row = OutboxMessage.objects.using(alias).values(*columns - {"id", "created_at", "due_at"}).get()
    return {**row, "body": bytes(row["body"])}


def measure_sends(alias: str) -> list[Figure]:
    """Set what the outbox adds to a send against an INSERT of the same transaction."""
    candidates = {
        INSERT: lambda: Person.everyone.using(alias).create(email="someone@example.org"),
        ON_COMMIT: lambda: safe.apply_async_on_commit((7,), using=alias),
        OUTBOX: lambda: safe.apply_async_on_commit((7,), using=alias, outbox=True),
    }

    def send() -> dict[str, float]:
        with rolled_back(alias):
            return medians_of(candidates, SENDS)

    sends = take_turns({"sends": send}, TRANSACTIONS)["sends"]
    with rolled_back(alias):
        queries = count_queries(alias, candidates[OUTBOX])
    added = statistics.median((one[OUTBOX] - one[ON_COMMIT]) / one[INSERT] for one in sends)
    whole = statistics.median(one[OUTBOX] / one[INSERT] for one in sends)
    until = "until the commit"
    notes = {INSERT: "floor, by the ORM", ON_COMMIT: until, OUTBOX: until}
    return [
        Figure(f"{OUTBOX}, added / {INSERT}", added, note="to an on-commit one"),
        Figure(f"{OUTBOX} / {INSERT}", whole, note="all of it"),
        Figure(f"queries of an {OUTBOX}", queries, note="in the transaction"),
        *[
            Figure(f"{name}, µs", statistics.median(one[name] for one in sends), note=note)
            for name, note in notes.items()
        ],
    ]


def measure_looks(name: str, few: str, many: str, *, due: int = BATCH) -> list[Figure]:
    """
    Set looks into a large outbox against those into a small one.

    Args:
        due: How many messages each look finds.
    """

    def find(alias: str) -> list[OutboxMessage]:
        return list(OutboxMessage.objects.using(alias).due()[:BATCH])

    def claim(alias: str) -> list[OutboxMessage]:
        with rolled_back(alias):
            return OutboxMessage.objects.using(alias).claim(
                BATCH, LEASE + timedelta(days=2), "benchmark"
            )

    figures = []
    for look, call in (("due()", find), ("claim", claim)):
        assert [len(call(alias)) for alias in (few, many)] == [due] * 2
        samples = interleaved({"few": partial(call, few), "many": partial(call, many)})
        note = f"{statistics.median(samples['many']) / 1000:.1f} ms"
        value = ratio(samples, "many", "few")
        figures.append(Figure(f"{look} at {MANY:,} / {FEW:,}, {name}", value, note=note))
    return figures
