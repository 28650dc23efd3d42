"""do_once among processes: one effect for each row, on every database."""

import os
import signal
import time
from pathlib import Path

import pytest
from django.db import DatabaseError, connections

from django_celery_safe import LockNotAcquired, WrongTransaction
from tests.app.models import Person
from tests.conftest import MakeDatabase
from tests.processes import Journal, run_in_processes, start_in_process, tell, wait_for

ROWS = 50


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize("kind", ["sqlite", "sqlite-immediate", "postgres"])
def test_one_effect_for_each_row(
    kind: str, guarantee: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """8 processes that do the same 50 rows have one effect for each, and no database error."""
    alias = make_database(kind)  # type: ignore[arg-type]
    Person.everyone.using(alias).bulk_create(Person(pk=pk) for pk in range(1, ROWS + 1))
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(do_all, 8, alias, guarantee, journal)
    assert journal.tally("pk", "effect") == dict.fromkeys(range(1, ROWS + 1), 1)
    done = Person.everyone.using(alias).filter(is_welcome_email_sent=True)
    assert done.count() == ROWS


def do_all(alias: str, guarantee: str, journal: Journal) -> None:
    """Have the effect for every row that was not done."""
    for pk in range(1, ROWS + 1):
        with Person.do_once(
            pk,
            "is_welcome_email_sent",
            using=alias,
            guarantee=guarantee,  # type: ignore[arg-type]
        ) as person:
            if person:
                journal.write("effect", pk=pk)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_killed_block_is_done_again(
    kind: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """A process killed inside its block leaves the row undone and free."""
    alias = make_database(kind)  # type: ignore[arg-type]
    Person.everyone.using(alias).create(pk=1)
    with start_in_process(stay_inside, alias) as process:
        process.receive()
        os.kill(process.pid, signal.SIGKILL)
        with Person.do_once(1, "is_welcome_email_sent", using=alias) as person:
            assert person is not None


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-immediate", "postgres"])
def test_nowait_says_at_once_that_the_row_is_taken(kind: str, make_database: MakeDatabase) -> None:
    """With nowait, a row that someone else has raises LockNotAcquired instead of waiting."""
    alias = make_database(kind)  # type: ignore[arg-type]
    Person.everyone.using(alias).create(pk=1)
    with start_in_process(stay_inside, alias) as process:
        process.receive()
        asked_at = time.monotonic()
        with (
            pytest.raises(LockNotAcquired, match="held by someone else"),
            Person.do_once(1, "is_welcome_email_sent", using=alias, nowait=True),
        ):
            pytest.fail("the block ran")
        assert time.monotonic() - asked_at < 2
    wait_for(lambda: _is_free(alias), 5, "the row stayed locked")


def test_nowait_mixes_up_no_other_error(postgres_alias: str) -> None:
    """With nowait, a database that can't answer is not taken for a row that is taken."""
    Person.everyone.using(postgres_alias).create(pk=1)
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute("ALTER TABLE app_person RENAME TO gone")
    with (
        pytest.raises(DatabaseError) as caught,
        Person.do_once(1, "is_welcome_email_sent", using=postgres_alias, nowait=True),
    ):
        pytest.fail("the block ran")
    assert not isinstance(caught.value, LockNotAcquired)


def test_without_autocommit_it_is_refused(postgres_alias: str) -> None:
    """With autocommit off the flag would not be committed when do_once ends."""
    connection = connections[postgres_alias]
    connection.set_autocommit(False)
    try:
        with (
            pytest.raises(WrongTransaction, match="autocommit is off"),
            Person.do_once(1, "is_welcome_email_sent", using=postgres_alias),
        ):
            pytest.fail("the block ran")
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def _is_free(alias: str) -> bool:
    try:
        with Person.do_once(1, "is_welcome_email_sent", using=alias, nowait=True):
            return True
    except LockNotAcquired:
        return False


def stay_inside(alias: str) -> None:
    """Enter the block and stay there until killed."""
    with Person.do_once(1, "is_welcome_email_sent", using=alias) as person:
        tell(person is not None)
        signal.pause()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_queries_are_few(kind: str, make_database: MakeDatabase) -> None:
    """A first time takes one read under lock and one write, a repeat no write of its own."""
    alias = make_database(kind)  # type: ignore[arg-type]
    Person.everyone.using(alias).create(pk=1)
    connection = connections[alias]
    counts = []
    for _ in range(2):
        connection.force_debug_cursor = True
        before = len(connection.queries_log)
        with Person.do_once(1, "is_welcome_email_sent", using=alias):
            pass
        statements = [entry["sql"] for entry in list(connection.queries_log)[before:]]
        counts.append(sum(sql.startswith(("SELECT", "UPDATE")) for sql in statements))
    connection.force_debug_cursor = False
    # SQLite takes its write lock by an UPDATE that changes nothing.
    assert counts == ([3, 2] if kind == "sqlite" else [2, 1])
