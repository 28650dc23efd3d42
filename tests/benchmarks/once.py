"""
What it costs to do a thing once: ``do_once`` and ``idempotent``, and their repeats.

The floor of ``do_once`` is its transaction written by hand with Django's ORM: lock the row,
look at the flag, set it, commit. That of a first run of an idempotent task is the INSERT and
the UPDATE of one record; that of a repeat is one query of a record by its primary key. The
blocks and tasks do nothing, so all that is measured is what is around them.
"""

import gc
import json
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from celery import shared_task
from celery.app.trace import build_tracer
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_celery_safe import idempotent
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.processes import start_in_process
from tests.servers import ServerPool
from tests.servers.databases import Databases

#: The PostgreSQL database, which the task has to know before there is one.
ALIAS = "once"

#: Rounds, and how many calls of each candidate are in one.
ROUNDS, CALLS = 40, 75

#: Seconds until all is measured, at the most.
LONGEST = 300

FLAG = "is_welcome_email_sent"

#: Arguments that no new call has: those of the repeats, and those of a message.
REPEATED, DELIVERED = -1, -2

BY_HAND, DO_ONCE, READ = "by hand", "do_once", "bare read"
BY_KEY, REPEAT = "query by key", "repeat"
RECORD, FIRST_RUN = "INSERT + UPDATE", "first run"


@shared_task(ignore_result=True)
@idempotent(using=ALIAS)
def charge(number: int) -> dict[str, int]:
    """Do nothing, and have a result."""
    return {"charge": number}


#: For each candidate the µs of a call in each round.
Samples = Mapping[str, Sequence[float]]
Candidates = Mapping[str, Callable[[Any], object]]


class Measured(NamedTuple):
    """The figures of a measurement."""

    #: ``do_once`` of rows that are not done, on PostgreSQL and on SQLite, and of one that is.
    firsts: Samples
    sqlite: Samples
    done: Samples
    #: Runs of the task for new calls, and for one that is done; the queries of each.
    runs: Samples
    repeats: Samples
    run_queries: int
    repeat_queries: int


def run(servers: ServerPool) -> list[Figure]:
    """Measure on PostgreSQL and on SQLite, in a process whose Celery app is new."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        databases = Databases(servers, folder)
        with (
            databases.alias(servers.database, folder, ALIAS),
            databases.alias("sqlite-immediate", folder) as sqlite,
            start_in_process(measure, sqlite, ROUNDS, CALLS) as measuring,
        ):
            return figures_of(measuring.result(LONGEST))


def measure(sqlite: str, rounds: int, calls: int) -> Measured:
    """Measure everything; all but ``do_once`` on SQLite in the database ``ALIAS``."""
    # Arguments are evaluated in order: the work is done before it is repeated.
    return Measured(
        firsts=measure_firsts(ALIAS, rounds, calls),
        sqlite=measure_firsts(sqlite, rounds, calls),
        done=measure_done(ALIAS, rounds),
        runs=measure_runs(rounds, calls),
        repeats=measure_repeats(rounds),
        run_queries=count_queries(ALIAS, lambda: deliver(DELIVERED)),
        repeat_queries=count_queries(ALIAS, lambda: deliver(DELIVERED)),
    )


def measure_firsts(alias: str, rounds: int, calls: int) -> dict[str, list[float]]:
    """Do something once for each of many rows, by hand and with ``do_once``."""
    candidates = {BY_HAND: by_hand(alias), DO_ONCE: do_once(alias)}
    Person.everyone.using(alias).bulk_create(
        Person() for _ in range((rounds + 1) * calls * len(candidates))
    )
    with connections[alias].cursor() as cursor:
        # Autovacuum would do that.
        table = Person._meta.db_table
        mysql = connections[alias].vendor == "mysql"
        cursor.execute(f"ANALYZE TABLE {table}" if mysql else "ANALYZE")
    rows = Person.everyone.using(alias)
    samples = interleaved_firsts(candidates, iter(rows.values_list("pk", flat=True)), rounds, calls)
    assert not rows.filter(**{FLAG: False}).exists(), "a row was not done"
    return samples


def by_hand(alias: str) -> Callable[[Any], object]:
    """Return what a project would write itself."""

    def do_by_hand(pk: Any) -> None:
        with transaction.atomic(using=alias):
            row = Person.everyone.using(alias).select_for_update().get(pk=pk)
            if not row.is_welcome_email_sent:
                Person.everyone.using(alias).filter(pk=pk).update(is_welcome_email_sent=True)

    return do_by_hand


def do_once(alias: str) -> Callable[[Any], object]:
    """Return the same with ``do_once``."""

    def do_with_ours(pk: Any) -> None:
        with Person.do_once(pk, FLAG, using=alias) as row:
            if row:
                pass

    return do_with_ours


def measure_done(alias: str, rounds: int) -> dict[str, list[float]]:
    """Look at a row that is done: without a lock, by hand, and with ``do_once``."""
    rows = Person.everyone.using(alias)
    pk = rows.filter(**{FLAG: True}).values_list("pk", flat=True)[0]
    hand, ours = by_hand(alias), do_once(alias)
    return interleaved(
        {READ: lambda: rows.get(pk=pk), BY_HAND: lambda: hand(pk), DO_ONCE: lambda: ours(pk)},
        rounds,
    )


def measure_runs(rounds: int, calls: int) -> dict[str, list[float]]:
    """Run the task for new calls, and write records as it does by hand."""
    candidates: Candidates = {RECORD: add_and_update, FIRST_RUN: charge}
    samples = interleaved_firsts(candidates, count(), rounds, calls)
    done = IdempotencyRecord.objects.using(ALIAS).done().count()
    assert done == (rounds + 1) * calls * len(candidates), f"{done} records are done"
    return samples


def add_and_update(number: int) -> None:
    """Note that a work is begun, and that it is done: the least that survives a crash."""
    records = IdempotencyRecord.objects.using(ALIAS)
    now, key = timezone.now(), f"by hand:{number}"
    records.create(
        key=key, state="running", token=uuid.uuid4().hex, ends_at=now, holder="", claimed_at=now
    )
    records.filter(key=key).update(state="done", result="{}", ended_at=timezone.now())


def measure_repeats(rounds: int) -> dict[str, list[float]]:
    """Run the task for a call that is done, and query its record."""
    charge(REPEATED)
    records = IdempotencyRecord.objects.using(ALIAS)
    record = records.filter(key__startswith=charge.name).latest("claimed_at")
    assert record.result == json.dumps(charge(REPEATED))
    samples = interleaved(
        {BY_KEY: lambda: records.get(pk=record.pk), REPEAT: lambda: charge(REPEATED)}, rounds
    )
    assert records.get(pk=record.pk).claims == 1, "a repeat ran"
    return samples


def deliver(number: int) -> str:
    """Run the task for a message, as a worker does; return the message's id."""
    task_id = str(uuid.uuid4())
    trace = build_tracer(charge.name, charge, app=charge.app, propagate=True)
    trace(task_id, [number], {}, {"id": task_id, "delivery_info": {}})
    return task_id


def count_queries(alias: str, call: Callable[[], object]) -> int:
    """Return how many queries a call makes; BEGIN and COMMIT count."""
    with CaptureQueriesContext(connections[alias]) as queries:
        call()
    return len(queries)


def interleaved_firsts(
    candidates: Candidates, numbers: Iterator[Any], rounds: int, calls: int
) -> dict[str, list[float]]:
    """
    Measure side by side what can be done once for each number.

    Each round calls each candidate so many times, in turn, each time with a number of its
    own. Garbage is collected between rounds, not inside.

    Returns:
        For each candidate the median µs of a call in each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    # The first round connects and compiles, and is not counted.
    for counted in range(rounds + 1):
        times: dict[str, list[float]] = {name: [] for name in candidates}
        gc.collect()
        gc.disable()
        try:
            for _ in range(calls):
                for name in random.sample(list(candidates), len(candidates)):
                    call, number = candidates[name], next(numbers)
                    began = time.perf_counter()
                    call(number)
                    times[name].append(time.perf_counter() - began)
        finally:
            gc.enable()
        for name in candidates if counted else ():
            samples[name].append(statistics.median(times[name]) * 1e6)
    return samples


def figures_of(measured: Measured) -> list[Figure]:
    """Set ours against the floors of the same round."""
    firsts, sqlite, done, runs, repeats = measured[:5]
    return [
        Figure(f"{BY_HAND}, µs", statistics.median(firsts[BY_HAND]), note="PostgreSQL"),
        Figure(f"{DO_ONCE} / {BY_HAND}", ratio(firsts, DO_ONCE, BY_HAND), note="PostgreSQL"),
        Figure(f"{BY_HAND}, SQLite, µs", statistics.median(sqlite[BY_HAND]), note="IMMEDIATE"),
        Figure(
            f"{DO_ONCE} / {BY_HAND}, SQLite",
            ratio(sqlite, DO_ONCE, BY_HAND),
            note="ours: one UPDATE more",
        ),
        Figure(f"done: {DO_ONCE} / {BY_HAND}", ratio(done, DO_ONCE, BY_HAND), note="both lock"),
        Figure(f"done: {DO_ONCE} / {READ}", ratio(done, DO_ONCE, READ), note="without a lock"),
        Figure(f"{RECORD}, µs", statistics.median(runs[RECORD]), note="of a record, by the ORM"),
        Figure(f"{FIRST_RUN} / {RECORD}", ratio(runs, FIRST_RUN, RECORD), note="idempotent"),
        Figure(f"queries of a {FIRST_RUN}", measured.run_queries, note="with BEGIN and COMMIT"),
        Figure(f"{BY_KEY}, µs", statistics.median(repeats[BY_KEY]), note="of a record, by the ORM"),
        Figure(f"{REPEAT} / {BY_KEY}", ratio(repeats, REPEAT, BY_KEY), note="idempotent"),
        Figure(f"queries of a {REPEAT}", measured.repeat_queries, note="of a message"),
    ]
