"""
The cost of `do_once`, on PostgreSQL and on SQLite.

The floor of ``do_once`` is the same done by hand: SELECT … FOR UPDATE, UPDATE, COMMIT, with the
ORM. That of the first run of an idempotent task is the INSERT and the UPDATE of one record. The
blocks and tasks do nothing, so all that is measured is what is around them.
"""

import statistics
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from celery import shared_task
from django.db import transaction
from django.utils import timezone

from django_celery_safe import idempotent
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.benchmarks.report import Figure, medians_of, ratio, take_turns
from tests.benchmarks.tools import analyze, count_queries, databases, deliver, in_process
from tests.servers import ServerPool

#: The database, which the task has to know before there is one.
ALIAS = "once"

#: Rounds, and how many calls of each candidate are in one.
ROUNDS, CALLS = 40, 75


FLAG = "is_welcome_email_sent"

BY_HAND, DO_ONCE = "by hand", "do_once"
RECORD, FIRST_RUN = "INSERT + UPDATE", "first run"


@shared_task(ignore_result=True)
@idempotent(using=ALIAS)
def charge(number: int) -> dict[str, int]:
    """Do nothing, and have a result."""
    return {"charge": number}


def run(servers: ServerPool) -> list[Figure]:
    """Measure in a process whose Celery app is new."""
    with databases(servers, ALIAS):
        return in_process(measure)


def measure() -> list[Figure]:
    """Measure everything, and set ours against the floors of the same round."""
    number = (ROUNDS + 1) * CALLS * 2
    rows, records = Person.everyone.using(ALIAS), IdempotencyRecord.objects.using(ALIAS)
    rows.bulk_create(Person() for _ in range(number))
    analyze(ALIAS, Person._meta.db_table)
    pks = iter(rows.values_list("pk", flat=True))
    firsts = measure_firsts({BY_HAND: do_by_hand, DO_ONCE: do_with_ours}, pks)
    assert not rows.filter(**{FLAG: False}).exists(), "a row was not done"
    runs = measure_firsts({RECORD: add_and_update, FIRST_RUN: charge}, count())
    done = records.done().count()
    assert done == number, f"{done} records are done"
    # The same message twice: the work is done before it is repeated.
    message = partial(deliver, charge, -1, {"id": str(uuid.uuid4())})
    first_run, repeat = (count_queries(ALIAS, message) for _ in range(2))
    return [
        Figure(f"{BY_HAND}, µs", statistics.median(firsts[BY_HAND])),
        Figure(f"{DO_ONCE} / {BY_HAND}", ratio(firsts, DO_ONCE, BY_HAND)),
        Figure(f"{RECORD}, µs", statistics.median(runs[RECORD]), note="of a record, by the ORM"),
        Figure(f"{FIRST_RUN} / {RECORD}", ratio(runs, FIRST_RUN, RECORD), note="idempotent"),
        Figure(f"queries of a {FIRST_RUN}", first_run, note="with BEGIN and COMMIT"),
        Figure("queries of a repeat", repeat, note="of a message"),
    ]


def do_by_hand(pk: Any) -> None:
    """Do what a project would write itself."""
    with transaction.atomic(using=ALIAS):
        row = Person.everyone.using(ALIAS).select_for_update().get(pk=pk)
        if not row.is_welcome_email_sent:
            Person.everyone.using(ALIAS).filter(pk=pk).update(is_welcome_email_sent=True)


def do_with_ours(pk: Any) -> None:
    """Do the same with ``do_once``."""
    with Person.do_once(pk, FLAG, using=ALIAS) as row:
        assert row


def add_and_update(number: int) -> None:
    """Note that a work is begun, and that it is done: the least that survives a crash."""
    records = IdempotencyRecord.objects.using(ALIAS)
    now, key = timezone.now(), f"by hand:{number}"
    records.create(
        key=key, state="running", token=uuid.uuid4().hex, ends_at=now, holder="", claimed_at=now
    )
    records.filter(key=key).update(state="done", result="{}", ended_at=timezone.now())


def measure_firsts(
    candidates: Mapping[str, Callable[[Any], object]], numbers: Iterator[Any]
) -> dict[str, list[float]]:
    """
    Measure side by side what can be done once for each number.

    Returns:
        For each candidate the median µs of a call in each round.
    """
    calls = {
        name: lambda call=call: call(next(numbers))  # type: ignore[misc]
        for name, call in candidates.items()
    }
    rounds = take_turns({"all": partial(medians_of, calls, CALLS)}, ROUNDS)["all"]
    return {name: [one[name] for one in rounds] for name in candidates}
