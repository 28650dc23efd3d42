"""Decisions when rows, stores or the log have changed since the question."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections
from django.db.models import Model

from django_celery_safe import find_lock, signals
from django_celery_safe.admin.pages import MOST_ROWS
from django_celery_safe.databases import Now
from django_celery_safe.locks.stores import locate
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.pages import Visitor
from tests.admin.rows import HOLDER, hold
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS
from tests.locks.conftest import fragile_redis
from tests.sending.conftest import hearing
from tests.servers import RedisServer

__all__ = ["fragile_redis"]

#: One whose lease nobody renews.
IDLE: Final = HOLDER._replace(renewed=False)

#: A token that nobody has.
TOKEN: Final = "0" * 32

#: Each decision about a row, what makes a row that it fits, and what the admin then tells.
DECISIONS: Final = [
    (OUTBOX, "retry", rows.leave_dead, "1 outbox message was made due."),
    (OUTBOX, "discard", rows.leave_dead, "1 outbox message was discarded."),
    (RECORDS, "forget", lambda: rows.record("k"), "1 idempotency record was forgotten."),
    (
        *(RUNS, "resume", lambda: rows.end(rows.begin(1), Status.FAILED)),
        "1 run of stages was resumed.",
    ),
    (RUNS, "abort", lambda: rows.begin(1), "1 run of stages was aborted."),
]
every_decision = pytest.mark.parametrize(("url", "decision", "make", "said"), DECISIONS)


#: The signals of decisions about rows.
ROW_SIGNALS: Final = (
    *(signals.message_retried, signals.message_discarded, signals.record_forgotten),
    *(signals.run_resumed, signals.run_ended),
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


def test_release(root: Visitor) -> None:
    """A lock that is released is free, which the log of the admin and the signal tell."""
    hold("feed", IDLE)
    hold("other", IDLE)
    with hearing(signals.lock_freed) as heard:
        told = root.confirm(
            LOCKS, "release", *[s for s in selected(root.get(LOCKS)) if "feed" in s]
        )
    assert told.messages == ["1 lock was released."]
    assert (find_lock("feed"), find_lock("other") is not None) == (None, True)
    assert [event["name"] for event in heard] == ["feed"]
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id, entry.object_repr) == (CHANGE, "feed", "feed")
    assert entry.change_message.startswith("Was released: held by pid 42 on web1; for ")


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
    assert told.endswith("Stop that process first; or choose it again, and tick the box.")
    assert find_lock("feed") is not None
    assert LogEntry.objects.count() == 0
    assert root.confirm(LOCKS, "release", *selection, forced="1").messages == [
        "1 lock was released."
    ]
    assert find_lock("feed") is None


@every_decision
def test_a_decision_about_a_row(
    root: Visitor, url: str, decision: str, make: Any, said: str
) -> None:
    """It changes or deletes the row, and a log and a signal tell of it: all of these, or none."""
    row = make()
    before, messages = columns(row), OutboxMessage.objects.count()
    root.client.raise_request_exception = False
    with broken_log(), hearing(*ROW_SIGNALS) as heard:
        assert root.confirm(url, decision, row.pk).status == 500
    assert (columns(row), OutboxMessage.objects.count(), heard) == (before, messages, [])
    with hearing(*ROW_SIGNALS) as heard:
        assert root.confirm(url, decision, row.pk).messages == [said]
    entry = LogEntry.objects.get()
    assert (entry.object_id, len(heard)) == (str(row.pk), 1)
    rows_left = type(row)._default_manager.filter(pk=row.pk)
    if decision in {"discard", "forget"}:
        assert not rows_left.exists()
        assert (entry.action_flag, entry.object_repr) == (DELETION, str(row))
    else:
        assert entry.action_flag == CHANGE
        row.refresh_from_db()
        state, message = {
            "retry": ("pending", "Was made due: dead, "),
            "resume": (Status.RUNNING, "Was resumed: failed, 0 of 1 steps done."),
            "abort": (Status.ABORTED, "Was aborted: waiting, 0 of 1 steps done."),
        }[decision]
        assert (row.state if decision == "retry" else row.status) == state
        assert message in entry.change_message
    rows_left.delete()
    told = root.confirm(url, decision, row.pk)
    assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
    assert "The selected rows no longer exist." in root.take(url, decision, row.pk).content


def test_a_record_that_was_claimed_again_meanwhile(root: Visitor) -> None:
    """The page forgets the claim that it asked about, and none that came after it."""
    row = rows.record("paid:7", "failed")
    asked = root.take(RECORDS, "forget", row.pk)
    (versions,) = asked.root.find("input", type="hidden", name="versions")
    IdempotencyRecord.objects.filter(pk=row.pk).update(token="f" * 32, state="done")
    told = root.confirm(RECORDS, "forget", row.pk, versions=versions.attributes["value"])
    assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
    assert IdempotencyRecord.objects.get() == row


def test_a_record_that_is_worked_on(root: Visitor) -> None:
    """A record that somebody works on is forgotten only when the box says so."""
    row = rows.record("paid:7", "running", rows.LEASE)
    (told,) = root.confirm(RECORDS, "forget", row.pk).messages
    assert told.startswith(
        "The idempotency record paid:7 stays: it is being worked on (id-1, pid 42 on web1)"
    )
    assert IdempotencyRecord.objects.get() == row
    assert LogEntry.objects.count() == 0
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
    """A lock that someone else took after it was shown is left alone, forced or not."""
    hold("feed", IDLE)
    selection = selected(root.get(LOCKS))
    release("feed")
    token = hold("feed", IDLE)
    for forced in ({}, {"forced": "1"}):
        told = root.confirm(LOCKS, "release", *selection, **forced)
        assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
    asked = root.take(LOCKS, "release", *selection)
    assert "The selected rows no longer exist." in asked.content
    held = find_lock("feed")
    assert held is not None
    assert held.token == token


def test_a_lock_that_ended(root: Visitor) -> None:
    """If one of two locks has ended, the other is released, and the page reports both."""
    hold("feed", IDLE)
    hold("mail", IDLE)
    selection = selected(root.get(LOCKS))
    release("feed")
    told = root.confirm(LOCKS, "release", *selection)
    assert told.messages == [
        "1 lock was released.",
        "1 of 2 rows ended or changed after they were shown.",
    ]


#: A decision, what makes a row of it, what happens to the row meanwhile, what is said.
CHANGES: Final[dict[str, tuple[str, str, Callable[[], Model], Callable[[Any], object], str]]] = {
    "retry of one that was sent": (
        OUTBOX, "retry", rows.leave_dead,
        lambda row: change(row, due_at=None, dead_at=None, sent_at=Now()),
        "did not fail, or was sent meanwhile",
    ),
    "discard of one that was sent": (
        OUTBOX, "discard", rows.leave_dead,
        lambda row: change(row, due_at=None, dead_at=None, sent_at=Now()),
        "was sent meanwhile",
    ),
    "forget of one that was claimed": (
        RECORDS, "forget", lambda: rows.record("k", "failed"),
        lambda row: change(row, state="running", ends_at=Now() + rows.timedelta(seconds=60)),
        "is being worked on",
    ),
    "resume of one that goes on": (
        RUNS, "resume", lambda: rows.end(rows.begin(1), Status.FAILED),
        lambda run: run.resume(),
        "Can't resume",
    ),
    "resume of one with a step that runs": (
        RUNS, "resume", lambda: rows.end(rows.begin(2), Status.FAILED),
        lambda run: change(run.steps.last(), status="running",
                           ends_at=Now() + rows.timedelta(seconds=60)),
        "still runs",
    ),
    "abort of one that ended": (
        RUNS, "abort", lambda: rows.begin(1),
        lambda run: run.abort(),
        "Can't abort",
    ),
}  # fmt: skip


def change(row: Any, **values: Any) -> None:
    """Write columns of a row."""
    assert type(row)._default_manager.filter(pk=row.pk).update(**values) == 1


def columns(row: Any) -> dict[str, Any]:
    """Return a row as it is in the database."""
    found: dict[str, Any] = type(row)._default_manager.filter(pk=row.pk).values().get()
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_that_changed(root: Visitor, name: str) -> None:
    """A decision that no longer fits is refused with the reason, and changes and logs nothing."""
    url, decision, make, meanwhile, said = CHANGES[name]
    row = make()
    asked = root.take(url, decision, row.pk)
    meanwhile(row)
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
    told = root.confirm(f"{OUTBOX}?state=dead", "discard", bad[0])
    assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
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
        assert told.startswith(f"More than {MOST_ROWS} idempotency records are selected")
        assert "manage.py celery_idempotency" in told
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

    def stop(**event: object) -> None:
        fragile_redis.stop()

    signals.lock_freed.connect(stop)
    try:
        told = root.confirm(LOCKS, "release", *selection)
    finally:
        signals.lock_freed.disconnect(stop)
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
