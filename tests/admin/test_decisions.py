"""Decisions: their effects, and rows, stores or the log that have changed since the question."""

import logging
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import OperationalError

from django_celery_safe import find_lock
from django_celery_safe.admin.pages import MOST_ROWS
from django_celery_safe.locks.stores import get_store
from django_celery_safe.models import IdempotencyRecord
from tests.admin import rows
from tests.admin.cases import CASES, Case
from tests.admin.pages import Visitor
from tests.admin.rows import hold
from tests.admin.urls import LOCKS, OUTBOX, RECORDS
from tests.listening import handling
from tests.servers import RedisServer
from tests.statements import at_statement, raising


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.decision)
def test_a_decision_about_a_row(root: Visitor, case: Case) -> None:
    """It changes or deletes the row and writes a log entry: both, or neither."""
    row = case.model.objects.get(pk=case.make())
    before = case.state(row.pk)
    root.client.raise_request_exception = False
    with at_statement("site", "INSERT", raising(OperationalError()), about="django_admin_log"):
        assert root.confirm(case.url, case.decision, row.pk).status == 500
    assert case.state(row.pk) == before
    (told,) = root.confirm(case.url, case.decision, row.pk).messages
    assert told == f"{case.done}: 1 {row._meta.verbose_name}."
    assert case.state(row.pk) != before
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.object_repr) == (str(row.pk), str(row))
    assert entry.change_message.startswith(f"{case.done}: ")
    case.model.objects.filter(pk=row.pk).delete()
    (told,) = root.take(case.url, case.decision, row.pk).messages
    assert told == f"{case.done}: 0 {row._meta.verbose_name_plural}."


def test_a_lock_that_changed_hands(root: Visitor) -> None:
    """
    The question says what follows and what each lock is now; so does the log.

    A lock that someone else took after it was shown is left alone; the other is released.
    """
    for name in ("feed", "mail"):
        hold(name)
    asked = root.take(LOCKS, "release", "feed", "mail")
    assert "second may run beside it" in asked.content
    assert "process: web1 pid 42; held for: " in asked.content
    held: Any = find_lock("feed")
    assert get_store().release("feed", held.token, held.remaining)
    token = hold("feed")
    (versions,) = asked.values("[name=versions]", "value")
    assert root.confirm(LOCKS, "release", *asked.selections, versions=versions).messages == [
        "Released: 1 lock.",
        "Lock feed: it ended meanwhile, or someone else holds it now",
    ]
    entry = LogEntry.objects.get()
    assert entry.object_id == "mail"
    assert entry.change_message.startswith("Released: process: web1 pid 42; ")
    assert find_lock("feed").token == token


def test_a_record_that_is_worked_on(root: Visitor) -> None:
    """A record is not forgotten while its work is being done."""
    busy = rows.record("busy", "running", rows.LEASE)
    assert root.confirm(RECORDS, "forget", busy.pk).messages == [
        "Forgotten: 0 idempotency records.",
        "Idempotency record busy: it is gone, or is being worked on: wait until that ends",
    ]
    assert (IdempotencyRecord.objects.count(), LogEntry.objects.count()) == (1, 0)


def test_some_of_many(root: Visitor) -> None:
    """The rows that fit are changed, and the page gives a few reasons for the others."""
    good = [rows.leave_dead().pk for _ in range(3)]
    bad = [rows.leave().pk for _ in range(30)]
    told = root.confirm(OUTBOX, "retry", *bad[:15], *good, *bad[15:])
    assert told.messages[0] == "Made due: 3 outbox messages."
    assert len(told.messages) == 11
    assert LogEntry.objects.count() == 3


def test_many_of_a_table(root: Visitor) -> None:
    """As many rows as a page can show are asked about and decided at once."""
    first = rows.record("k0")
    values = {field.attname: getattr(first, field.attname) for field in first._meta.fields[1:]}
    copies = [IdempotencyRecord(key=f"k{number}", **values) for number in range(1, MOST_ROWS + 2)]
    IdempotencyRecord.objects.bulk_create(copies)
    asked = root.take(RECORDS, "forget", first.pk, index="0", select_across="1")
    (versions,) = asked.values("[name=versions]", "value")
    done = root.confirm(RECORDS, "forget", *asked.selections, versions=versions)
    assert done.messages == [f"Forgotten: {MOST_ROWS} idempotency records."]
    assert IdempotencyRecord.objects.count() == 2


def test_store_gone_in_the_middle(root: Visitor, fragile_redis: RedisServer) -> None:
    """A store that goes away after the first of three locks stops the rest, and both are told."""
    for name in "abc":
        hold(name)
    handler = logging.Handler()
    handler.emit = lambda record: fragile_redis.stop()  # type: ignore[method-assign]
    with handling(handler, "django_celery_safe.lock_freed"):
        told = root.confirm(LOCKS, "release", *"abc")
    assert told.status == 503
    assert [text[:8] for text in told.messages] == ["Released", "Lock b: "]
    assert LogEntry.objects.count() == 1
