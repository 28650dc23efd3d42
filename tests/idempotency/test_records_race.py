"""idempotent among processes: one effect for each key, on every database."""

from collections import deque
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from celery import shared_task
from django.db import transaction

from django_celery_safe import AlreadyClaimed, idempotent
from django_celery_safe.databases import Now
from django_celery_safe.idempotency.records import record_table
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.idempotency.test_flags_race import raced
from tests.processes import Journal, run_in_processes

__all__ = ["raced"]

ROWS: Final = 48
DELIVERIES: Final = 3
#: The processes of a race.
RACERS: Final = 4

State = IdempotencyRecord.State


def once_in_a_block(number: int, alias: str, journal: Journal) -> Any:
    """Have the effect under the context manager."""
    with idempotent(f"invoice:{number}", using=alias) as claim:
        if claim:
            journal.write("effect", number=number)
            claim.finish(2 * number)
        return claim.result


def once_with_rows(number: int, alias: str, journal: Journal) -> Any:
    """Have the effect, a row, in the transaction that finishes the claim."""
    with idempotent(f"invoice:{number}", using=alias) as claim:
        if claim:
            journal.write("effect", number=number)
            with transaction.atomic(using=alias):
                Person.everyone.using(alias).create(email=f"{number}@example.org")
                claim.finish(2 * number)
        return claim.result


def once_in_a_task(number: int, alias: str, journal: Journal) -> Any:
    """Have the effect in a decorated task that is called directly."""

    @shared_task(name="tests.racing")
    @idempotent("{number}", using=alias)
    def racing(number: int) -> int:
        journal.write("effect", number=number)
        return 2 * number

    return racing(number)


#: A third of all things is done in each of these ways.
WAYS: Final = (once_in_a_block, once_with_rows, once_in_a_task)


@pytest.mark.sql
def test_one_effect_for_each_key(raced: str, tmp_path: Path) -> None:
    """Processes deliver each thing 3 times: one effect, and its result for everyone."""
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(deliver_all, RACERS, raced, journal, RACERS)
    assert journal.tally("number", "effect") == dict.fromkeys(range(ROWS), 1)
    records = IdempotencyRecord.objects.using(raced)
    assert records.count() == records.done().filter(claims=1).count() == ROWS
    assert Person.everyone.using(raced).count() == ROWS // len(WAYS)


def deliver_all(alias: str, journal: Journal, processes: int) -> None:
    """Deliver one share of all messages; one that meets another's claim comes back later."""
    # The deliveries of one key follow each other, so they go to processes that run in step.
    deliveries = [number for number in range(ROWS) for _ in range(DELIVERIES)]
    waiting = deque(deliveries[_take_seat(journal.path.parent) :: processes])
    while waiting:
        number = waiting.popleft()
        try:
            assert WAYS[number % len(WAYS)](number, alias, journal) == 2 * number
        except AlreadyClaimed:
            waiting.append(number)


def _take_seat(folder: Path) -> int:
    """Return a number from 0 that no other process has."""
    for seat in count():
        with suppress(FileExistsError):
            (folder / f"seat {seat}").mkdir()
            return seat
    raise AssertionError


@pytest.mark.sql
def test_a_record_that_is_free_has_one_claimer(raced: str, tmp_path: Path) -> None:
    """After a failure, an expiry or a death exactly one process does the work of each key."""
    long_ago = timedelta(minutes=1)
    free: list[dict[str, Any]] = [
        {"state": State.FAILED, "expires_at": Now() + timedelta(hours=1)},
        {"state": State.DONE, "expires_at": Now() - long_ago, "result": "1"},
        {"state": State.RUNNING},
    ]
    for number in range(ROWS):
        task = "tests.racing" if WAYS[number % len(WAYS)] is once_in_a_task else "invoice"
        IdempotencyRecord.objects.using(raced).create(
            key=f"{task}:{number}",
            token=f"old {number}",
            holder="{}",
            claimed_at=Now(),
            ends_at=Now() - long_ago,
            # Each state in each of the ways.
            **free[number // len(WAYS) % len(free)],
        )
    keys = IdempotencyRecord.objects.using(raced).values_list("key", flat=True)
    found = [record_table(raced).find(key) for key in keys]
    assert [row is not None and row.is_free for row in found] == [True] * ROWS
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(deliver_all, RACERS, raced, journal, RACERS)
    assert journal.tally("number", "effect") == dict.fromkeys(range(ROWS), 1)
    assert IdempotencyRecord.objects.using(raced).done().filter(claims=2).count() == ROWS
