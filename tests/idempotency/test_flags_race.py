"""do_once among processes: one effect for each row, on every database."""

import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.models import QuerySet
from django.db.transaction import Atomic

from django_celery_safe import IdempotentMixin, LockNotAcquired, WrongTransaction, transactions
from django_celery_safe.idempotency.flags import _Once
from tests.app.models import Account, Customer, Person
from tests.background import elsewhere
from tests.conftest import MakeDatabase
from tests.idempotency.test_flags import FLAG, enter, row_for
from tests.interruption import Interruption
from tests.processes import (
    FunctionProcess,
    Journal,
    run_in_processes,
    start_in_process,
    tell,
    wait_for,
)
from tests.servers import PostgresServer
from tests.servers.databases import DatabaseKind, until_somebody_waits, without_autocommit

PKS = range(1, 21)
#: How long SQLite waits for its turn, s: it lets waiters in by chance, not in order.
LONGEST_WAIT = 120


@pytest.fixture
def raced(make_database: MakeDatabase, db_kind: DatabaseKind) -> str:
    """
    The alias of a database for a race, at MariaDB's own level of isolation.

    Its waiters don't give up on a busy machine.
    """
    alias = make_database("mariadb-repeatable" if db_kind == "mariadb" else db_kind)
    if db_kind.startswith("sqlite"):
        connections.settings[alias]["OPTIONS"]["timeout"] = LONGEST_WAIT
    return alias


@pytest.mark.sql
@pytest.mark.parametrize(
    ("model", "flag", "guarantee"),
    [
        (Person, FLAG, "at_least_once"),
        (Person, FLAG, "at_most_once"),
        (Customer, FLAG, "at_least_once"),
        (Customer, "is_invoiced", "at_least_once"),
    ],
)
def test_one_effect_for_each_row(
    model: Any, flag: str, guarantee: str, raced: str, tmp_path: Path
) -> None:
    """Of processes that do the same, one does each row; a parent's table may have the flag."""
    rows = QuerySet(model, using=raced)
    for pk in PKS:
        rows.create(pk=pk)
    journal = Journal(tmp_path / "effects.jsonl")
    run_in_processes(do_all, 4, raced, journal, PKS, guarantee, model, flag)
    assert journal.tally("pk", "effect") == dict.fromkeys(PKS, 1)
    assert rows.filter(**{flag: True}).count() == len(PKS)


def do_all(
    alias: str,
    journal: Journal,
    pks: Sequence[int],
    guarantee: Any,
    model: type[IdempotentMixin] = Person,
    flag: str = FLAG,
) -> None:
    """Have the effect for every row that was not done."""
    for pk in pks:
        with model.do_once(pk, flag, using=alias, guarantee=guarantee) as row:
            if row:
                journal.write("effect", pk=pk)


def test_rows_that_refer_to_the_row_are_added_while_the_block_runs(postgres_alias: str) -> None:
    """On PostgreSQL an order of a customer waits for no block that mails the customer."""
    account = Account.objects.using(postgres_alias).create()

    def refer() -> int:
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute("SET lock_timeout = '30s'")
        Customer(account_ptr_id=account.pk).save_base(raw=True, using=postgres_alias)
        return Customer.objects.using(postgres_alias).count()

    with Account.do_once(account.pk, FLAG, using=postgres_alias) as row:
        assert row == account
        assert elsewhere(postgres_alias, refer).result() == 1
    assert Account.objects.using(postgres_alias).get().is_welcome_email_sent


@pytest.mark.sql
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_a_killed_block_is_done_again(guarantee: str, db_alias: str) -> None:
    """
    A process killed in its block leaves the row free, and undone unless it is at most once.

    Under at_most_once the row, and on SQLite the database, is free while the block runs, too.
    """
    with staying_inside(db_alias, guarantee) as process:
        if guarantee == "at_most_once":
            assert row_for(Person, 1, "is_badge_printed", using=db_alias, nowait=True) is not None
        process.kill()
        assert (row_for(Person, 1, using=db_alias) is None) is (guarantee == "at_most_once")


@pytest.mark.sql
def test_nowait_says_at_once_that_the_row_is_taken(raced: str) -> None:
    """With nowait, a row that someone else has raises LockNotAcquired instead of waiting."""
    with staying_inside(raced):
        asked_at = time.monotonic()
        for flag in (FLAG, "is_badge_printed"):
            with pytest.raises(LockNotAcquired, match="held by someone else"):
                enter(Person, 1, flag, using=raced, nowait=True)
        assert time.monotonic() - asked_at < LONGEST_WAIT / 2
    wait_for(lambda: _is_free(raced), 30, "the row stayed locked")


def test_nowait_mixes_up_no_other_error(postgres_alias: str) -> None:
    """With nowait, a database that can't answer is not taken for a row that is taken."""
    Person.everyone.using(postgres_alias).create(pk=1)
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute("ALTER TABLE app_person RENAME TO gone")
    with pytest.raises(DatabaseError, match="app_person"):
        enter(Person, 1, using=postgres_alias, nowait=True)


def test_without_autocommit_it_is_refused(postgres_alias: str) -> None:
    """With autocommit off the flag would not be committed when do_once ends."""
    with (
        without_autocommit(postgres_alias),
        pytest.raises(WrongTransaction, match="autocommit off"),
    ):
        enter(Person, 1, using=postgres_alias)


def _is_free(alias: str) -> bool:
    with suppress(LockNotAcquired):
        row_for(Person, 1, using=alias, nowait=True)
        return True
    return False


def stay_inside(alias: str, guarantee: Any, model: type[IdempotentMixin] = Person) -> None:
    """Enter the block and stay there until killed."""
    with model.do_once(1, FLAG, using=alias, guarantee=guarantee) as row:
        tell(row is not None)
        signal.pause()


@contextmanager
def staying_inside(alias: str, guarantee: Any = "at_least_once") -> Iterator[FunctionProcess]:
    """Have another process inside the block for person 1."""
    Person.everyone.using(alias).create(pk=1)
    with start_in_process(stay_inside, alias, guarantee) as process:
        process.receive()
        yield process


def test_a_connection_that_breaks_in_the_block_leaves_it_undone(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """If the server ends the session meanwhile, the flag is unset and the caller is told."""
    Person.everyone.using(postgres_alias).create(pk=1)
    with pytest.raises(DatabaseError), Person.do_once(1, FLAG, using=postgres_alias):
        end_sessions(postgres_server, postgres_alias)
    connections[postgres_alias].close()
    assert row_for(Person, 1, using=postgres_alias) is not None


def end_sessions(server: PostgresServer, alias: str) -> None:
    """Let the server end every session of a database, as a failover does."""
    with server.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
            [connections.settings[alias]["NAME"]],
        )


@pytest.mark.sql
@pytest.mark.parametrize(("inside", "other"), [(Customer, Account), (Account, Customer)])
def test_the_rows_of_one_object_are_locked_together(
    inside: type[Account], other: type[Account], db_alias: str
) -> None:
    """With multi-table inheritance parent and child wait for each other."""
    Customer.objects.using(db_alias).create(pk=1)
    with start_in_process(stay_inside, db_alias, "at_least_once", inside) as process:
        process.receive()
        with pytest.raises(LockNotAcquired):
            enter(other, 1, using=db_alias, nowait=True)


@pytest.mark.parametrize(
    ("guarantee", "level"), [("at_least_once", "REPEATABLE_READ"), ("at_most_once", "SERIALIZABLE")]
)
def test_stricter_isolation_makes_no_error_of_a_wait(
    guarantee: Any, level: str, postgres_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for another, however long, finds the work done at each isolation level."""
    now = [0.0]
    monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    isolate(postgres_alias, level)
    Person.everyone.using(postgres_alias).create(pk=1)
    options = {"using": postgres_alias, "guarantee": guarantee}
    with Person.do_once(1, FLAG, using=postgres_alias):
        second = elsewhere(postgres_alias, row_for, Person, 1, **options)
        until_somebody_waits(postgres_alias)
        now[0] += 3600
    assert second.result() is None


def test_what_serializable_refuses_at_the_commit_begins_again(
    postgres_alias: str, tmp_path: Path
) -> None:
    """Under at_most_once also a commit that fails for the rows of others is no error."""
    isolate(postgres_alias, "SERIALIZABLE")
    Person.everyone.using(postgres_alias).bulk_create(Person(pk=pk) for pk in PKS)
    journal = Journal(tmp_path / "effects.jsonl")

    def do(seed: int) -> None:
        # Each in an order of its own.
        do_all(postgres_alias, journal, Random(seed).sample(PKS, len(PKS)), "at_most_once")

    for doing in [elsewhere(postgres_alias, do, seed) for seed in range(4)]:
        doing.result()
    assert journal.tally("pk", "effect") == dict.fromkeys(PKS, 1)


def test_a_snapshot_that_is_too_old_is_explained(postgres_alias: str) -> None:
    """Inside atomic() only its owner can begin again, and is told so, under Django's own class."""
    isolate(postgres_alias, "REPEATABLE_READ")
    Person.everyone.using(postgres_alias).create(pk=1)
    with (
        pytest.raises(OperationalError, match="run that block again") as caught,
        transaction.atomic(using=postgres_alias),
    ):
        assert Person.everyone.using(postgres_alias).exists()  # the snapshot is made
        other = elsewhere(postgres_alias, row_for, Person, 1, using=postgres_alias)
        assert other.result() is not None
        enter(Person, 1, using=postgres_alias, durable=False)
    assert getattr(caught.value.__cause__, "sqlstate", None) == "40001"


def isolate(alias: str, level: str) -> None:
    """Give a PostgreSQL database a level of isolation, as a project does."""
    from psycopg import IsolationLevel

    connections.settings[alias]["OPTIONS"]["isolation_level"] = IsolationLevel[level]
    connections[alias].close()
    del connections[alias]


@pytest.mark.parametrize(
    ("guarantee", "nowait"), [("at_least_once", False), ("at_most_once", True)]
)
def test_a_soft_time_limit_leaves_no_transaction_open(
    guarantee: Any, nowait: bool, sqlite_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever call of do_once's it hits: else the worker's next task would be inside it."""
    # Some hit as a generator is closed, where Python has nobody to raise them to.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    methods: list[Any] = [_Once.at_least_once, _Once.at_most_once]
    inside = {method.__wrapped__.__code__ for method in methods}
    places = []
    for number in range(1, 1000):
        Person.everyone.using(sqlite_alias).create(pk=number)
        # A limit that hits as Django begins to end a transaction is Django's.
        interruption = Interruption(number, inside, others=True, spared={Atomic.__exit__.__code__})
        with suppress(SoftTimeLimitExceeded):
            do = Person.do_once(
                number, "is_badge_printed", using=sqlite_alias, guarantee=guarantee, nowait=nowait
            )
            with interruption.watching(), do:
                pass
        assert not connections[sqlite_alias].in_atomic_block, interruption.place
        if not interruption.place:
            break
        places.append(interruption.place)
    gc.collect()
    assert len(places) > 20
