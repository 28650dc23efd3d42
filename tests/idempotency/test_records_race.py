"""idempotent among processes: one effect for each key, on every database."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from celery import shared_task
from django.db import transaction
from django.db.models.functions import Now

from django_celery_safe import AlreadyClaimed, idempotent
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.conftest import MakeDatabase
from tests.processes import Journal, run_in_processes

ROWS: Final = 50
DELIVERIES: Final = 3
PROCESSES: Final = 8

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


@pytest.mark.parametrize("way", [once_in_a_block, once_with_rows, once_in_a_task])
@pytest.mark.parametrize("kind", ["sqlite", "sqlite-immediate", "postgres"])
def test_one_effect_for_each_key(
    kind: Any, way: Callable[..., Any], make_database: MakeDatabase, tmp_path: Path
) -> None:
    """8 processes deliver 50 things 3 times each: one effect, and its result for everyone."""
    alias = make_database(kind)
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(deliver_all, PROCESSES, alias, journal, way.__name__)
    assert journal.tally("number", "effect") == dict.fromkeys(range(ROWS), 1)
    records = IdempotencyRecord.objects.using(alias)
    assert records.count() == records.done().filter(claims=1).count() == ROWS
    if way is once_with_rows:
        assert Person.everyone.using(alias).count() == ROWS


def deliver_all(alias: str, journal: Journal, way: str) -> None:
    """Deliver one share of everything; what somebody else does comes back later."""
    # Those of one thing follow each other, and so go to processes that run in step.
    deliveries = [number for number in range(ROWS) for _ in range(DELIVERIES)]
    waiting = deque(deliveries[_take_seat(journal.path.parent) :: PROCESSES])
    while waiting:
        number = waiting.popleft()
        try:
            assert globals()[way](number, alias, journal) == 2 * number
        except AlreadyClaimed:
            waiting.append(number)


def _take_seat(folder: Path) -> int:
    """Return a number from 0 that no other process has."""
    for seat in count():
        with suppress(FileExistsError):
            (folder / f"seat {seat}").mkdir()
            return seat
    raise AssertionError


@pytest.mark.parametrize("state", ["failed", "expired", "gone"])
@pytest.mark.parametrize("kind", ["sqlite", "sqlite-immediate", "postgres"])
def test_a_record_that_is_free_has_one_claimer(
    kind: Any, state: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """Of 8 who come after a failure, an expiry or a death, one does it, for each key."""
    alias = make_database(kind)
    long_ago = timedelta(minutes=1)
    free = {
        "failed": {"state": State.FAILED, "expires_at": Now() + long_ago},
        "expired": {"state": State.DONE, "expires_at": Now() - long_ago, "result": "1"},
        "gone": {"state": State.RUNNING},
    }[state]
    for number in range(ROWS):
        IdempotencyRecord.objects.using(alias).create(
            key=f"invoice:{number}",
            token=f"old {number}",
            holder="{}",
            claimed_at=Now(),
            ends_at=Now() - long_ago,
            **free,
        )
    assert IdempotencyRecord.objects.using(alias).free().count() == ROWS
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(deliver_all, PROCESSES, alias, journal, once_in_a_block.__name__)
    assert journal.tally("number", "effect") == dict.fromkeys(range(ROWS), 1)
    assert IdempotencyRecord.objects.using(alias).done().filter(claims=2).count() == ROWS
