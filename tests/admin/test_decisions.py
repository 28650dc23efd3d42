"""Decisions when rows, stores or the log have changed since the question."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections

from django_celery_safe import events, find_lock, signals
from django_celery_safe.admin.pages import MOST_ROWS
from django_celery_safe.databases import Now
from django_celery_safe.locks.stores import locate
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.cases import CASES, Case
from tests.admin.conftest import every_page
from tests.admin.pages import Visitor
from tests.admin.rows import HOLDER, hold
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS
from tests.listening import handling
from tests.locks.conftest import fragile_redis
from tests.sending.conftest import hearing
from tests.servers import RedisServer

__all__ = ["fragile_redis"]

#: One whose lease nobody renews.
IDLE: Final = HOLDER._replace(renewed=False)

#: What the page says of the one row that is not as it was shown.
CHANGED: Final = "1 of 1 rows ended or changed after they were shown."
SOON: Final = Now() + rows.timedelta(seconds=60)

#: A token that nobody has.
TOKEN: Final = "0" * 32

#: The events of decisions about rows.
ROW_EVENTS: Final = (
    *(events.MESSAGE_RETRIED, events.MESSAGE_DISCARDED, events.RECORD_FORGOTTEN),
    *(events.RUN_RESUMED, signals.run_ended),
)


def release(name: str) -> None:
    """Free a lock, as its holder does."""
    held = find_lock(name)
    assert held is not None
    assert locate().store().release(name, held.token, held.remaining)


def selected(page: Any) -> list[str]:
    """Return what a list has to select; it must have something."""
    assert page.selections
    chosen: list[str] = page.selections
    return chosen


# Effects


def test_a_renewed_lock(root: Visitor) -> None:
    """A lock that is renewed is released only when the box says so."""
    hold("late", HOLDER._replace(lease=10_000.0))
    (told,) = root.confirm(LOCKS, "release", *selected(root.get(LOCKS))).messages
    assert "and not since, so it may be dead" in told
    hold("feed")
    selection = selected(root.get(LOCKS, q="feed"))
    assert root.take(LOCKS, "release", *selection).root.find("input", name="forced")
    (told,) = root.confirm(LOCKS, "release", *selection).messages
    assert told.startswith("The lock feed stays: pid 42 on web1 renewed it ")
    assert find_lock("feed") is not None
    assert LogEntry.objects.count() == 0
    root.confirm(LOCKS, "release", *selection, forced="1")
    assert find_lock("feed") is None


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.decision)
def test_a_decision_about_a_row(root: Visitor, case: Case) -> None:
    """It changes or deletes the row, and a log and a signal tell of it: all of these, or none."""
    model: Any = case.model
    pk, selection = case.make()
    row = model.objects.get(pk=pk)
    url, decision = every_page(model, pk)["list"], case.decision
    before, messages = columns(row), OutboxMessage.objects.count()
    root.client.raise_request_exception = False
    with broken_log(), hearing(*ROW_EVENTS) as heard:
        assert root.confirm(url, decision, selection).status == 500
    assert (columns(row), OutboxMessage.objects.count(), heard) == (before, messages, [])
    with hearing(*ROW_EVENTS) as heard:
        (told,) = root.confirm(url, decision, selection).messages
    assert told.startswith("1 ")
    entry = LogEntry.objects.get()
    assert (entry.object_id, len(heard)) == (selection, 1)
    rows_left = model.objects.filter(pk=pk)
    if decision in {"discard", "forget"}:
        assert not rows_left.exists()
        assert (entry.action_flag, entry.object_repr) == (DELETION, str(row))
    else:
        assert entry.action_flag == CHANGE
        row.refresh_from_db()
        assert ((row.state if decision == "retry" else row.status), entry.change_message[:13]) == {
            "retry": ("pending", "Was made due:"),
            "resume": (Status.RUNNING, "Was resumed: "),
            "abort": (Status.ABORTED, "Was aborted: "),
        }[decision]
    rows_left.delete()
    assert root.confirm(url, decision, selection).messages == [CHANGED]
    assert "The selected rows no longer exist." in root.take(url, decision, selection).content


def test_a_record_that_is_worked_on(root: Visitor) -> None:
    """It is forgotten only when the box says so; a claim after the question is left alone."""
    row = rows.record("paid:7", "running", rows.LEASE)
    (told,) = root.confirm(RECORDS, "forget", row.pk).messages
    assert "paid:7 stays: it is being worked on (id-1, pid 42 on web1)" in told
    asked = root.take(RECORDS, "forget", row.pk)
    (versions,) = asked.root.find("input", type="hidden", name="versions")
    IdempotencyRecord.objects.filter(pk=row.pk).update(token="f" * 32, state="done")
    told = root.confirm(RECORDS, "forget", row.pk, versions=versions.attributes["value"])
    assert told.messages == [CHANGED]
    assert (IdempotencyRecord.objects.get(), LogEntry.objects.count()) == (row, 0)
    root.confirm(RECORDS, "forget", row.pk, forced="1")
    assert not IdempotencyRecord.objects.exists()


def test_selections_that_are_none(root: Visitor) -> None:
    """A decision about nothing says what to do; a form value of no held lock releases nothing."""
    hold("feed", IDLE)
    for decision, selection in (("release", []), ("", selected(root.get(LOCKS)))):
        page = root.take(LOCKS, decision, *selection)
        told = root.get(page.response["Location"]).messages
        assert told == ["Select locks, and what to do."]
    for garbage in (
        *("", "x", TOKEN, f"{TOKEN}7", f'{TOKEN}""', f'{TOKEN}"feed"', f'{TOKEN[1:]}"feed"'),
        *('"feed"', TOKEN + "[" * 100_000),
    ):
        root.take(LOCKS, "release", garbage, confirmed="1", forced="1")
    assert find_lock("feed") is not None
    assert LogEntry.objects.count() == 0


# Changes meanwhile


def test_a_lock_that_changed_hands(root: Visitor) -> None:
    """
    A lock that someone else took after it was shown is left alone, forced or not.

    The other of the two is released, which the log tells.
    """
    hold("feed", IDLE)
    hold("mail", IDLE)
    both = selected(root.get(LOCKS))
    selection = [each for each in both if "feed" in each]
    release("feed")
    token = hold("feed", IDLE)
    for forced in ({}, {"forced": "1"}):
        assert root.confirm(LOCKS, "release", *selection, **forced).messages == [CHANGED]
    assert "The selected rows no longer exist." in root.take(LOCKS, "release", *selection).content
    with hearing(events.LOCK_FREED) as heard:
        told = root.confirm(LOCKS, "release", *both)
    assert told.messages == ["1 lock was released.", CHANGED.replace("1 of 1", "1 of 2")]
    assert [event["name"] for event in heard] == ["mail"]
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id, entry.object_repr) == (CHANGE, "mail", "mail")
    held = find_lock("feed")
    assert held is not None
    assert held.token == token


def columns(row: Any) -> dict[str, Any]:
    """Return a row as it is in the database."""
    found: dict[str, Any] = type(row)._default_manager.filter(pk=row.pk).values().get()
    return found


def test_a_row_that_changed(root: Visitor) -> None:
    """A decision that no longer fits is refused with the reason, and changes and logs nothing."""
    run = rows.end(rows.begin(2), Status.FAILED)
    for url, decision, row, changed, values, said in [
        (OUTBOX, "retry", rows.leave_dead(), None, {"dead_at": None, "sent_at": Now()}, "was sent"),
        (
            RUNS,
            "resume",
            run,
            run.steps.last(),
            {"status": "running", "ends_at": SOON},
            "still runs",
        ),
        (RUNS, "abort", rows.begin(1), None, {"status": "aborted"}, "Can't abort"),
    ]:
        asked = root.take(url, decision, row.pk)
        target: Any = changed or row
        type(target)._default_manager.filter(pk=target.pk).update(**values)
        before = columns(row)
        (told,) = root.confirm(url, decision, *asked.selections).messages
        assert said in told
        assert columns(row) == before
        assert LogEntry.objects.count() == 0


def test_some_of_many(root: Visitor) -> None:
    """The rows that fit are changed, and the page gives a few reasons for the others."""
    good = [rows.leave_dead().pk for _ in range(3)]
    bad = [rows.leave().pk for _ in range(30)]
    # From a narrowed list, what does not belong there any more is left alone.
    assert root.confirm(f"{OUTBOX}?state=dead", "discard", bad[0]).messages == [CHANGED]
    told = root.confirm(OUTBOX, "retry", *bad[:15], *good, *bad[15:])
    assert told.messages[0] == "3 outbox messages were made due."
    assert len(told.messages) == 12
    assert told.messages[-1] == "30 of 33 stayed as they were."
    assert LogEntry.objects.count() == 3


# Too many


def test_too_many_of_a_table(root: Visitor) -> None:
    """As many rows as a page can show are asked about and decided; of more, nothing is done."""
    first = rows.record("k0")
    values = {field.attname: getattr(first, field.attname) for field in first._meta.fields[1:]}
    copies = [IdempotencyRecord(key=f"k{number}", **values) for number in range(1, MOST_ROWS + 1)]
    IdempotencyRecord.objects.bulk_create(copies)
    everything = {"index": "0", "select_across": "1"}
    for more in ({}, {"confirmed": "1"}):
        page = root.take(RECORDS, "forget", first.pk, **everything, **more)
        (told,) = root.get(page.response["Location"]).messages
        assert f"More than {MOST_ROWS} idempotency records" in told
    assert IdempotencyRecord.objects.count() == MOST_ROWS + 1
    copies[-1].delete()
    asked = root.take(RECORDS, "forget", first.pk, **everything)
    (versions,) = asked.root.find("input", type="hidden", name="versions")
    shown = versions.attributes["value"]
    done = root.confirm(RECORDS, "forget", *asked.selections, versions=shown)
    assert done.messages == [f"{MOST_ROWS} idempotency records were forgotten."]


# Stores and logs that fail


def test_store_gone_in_the_middle(root: Visitor, fragile_redis: RedisServer) -> None:
    """A store that goes away after the first of three locks stops the rest, and both are told."""
    for name in "abc":
        hold(name, IDLE)
    selection = selected(root.get(LOCKS))

    class Stop(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fragile_redis.stop()

    with handling(Stop(), events.LOCK_FREED.logger.name):
        told = root.confirm(LOCKS, "release", *selection)
    assert told.status == 503
    first, fault = told.messages
    assert first == "1 lock was released."
    assert fault != ""
    assert LogEntry.objects.count() == 1


@contextmanager
def broken_log() -> Iterator[None]:
    """Let the database refuse every entry of the admin's log."""
    with connections["site"].cursor() as cursor:
        cursor.execute("ALTER TABLE django_admin_log RENAME TO elsewhere")
    try:
        yield
    finally:
        with connections["site"].cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO django_admin_log")


def test_a_lock_that_can_not_be_logged(root: Visitor) -> None:
    """A lock is in no transaction: it is free before its entry in the log is written."""
    hold("feed", IDLE)
    selection = selected(root.get(LOCKS))
    root.client.raise_request_exception = False
    with broken_log():
        assert root.confirm(LOCKS, "release", *selection).status == 500
    assert find_lock("feed") is None
