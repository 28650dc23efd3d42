"""Claims on real databases: their commits, renewals and races, and what is forgotten."""

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any, Final

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe import forget_record, idempotent
from django_celery_safe.databases import Now
from django_celery_safe.events import CLAIM_FAILED
from django_celery_safe.exceptions import AlreadyClaimed, ClaimLost, WrongTransaction
from django_celery_safe.idempotency.records import RecordTable, record_table
from django_celery_safe.leases.holder import Holder, encode_holder, plain_name
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.signals import claim_lost
from tests.app.models import Person
from tests.background import elsewhere
from tests.conftest import MakeDatabase
from tests.processes import wait_for
from tests.routing import AllIn
from tests.sending.conftest import hearing
from tests.servers.databases import until_somebody_waits
from tests.statements import at_statement

KEY: Final = "invoice:1"
#: A lease whose renewal a test can await, s.
LEASE: Final = 3


def record_of(alias: str, key: str = KEY) -> Any:
    """Return the record of a key, with the database's time as ``now``."""
    return IdempotencyRecord.objects.using(alias).annotate(now=Now()).get(key=key)


def result_of_repeat(alias: str | None = None) -> Any:
    """Return what a repeat gets."""
    with idempotent(KEY, using=alias) as claim:
        assert not claim
        return claim.result


def do(key: str = KEY, **options: Any) -> bool:
    """Do the work of a key in a block; return whether it was not done already."""
    with idempotent(key, **options) as claim:
        return bool(claim)


def enter(key: str = KEY, **options: Any) -> None:
    """Enter a block that must not run."""
    with idempotent(key=key, **options):
        pytest.fail("the block ran")


# The body's own transaction.


@pytest.mark.sql
def test_finish_commits_with_the_body(alias: str) -> None:
    """In atomic() the body's rows and the record are there together, and not before."""
    with idempotent(KEY, using=alias) as claim:
        with transaction.atomic(using=alias):
            Person.everyone.using(alias).create(pk=1)
            claim.finish("stored")
        assert record_of(alias).state == IdempotencyRecord.State.DONE
    assert Person.everyone.using(alias).count() == 1
    assert result_of_repeat(alias) == "stored"


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_rollback_that_is_hidden_is_an_error(savepoint: bool, alias: str) -> None:
    """If the error does not leave the block, nobody would know that it counts as not done."""
    outer = transaction.atomic(using=alias) if savepoint else nullcontext()
    with (
        hearing(CLAIM_FAILED) as failures,
        pytest.raises(WrongTransaction, match="was rolled back, so it counts as not done"),
        idempotent(KEY, using=alias) as claim,
        outer,
        suppress(ZeroDivisionError),
        transaction.atomic(using=alias),
    ):
        Person.everyone.using(alias).create(pk=1)
        claim.finish("stored")
        raise ZeroDivisionError
    assert len(failures) == 1
    assert record_of(alias).state == IdempotencyRecord.State.FAILED
    assert not Person.everyone.using(alias).exists()
    assert do(using=alias)


def test_a_claim_whose_record_is_gone_rolls_the_body_back(alias: str) -> None:
    """ClaimLost leaves atomic(), so what the body wrote there is not written twice."""
    with (
        pytest.raises(ClaimLost),
        idempotent(KEY, using=alias) as claim,
        transaction.atomic(using=alias),
    ):
        Person.everyone.using(alias).create(pk=1)
        IdempotencyRecord.objects.using(alias).all().delete()
        with pytest.raises(ClaimLost):
            claim.ensure()
        claim.finish("stored")
    assert not Person.everyone.using(alias).exists()


def test_a_transaction_elsewhere_decides_nothing(alias: str, make_database: MakeDatabase) -> None:
    """In atomic() of another database it is finished at once, whatever becomes of that."""
    other = make_database("sqlite")
    with (
        pytest.raises(ValueError, match="no"),
        transaction.atomic(using=other),
        idempotent(KEY, using=alias) as claim,
    ):
        claim.finish("stored")
        raise ValueError("no")
    assert result_of_repeat(alias) == "stored"


def test_inside_a_transaction_it_is_refused(alias: str) -> None:
    """In atomic() nobody else would see the claim; nothing is done, and nothing noted."""

    with transaction.atomic(using=alias):
        with pytest.raises(WrongTransaction, match="inside a transaction"):
            enter(using=alias)
        with pytest.raises(WrongTransaction):
            idempotent(using=alias)(enter)()
    assert not IdempotencyRecord.objects.using(alias).exists()


def test_records_are_where_the_router_writes(
    make_database: MakeDatabase, settings: Settings
) -> None:
    """With a router that reads from a replica, claims look at the writer, and ``using`` wins."""
    writer, replica = make_database("sqlite"), make_database("sqlite")
    settings.DATABASE_ROUTERS = [AllIn(writer, replica)]
    with idempotent(KEY) as claim:
        claim.finish(1)
    assert result_of_repeat() == 1
    assert do(using=replica)
    for alias in (writer, replica):
        assert IdempotencyRecord.objects.using(alias).count() == 1


# Renewal.


def test_long_work_keeps_its_claim(alias: str) -> None:
    """The lease is renewed for as long as the block runs."""
    with idempotent(KEY, using=alias, timeout=LEASE) as claim:
        first: datetime = record_of(alias).ends_at
        wait_for(lambda: record_of(alias).ends_at > first, 30, "it was not renewed")
        claim.finish(1)
    assert result_of_repeat(alias) == 1


def test_a_renewal_that_comes_as_the_work_is_done_loses_nothing(
    alias: str, make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that finds the record done, before its holder could tell it, reports no loss."""
    other = make_database("sqlite")
    looked = threading.Event()
    peek = RecordTable.peek

    def watched(self: RecordTable, name: str) -> Any:
        found = peek(self, name)
        if threading.current_thread().name == "django_celery_safe leases":
            looked.set()
        return found

    monkeypatch.setattr(RecordTable, "peek", watched)
    with hearing(CLAIM_FAILED, claim_lost) as told, idempotent("other", using=other, timeout=LEASE):
        with idempotent(KEY, using=alias, timeout=LEASE) as claim:
            with at_statement(alias, "UPDATE", lambda: wait_for(looked.is_set, 60), after=True):
                claim.finish("stored")
            # The thread goes on when all that it had to say of the first is said.
            first: datetime = record_of(other, "other").ends_at
            wait_for(lambda: record_of(other, "other").ends_at > first, 30)
        assert told == []
    assert result_of_repeat(alias) == "stored"


def test_a_long_transaction_holds_up_no_other_lease(
    postgres_alias: str, make_database: MakeDatabase
) -> None:
    """While a transaction has finished a claim and is open, other claims are renewed."""
    other = make_database("sqlite")
    with (
        idempotent("other", using=other, timeout=LEASE) as bystander,
        idempotent(KEY, using=postgres_alias, timeout=LEASE) as claim,
        transaction.atomic(using=postgres_alias),
    ):
        claim.finish("stored")
        for _ in range(2):
            before: datetime = record_of(other, "other").ends_at
            wait_for(lambda: record_of(other, "other").ends_at > before, 30)  # noqa: B023
        bystander.ensure()
    assert result_of_repeat(postgres_alias) == "stored"


@pytest.mark.parametrize("ttl", [None, timedelta(days=1)])
def test_a_record_expires_its_ttl_after_its_end(ttl: timedelta | None, alias: str) -> None:
    """A record that is done expires when its ttl has passed since its end, or never."""
    assert do(using=alias, ttl=ttl)
    record = record_of(alias)
    expected = None if ttl is None else record.ended_at + ttl
    assert (record.state, record.expires_at) == (IdempotencyRecord.State.DONE, expected)


def test_queries_are_few(alias: str) -> None:
    """The work takes a look, a claim and an end, with no BEGIN, also after a failure."""
    counts = []
    connections[alias].ensure_connection()
    for number in range(2):
        with (
            suppress(ValueError),
            CaptureQueriesContext(connections[alias]) as queries,
            idempotent(KEY, using=alias),
        ):
            raise ValueError(number)
        asked = [query["sql"].split()[0] for query in queries.captured_queries]
        counts.append([word for word in asked if word != "PRAGMA"])
    assert counts == [["SELECT", "INSERT", "UPDATE"], ["SELECT", "UPDATE", "UPDATE"]]


# Changes between the look at the record and the claim.

#: The token of the first process.
FIRST: Final = "0123456789abcdef" * 2
SECOND: Final = FIRST[::-1]
LONG: Final = timedelta(minutes=1)


def begin(alias: str, key: str = KEY, lease: timedelta = LONG, **holder: Any) -> None:
    """Let a first process claim a key; with a negative lease it has died in the work."""
    facts = {"holder": encode_holder(key, Holder("web1", 42, **holder)), "digest": ""}
    facts |= {"token": FIRST, "lease": lease.total_seconds()}
    assert record_table(alias).execute("add_record", key, **facts)


def finish(alias: str, key: str = KEY) -> None:
    """Let the first finish after all."""
    end(alias, key, FIRST, state="done", result='"stored"', error="", cursor="")


def follow(alias: str) -> None:
    """Let a second claim it."""
    facts = {"token": SECOND, "holder": "{}", "digest": "", "lease": LONG.total_seconds()}
    assert record_table(alias).execute("claim_record", KEY, **facts)


def follow_and_fail(alias: str) -> None:
    """Let a second claim it, and fail."""
    follow(alias)
    end(alias, KEY, SECOND, state="failed", result="", error="no", cursor=None)


def end(alias: str, key: str, token: str, **values: Any) -> None:
    """Let a claim end."""
    values |= {"token": token, "keep": LONG.total_seconds()}
    assert record_table(alias).execute("end_record", key, **values)


def begin_and_finish(alias: str) -> None:
    """Let the first do it before us."""
    begin(alias)
    finish(alias)


def delete(alias: str) -> None:
    """Let somebody delete the record."""
    IdempotencyRecord.objects.using(alias).all().delete()


@pytest.mark.parametrize(
    ("step", "ending"),
    [
        (finish, "stored"), (follow, "claimed"), (follow_and_fail, 3), (delete, 1),
        (begin, "claimed"), (begin_and_finish, "stored"),
    ],
)  # fmt: skip
@pytest.mark.sql
def test_a_step_of_another_comes_first(
    step: Callable[[str], None], ending: Any, alias: str
) -> None:
    """A claim decides by the record's newest state, even if another changes it after our look."""
    is_new = step in (begin, begin_and_finish)
    if not is_new:
        begin(alias, lease=-LONG)

    def come_first() -> None:
        elsewhere(alias, step, alias).result()

    with at_statement(alias, "INSERT" if is_new else "UPDATE", come_first, times=1) as met:
        if ending == "claimed":
            with pytest.raises(AlreadyClaimed):
                enter(using=alias)
        elif ending == "stored":
            assert result_of_repeat(alias) == "stored"
        else:
            assert do(using=alias)
            assert record_of(alias).claims == ending
    assert met


# Forgetting.


@pytest.mark.parametrize("key", ["mail:1", "an order of größe", "x" * 300])
def test_forgotten_work_is_done_again(
    alias: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record goes, which is logged with the whole key; other records stay."""
    caplog.set_level(logging.INFO, "django_celery_safe.record_forgotten")
    assert do(key, using=alias)
    assert do("mail:2", using=alias)
    assert forget_record(plain_name(key), using=alias)
    assert not forget_record(key, using=alias)
    assert [do(key, using=alias), do("mail:2", using=alias)] == [True, False]
    assert forget_record(key, using=alias)
    assert [vars(record)["safe_key"] for record in caplog.records] == [key, key]


def test_work_that_runs_is_not_forgotten(alias: str) -> None:
    """Its process is named; work whose process died is forgotten."""
    begin(alias, task="shop.tasks.charge", task_id="6f1c")
    with pytest.raises(AlreadyClaimed, match=r"done by task 6f1c .* in process 42 on web1"):
        forget_record(KEY, using=alias)
    assert record_table(alias).find(KEY) is not None
    begin(alias, "mail:2", -LONG)
    assert forget_record("mail:2", using=alias)


@pytest.mark.sql
def test_a_claim_that_commits_meanwhile_is_safe(postgres_alias: str) -> None:
    """The DELETE waits for a claim that is not committed, and leaves its record."""
    begin(postgres_alias, lease=-LONG)
    with transaction.atomic(using=postgres_alias):
        follow(postgres_alias)
        forgotten = elsewhere(postgres_alias, forget_record, KEY, using=postgres_alias)
        until_somebody_waits(postgres_alias)
    with pytest.raises(AlreadyClaimed):
        forgotten.result()
    assert record_of(postgres_alias).token == SECOND
