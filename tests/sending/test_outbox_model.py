"""The table of the outbox: its states, the steps between them, and what two never both get."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from model_bakery import baker
from pytest_django import Settings

from django_celery_safe import databases
from django_celery_safe.databases import Now
from django_celery_safe.leases.lease import Renewal
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.outbox import NOT_REACHED, Next, message_table
from tests.plans import plan_of
from tests.processes import start_in_process, tell, wait_for
from tests.sending.conftest import TABLE, table

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
#: The claim of a relay.
TOKEN = "c" * 32


def make(alias: str, number: int = 1, state: str = "pending", **moments: timedelta) -> list[int]:
    """Make equal rows with these moments, from now by the database's clock; return their keys."""
    same = {"state": state, "due_at": None}
    made = baker.make(OutboxMessage, number, _using=alias, _bulk_create=True, **same)
    keys = [row.pk for row in made]
    table(alias).filter(pk__in=keys).update(
        **{name: Now() + delta for name, delta in moments.items()}
    )
    return keys


def keys(rows: Any) -> list[int]:
    """Return the keys of rows, in their order."""
    return [row.pk for row in rows]


def due_in(alias: str, key: int) -> float | None:
    """Return in how many seconds a row is due, by the database's clock."""
    row: Any = table(alias).annotate(asked_at=Now()).get(pk=key)
    return None if row.due_at is None else float((row.due_at - row.asked_at).total_seconds())


def in_about(seconds: float) -> Any:
    """Return what is equal to this many seconds, less what a slow test takes."""
    return pytest.approx(seconds - 2, abs=2.1)


def one_of_each(alias: str) -> dict[str, int]:
    """Make a row in each state; return their keys."""
    (late,), (early,) = make(alias, due_at=-MINUTE), make(alias, due_at=-2 * MINUTE)
    (waiting,) = make(alias, due_at=MINUTE)
    (dead,) = make(alias, state="dead", ended_at=-MINUTE)
    (sent,) = make(alias, state="sent", sent_at=-MINUTE)
    return {"late": late, "early": early, "waiting": waiting, "dead": dead, "sent": sent}


# States.


@pytest.mark.sql
def test_each_row_is_in_one_state(alias: str) -> None:
    """Due are those whose time has come, whatever their state, with the longest wait first."""
    row, rows = one_of_each(alias), table(alias)
    # Of carried tasks.
    (row["carried"],) = make(alias, state="sent", sent_at=-MINUTE, due_at=MINUTE)
    (row["running"],) = make(alias, state="running", due_at=MINUTE)
    for state in ("done", "failed"):
        (row[state],) = make(alias, state=state, ended_at=-MINUTE)
    states = {
        "pending": {"late", "early", "waiting"},
        "sent": {"sent", "carried"},
        **{state: {state} for state in ("running", "done", "failed", "dead")},
    }
    for state, names in states.items():
        found = list(getattr(rows, state)())
        assert {one.pk for one in found} == {row[name] for name in names}
        assert {one.state for one in found} == {state}
    assert keys(rows.due()) == [row["early"], row["late"]]
    assert set(keys(rows.given_up())) == {row["dead"], row["failed"]}
    kept = {row["sent"], row["running"], row["done"]}
    assert set(keys(rows.discardable())) == set(row.values()) - kept
    for found, name in ((rows.sent_before, "sent"), (rows.done().ended_before, "done")):
        assert (keys(found(SECOND)), keys(found(2 * MINUTE))) == ([row[name]], [])
    assert keys(rows.failed().ended_before(SECOND)) == [row["failed"]]
    assert keys(rows.failed().ended_before(2 * MINUTE)) == []


# Claiming.


@pytest.mark.sql
def test_claimed_rows_are_due_when_the_lease_is_over(alias: str) -> None:
    """Until then nobody gets them; then anybody does, and whoever claimed them had not to act."""
    row = one_of_each(alias)
    others = table(alias).exclude(pk__in=[row["early"], row["late"]]).order_by("pk")
    before = list(others.values())
    assert keys(table(alias).claim(10, MINUTE, TOKEN)) == [row["early"], row["late"]]
    assert list(others.values()) == before
    assert due_in(alias, row["late"]) == in_about(60)
    assert keys(table(alias).claim(10, MINUTE, TOKEN)) == []
    table(alias).filter(pk=row["late"]).update(due_at=Now() - SECOND)
    assert keys(table(alias).claim(10, MINUTE, TOKEN)) == [row["late"]]


@pytest.mark.sql
def test_a_claim_takes_no_more_than_fits_into_memory(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the row that would be too much; a row that is too large comes alone."""
    monkeypatch.setattr(databases, "BATCH_BYTES", 3 * 1024 * 1024)
    made = [make(alias, due_at=(number - 10) * SECOND)[0] for number in range(4)]
    for key, megabytes in zip(made, (1, 1, 4, 1), strict=True):
        table(alias).filter(pk=key).update(body=bytes(megabytes * 1024 * 1024))
    first, second, huge, last = made
    claims = [table(alias).claim(100, MINUTE, TOKEN) for _ in range(4)]
    assert [keys(rows) for rows in claims] == [[first, second], [huge], [last], []]
    assert [len(row.body) for row in claims[0]] == [1024 * 1024] * 2
    assert table(alias).due().count() == 0


@pytest.mark.sql
def test_a_claim_that_begins_later_passes_by_what_was_due_before(alias: str) -> None:
    """It takes rows from that moment on, and each says when it was due."""
    early, late = make(alias, due_at=-2 * MINUTE)[0], make(alias, due_at=-MINUTE)[0]
    since = table(alias).get(pk=late).due_at
    (row,) = table(alias).claim(100, MINUTE, TOKEN, since=since)
    assert (row.pk, row.due_at) == (late, since)
    assert keys(table(alias).claim(100, MINUTE, TOKEN)) == [early]


def claim_and_wait(alias: str) -> None:
    """Claim two rows in a transaction that does not end."""
    with transaction.atomic(using=alias):
        tell(keys(table(alias).claim(2, MINUTE, TOKEN)))
        threading.Event().wait()


def test_a_claim_does_not_wait_for_another(postgres_alias: str) -> None:
    """Rows that another transaction is claiming are skipped, and free when it is killed."""
    made = make(postgres_alias, 5, due_at=-SECOND)
    with start_in_process(claim_and_wait, postgres_alias) as other:
        assert other.receive() == made[:2]
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
        assert keys(table(postgres_alias).claim(100, MINUTE, TOKEN)) == made[2:]
        other.kill()
        assert keys(wait_for(lambda: table(postgres_alias).claim(100, MINUTE, TOKEN))) == made[:2]


# Steps.


@pytest.mark.sql
def test_what_is_given_back_is_due_again(alias: str) -> None:
    """At once or after a delay, with the error or without; what others have is left alone."""
    row = one_of_each(alias)
    everything, outbox = table(alias), message_table(alias)
    pending = [row["early"], row["late"], row["waiting"]]
    everything.filter(pk__in=pending).update(token=TOKEN)
    outbox.record_sent("another's", dict.fromkeys(pending, NOT_REACHED))
    outbox.record_sent(TOKEN, dict.fromkeys([row["early"], row["dead"]], NOT_REACHED))
    # It was due before "late", and is now due after it.
    assert keys(everything.due()) == [row["late"], row["early"]]
    outbox.record_sent(TOKEN, dict.fromkeys(pending, Next(60.0, "give_back", "refused\0")))
    assert keys(everything.due()) == [row["early"]]  # it was not claimed any more
    assert due_in(alias, row["waiting"]) == in_about(60)
    assert [one.error for one in everything.order_by("pk") if one.error] == ["refused\ufffd"] * 2
    assert {one.attempts for one in everything.all()} == {0}
    # Whoever dies between the two has only those sent again that were not sent.
    with CaptureQueriesContext(connections[alias]) as statements:
        outbox.record_sent("another's", {row["early"]: NOT_REACHED, row["late"]: Next(None)})
    assert [one["sql"].split()[0] for one in statements] == ["DELETE", "UPDATE"]


@pytest.mark.sql
def test_what_was_sent_ends(alias: str, settings: Settings) -> None:
    """It is deleted, kept, or carried on, in one statement however many keys there are."""
    row = one_of_each(alias)
    everything, outbox = table(alias), message_table(alias)
    everything.filter(pk__in=[row["early"], row["late"]]).update(token=TOKEN, error="refused")
    outbox.record_sent(
        TOKEN, {row["late"]: Next(60.0), row["dead"]: Next(None), row["waiting"]: Next(None)}
    )
    assert due_in(alias, row["late"]) == in_about(60)
    assert set(keys(everything.sent())) == {row["late"], row["sent"]}
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": 60}}
    outbox.record_sent(TOKEN, {row["early"]: Next(None)})
    kept = everything.get(pk=row["early"])
    assert (kept.state, kept.due_at, kept.ended_at, kept.error) == ("sent", None, None, "")
    settings.DJANGO_CELERY_SAFE = {}
    everything.update(token=TOKEN)
    outbox.record_sent(
        TOKEN, dict.fromkeys([*row.values(), *range(10**6, 10**6 + 5000)], Next(None))
    )
    assert keys(everything.all()) == []


@pytest.mark.sql
def test_leases_are_renewed_together(alias: str) -> None:
    """By two statements for any number; what a transaction has locked is left out, and not lost."""
    made, connection = make(alias, 50, state="running", due_at=SECOND), connections[alias]
    for key in made:
        table(alias).filter(pk=key).update(attempt=f"a{key}", token=f"t{key}")
    made += make(alias, state="running", due_at=SECOND)  # an INSERT that was repeated
    table(alias).filter(pk=made[-1]).update(attempt=f"a{made[0]}", token=f"t{made[0]}")
    renewals = [Renewal(f"a{key}", f"t{key}", 60.0) for key in [*made[:50], 10**6]]
    with CaptureQueriesContext(connection) as queries:
        assert message_table(alias).extend(renewals[:-1]) == [True] * 50
    words = [one["sql"].split()[0] for one in queries if TABLE in one["sql"]]
    assert words[-2:] == ["SELECT", "UPDATE"]  # SQLite takes its one lock before
    assert all(due_in(alias, key) == in_about(60) for key in made)
    other, locks = connection.copy(), connection.features.has_select_for_update
    if locks:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(f"SELECT id FROM {TABLE} WHERE id = {made[49]} FOR UPDATE")
    last = None if locks else True
    assert message_table(alias).extend(renewals) == [*[True] * 49, last, False]
    other.close()


@pytest.mark.sql
def test_fail_backs_off_and_then_sets_aside(alias: str) -> None:
    """Due after 5 s, twice that each time, 10 minutes at most; the last attempt is its death."""
    (key,) = make(alias, due_at=-SECOND)
    delays = []
    for number in range(1, 10):
        (row,) = table(alias).all()
        assert row.fail(f"error {number}", attempts=10) is False
        delays.append(due_in(alias, key))
        (row,) = table(alias).all()
        assert (row.attempts, row.error, row.ended_at) == (number, f"error {number}", None)
    assert delays == [in_about(n) for n in (5, 10, 20, 40, 80, 160, 320, 600, 600)]
    assert row.fail("the last", attempts=10) is True
    (row,) = table(alias).dead()
    assert (row.attempts, row.error, row.due_at) == (10, "the last", None)
    assert not table(alias).pending().exists()


def test_revive(alias: str) -> None:
    """The dead, and those that wait, are due now with all attempts before them; sent ones not."""
    row = one_of_each(alias)
    everything = table(alias)
    everything.filter(pk__in=[row["dead"], row["waiting"]]).update(attempts=9, error="why")
    assert everything.dead().revive() == 1
    assert keys(everything.due()) == [row["early"], row["late"], row["dead"]]
    assert everything.filter(pk__in=[row["waiting"], row["sent"]]).revive() == 1
    assert set(keys(everything.due())) == set(row.values()) - {row["sent"]}
    assert {one.attempts for one in everything.all()} == {0}
    assert keys(everything.sent()) == [row["sent"]]


# Speed.


@pytest.mark.sql
def test_states_are_found_by_an_index(alias: str) -> None:
    """Among many rows they are not searched for, nor sorted."""
    make(alias, 20, due_at=-SECOND)
    make(alias, 20, state="dead", ended_at=-SECOND)
    make(alias, 20, state="sent", sent_at=-timedelta(days=9))
    make(alias, 1500, state="sent", sent_at=-SECOND)
    make(alias, 1500, state="done", ended_at=-SECOND)
    make(alias, 1500, due_at=MINUTE)
    table(alias).update(attempt="a")  # as if each were carried, under its own task id
    for rows, index in (
        (table(alias).due()[:100], "safe_outbox_due"),
        (table(alias).dead(), "safe_outbox_dead"),
        (table(alias).sent_before(timedelta(days=8)), "safe_outbox_sent"),
        (table(alias).carried("17"), "safe_outbox_task_id"),
    ):
        plan = plan_of(rows)
        partial = connections[alias].features.supports_partial_indexes
        assert (index if partial else "safe_") in plan
        for slow in ("Seq Scan", "Sort", "TEMP B-TREE"):
            assert slow not in plan
