"""
The cost of a resumable loop over rows of PostgreSQL, as a ratio to one by hand.

The floor walks the rows by their key, 500 in a transaction, and writes to each; ours does the same
in a carried task, with the cursor in the row of its message. The peak of memory is that of
processes of which one walks a thousand rows and one a million.
"""

import resource
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from django.db import connections, transaction

from django_celery_safe import SafeTask, resumable
from tests.app.models import Person
from tests.benchmarks.report import Figure, ratio, take_turns
from tests.benchmarks.tools import analyze, databases, in_process
from tests.concurrency.mailbox import Mailbox
from tests.servers import ServerPool

#: Rows of a measurement, of a chunk, and how often each candidate is measured.
ROWS, EVERY, ROUNDS = 5_000, 500, 10

#: Rows that are walked with and without many others behind them.
FEW, MANY = 1_000, 1_000_000


BY_HAND, OURS = "by hand", "resumable"


def run(servers: ServerPool) -> list[Figure]:
    """Measure, each in a process of its own."""
    with databases(servers, None, None, None) as (alias, few, many):
        samples = in_process(measure, alias)
        peak_of_few = in_process(measure_memory, few, FEW)
        peak_of_many = in_process(measure_memory, many, MANY)
    row = sorted(samples[BY_HAND])[ROUNDS // 2] / ROWS
    return [
        Figure(f"{BY_HAND}, µs of CPU for a row", row, note=f"{EVERY} in a transaction"),
        Figure(f"{OURS} / {BY_HAND}", ratio(samples, OURS, BY_HAND), note="CPU"),
        Figure(f"peak of memory, {MANY:,} / {FEW:,} rows", peak_of_many / peak_of_few),
    ]


def fill(alias: str, rows: int) -> None:
    """Make rows."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "INSERT INTO app_person (email, is_welcome_email_sent, is_badge_printed, joined_at) "
            "SELECT 'someone@example.org', false, false, now() FROM generate_series(1, %s)",
            [rows],
        )
    analyze(alias, Person._meta.db_table)


def write(row: Any) -> None:
    """Write to a row."""
    row.save(update_fields=["is_badge_printed"])


def measure(alias: str) -> dict[str, list[float]]:
    """Let both walk all rows in turn; return the µs of CPU of each time."""
    fill(alias, ROWS)
    return take_turns(
        {BY_HAND: partial(walk_by_hand, alias), OURS: partial(walk, alias, write)}, ROUNDS
    )


def walk_by_hand(alias: str) -> float:
    """Write to each row, 500 in a transaction; return the µs of CPU."""
    began, people, last, rows = time.process_time(), Person.everyone.using(alias), 0, [None]
    while rows:
        with transaction.atomic(using=alias):
            rows = list(people.filter(pk__gt=last).order_by("pk")[:EVERY])  # type: ignore[arg-type]
            for row in rows:
                write(row)
                last = row.pk  # type: ignore[attr-defined]
    return (time.process_time() - began) * 1e6


def walk(alias: str, do: Callable[[Any], object]) -> float:
    """Do something with each row in a carried task; return the µs of CPU of its loop."""
    took: list[float] = []

    def body() -> None:
        began = time.process_time()
        for row in resumable(Person.everyone.using(alias), every=EVERY):
            do(row)
        took.append((time.process_time() - began) * 1e6)

    with closing(Mailbox()) as mailbox:
        task = mailbox.task(body, name=f"{__name__}.body", base=SafeTask, outbox="until_done")
        task.apply_async_on_commit(using=alias)
        outcome = mailbox.deliver(mailbox.take_one())
        assert outcome.state == "SUCCESS", outcome
    return took[0]


def measure_memory(alias: str, rows: int) -> int:
    """Return the most memory of a process that walks so many rows, in KiB."""
    fill(alias, rows)
    walk(alias, lambda row: None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
