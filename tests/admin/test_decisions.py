"""Decisions when rows, stores or the log have changed since the question."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections
from django.db.models import Model
from pytest_django import Settings

from django_celery_safe import find_lock, signals
from django_celery_safe.admin.pages import MOST_ROWS
from django_celery_safe.databases import Now
from django_celery_safe.locks.stores import locate
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import make_visitor
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

#: Each decision about a row, and what makes a row that it fits.
every_decision = pytest.mark.parametrize(
    ("url", "decision", "make"),
    [
        (OUTBOX, "retry", rows.leave_dead),
        (OUTBOX, "discard", rows.leave_dead),
        (RECORDS, "forget", lambda: rows.record("k")),
        (RUNS, "resume", lambda: rows.end(rows.begin(1), Status.FAILED)),
        (RUNS, "abort", lambda: rows.begin(1)),
    ],
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
            LOCKS, "release", *[s for s in root.get(LOCKS).selections if "feed" in s]
        )
    assert told.messages == ["1 lock was released."]
    assert (find_lock("feed"), find_lock("other") is not None) == (None, True)
    assert [event["name"] for event in heard] == ["feed"]
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id, entry.object_repr) == (CHANGE, "feed", "feed")
    assert entry.change_message.startswith("Was released: held by pid 42 on web1; for ")


def test_a_renewed_lock(root: Visitor) -> None:
    """A lock that is renewed is released only when the box says so."""
    hold("feed")
    selection = selected(root.get(LOCKS))
    asked = root.take(LOCKS, "release", *selection)
    assert asked.root.find("input", name="forced")
    (told,) = root.confirm(LOCKS, "release", *selection).messages
    assert told.startswith("The lock feed stays: pid 42 on web1 renewed it ")
    assert told.endswith("Stop that process first; or choose it again, and tick the box.")
    assert find_lock("feed") is not None
    assert LogEntry.objects.count() == 0
    assert root.confirm(LOCKS, "release", *selection, forced="1").messages == [
        "1 lock was released."
    ]
    assert find_lock("feed") is None


def test_a_box_is_not_ticked_twice(root: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that changes hands under a ticked box stays, and no box would help."""
    hold("feed")
    selection = selected(root.get(LOCKS))
    monkeypatch.setattr("django_celery_safe.inspection.locks.release_lock", lambda *_: False)
    assert root.confirm(LOCKS, "release", *selection, forced="1").messages == [
        "The lock feed stays: it ended meanwhile, or someone else holds it now."
    ]


def test_an_overdue_lock(root: Visitor) -> None:
    """A lock whose renewal is overdue is refused with that, since its process may be dead."""
    hold("feed", HOLDER._replace(lease=10_000.0))
    (told,) = root.confirm(LOCKS, "release", *selected(root.get(LOCKS))).messages
    assert "and not since, so it may be dead" in told
    assert find_lock("feed") is not None


def test_retry(root: Visitor) -> None:
    """A dead message that is retried is due at once, with all its attempts."""
    row = rows.leave_dead()
    told = root.confirm(OUTBOX, "retry", row.pk)
    assert told.messages == ["1 outbox message was made due."]
    row.refresh_from_db()
    assert (row.state, row.attempts) == ("pending", 0)
    assert OutboxMessage.objects.due().get() == row
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id) == (CHANGE, str(row.pk))
    assert "Was made due: dead, " in entry.change_message
    assert "no route to host" in entry.change_message


def test_discard(root: Visitor) -> None:
    """A message that is discarded is gone, and told of."""
    row = rows.leave_dead()
    with hearing(signals.message_discarded) as heard:
        told = root.confirm(OUTBOX, "discard", row.pk)
    assert told.messages == ["1 outbox message was discarded."]
    assert not OutboxMessage.objects.exists()
    assert [event["task_id"] for event in heard] == [row.task_id]
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_repr) == (DELETION, str(row))


def test_forget(root: Visitor) -> None:
    """A record that is forgotten is gone, which the signal tells as the command's does."""
    row = rows.record("paid:7")
    with hearing(signals.record_forgotten) as heard:
        told = root.confirm(RECORDS, "forget", row.pk)
    assert told.messages == ["1 idempotency record was forgotten."]
    assert not IdempotencyRecord.objects.exists()
    assert [event["key"] for event in heard] == ["paid:7"]
    assert LogEntry.objects.get().action_flag == DELETION


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


def test_a_record_whose_process_is_gone(root: Visitor) -> None:
    """A record that nobody works on any more is forgotten without the box."""
    row = rows.record("paid:7", "running", rows.OVER)
    root.confirm(RECORDS, "forget", row.pk)
    assert not IdempotencyRecord.objects.exists()


def test_resume(root: Visitor) -> None:
    """A failed run that is resumed runs again, its messages in the outbox."""
    run = rows.end(rows.begin(1), Status.FAILED)
    OutboxMessage.objects.all().delete()
    told = root.confirm(RUNS, "resume", run.pk)
    assert told.messages == ["1 run of stages was resumed."]
    run.refresh_from_db()
    assert run.status == Status.RUNNING
    assert "Was resumed: failed, 0 of 1 steps done." in LogEntry.objects.get().change_message


def test_abort(root: Visitor) -> None:
    """A run that is aborted begins nothing more."""
    run = rows.begin(2)
    told = root.confirm(RUNS, "abort", run.pk)
    assert told.messages == ["1 run of stages was aborted."]
    run.refresh_from_db()
    assert run.status == Status.ABORTED
    assert not StageStep.objects.waiting().exists()


def test_what_many_are_called(root: Visitor) -> None:
    """The messages for several rows read as well as those for one."""
    for make in (lambda: hold("a", IDLE), lambda: hold("b", IDLE)):
        make()
    assert root.confirm(LOCKS, "release", *selected(root.get(LOCKS))).messages == [
        "2 locks were released."
    ]
    runs = [rows.end(rows.begin(1), Status.FAILED).pk for _ in range(2)]
    assert root.confirm(RUNS, "resume", *runs).messages == ["2 runs of stages were resumed."]


def test_nothing_selected(root: Visitor) -> None:
    """A decision about nothing, or none about something, says what to do."""
    hold("feed", IDLE)
    page = root.take(LOCKS, "release")
    assert root.get(page.response["Location"]).messages == ["Select locks, and what to do."]
    page = root.take(LOCKS, "", *selected(root.get(LOCKS)))
    assert root.get(page.response["Location"]).messages == ["Select locks, and what to do."]
    assert find_lock("feed") is not None


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "x",
        TOKEN,
        f"{TOKEN}7",
        f'{TOKEN}""',
        f'{TOKEN}"feed"',
        f'{TOKEN[1:]}"feed"',
        '"feed"',
        TOKEN + "[" * 100_000,
    ],
    ids=range(9),
)
def test_garbled_selections(root: Visitor, garbage: str) -> None:
    """A form value of no held lock releases nothing."""
    hold("feed", IDLE)
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


def test_a_lock_that_is_renewed_by_now(root: Visitor) -> None:
    """The state of the lock at the confirmation decides."""
    hold("feed", IDLE)
    selection = selected(root.get(LOCKS))
    release("feed")
    token = selection[0][:32]
    locate().store().acquire("feed", token, rows.LEASE, HOLDER)
    (told,) = root.confirm(LOCKS, "release", *selection).messages
    assert "renewed it " in told


#: A decision, what makes a row of it, what happens to the row meanwhile, what is said.
CHANGES: Final[dict[str, tuple[str, str, Callable[[], Model], Callable[[Any], object], str]]] = {
    "retry of one that was sent": (
        OUTBOX, "retry", rows.leave_dead,
        lambda row: change(row, due_at=None, dead_at=None, sent_at=Now()),
        "did not fail, or was sent meanwhile",
    ),
    "retry of one that is due": (
        OUTBOX, "retry", rows.leave_dead,
        lambda row: change(row, due_at=Now(), dead_at=None, attempts=0),
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


@pytest.mark.parametrize(
    ("site", "name"),
    [
        *(("sqlite", name) for name in CHANGES),
        ("postgres", "forget of one that was claimed"),
        ("postgres", "resume of one with a step that runs"),
    ],
    indirect=["site"],
)
def test_a_row_that_changed(site: str, name: str) -> None:
    """A decision that no longer fits is refused with the reason, and changes and logs nothing."""
    url, decision, make, meanwhile, said = CHANGES[name]
    root, row = make_visitor(is_superuser=True), make()
    asked = root.take(url, decision, row.pk)
    meanwhile(row)
    before = columns(row)
    (told,) = root.confirm(url, decision, *asked.selections).messages
    assert said in told
    assert columns(row) == before
    assert LogEntry.objects.count() == 0


@every_decision
def test_a_row_that_is_gone(root: Visitor, url: str, decision: str, make: Any) -> None:
    """The page says that a row is gone that was deleted meanwhile."""
    row = make()
    type(row)._default_manager.filter(pk=row.pk).delete()
    told = root.confirm(url, decision, row.pk)
    assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
    asked = root.take(url, decision, row.pk)
    assert "The selected rows no longer exist." in asked.content
    assert LogEntry.objects.count() == 0


def test_a_row_that_left_the_filter(root: Visitor) -> None:
    """From a narrowed list, what does not belong there any more is left alone."""
    row = rows.leave_dead()
    change(row, due_at=Now(), dead_at=None)
    told = root.confirm(f"{OUTBOX}?state=dead", "discard", row.pk)
    assert told.messages == ["1 of 1 rows ended or changed after they were shown."]
    assert OutboxMessage.objects.get() == row


def test_some_of_many(root: Visitor) -> None:
    """The rows that fit are changed, and the page gives a few reasons for the others."""
    good = [rows.leave_dead().pk for _ in range(3)]
    bad = [rows.leave().pk for _ in range(30)]
    told = root.confirm(OUTBOX, "retry", *bad[:15], *good, *bad[15:])
    assert told.messages[0] == "3 outbox messages were made due."
    assert len(told.messages) == 12
    assert told.messages[-1] == "30 of 33 stayed as they were."
    assert LogEntry.objects.count() == 3


# Too many


def test_too_many_of_a_table(root: Visitor) -> None:
    """More rows than a page can show are not asked about, nor is anything done."""
    row = rows.leave_dead()
    row.refresh_from_db()
    values = {field.attname: getattr(row, field.attname) for field in row._meta.fields[1:]}
    OutboxMessage.objects.bulk_create(OutboxMessage(**values) for _ in range(MOST_ROWS - 1))
    everything = {"index": "0", "select_across": "1"}
    assert len(root.take(OUTBOX, "retry", row.pk, **everything).selections) == MOST_ROWS
    OutboxMessage(**values).save()
    told = root.get(root.take(OUTBOX, "retry", row.pk, **everything).response["Location"])
    assert told.messages[0].startswith(f"More than {MOST_ROWS} outbox messages are selected")
    assert "manage.py celery_outbox" in told.messages[0]
    assert OutboxMessage.objects.dead().count() == MOST_ROWS + 1


def test_too_many_confirmed(root: Visitor) -> None:
    """A form that confirms more rows than a page can show was never shown, and does nothing."""
    row = rows.leave_dead()
    row.refresh_from_db()
    values = {field.attname: getattr(row, field.attname) for field in row._meta.fields[1:]}
    OutboxMessage.objects.bulk_create(OutboxMessage(**values) for _ in range(MOST_ROWS))
    everything = {"index": "0", "select_across": "1"}
    told = root.confirm(OUTBOX, "discard", row.pk, **everything)
    assert told.messages[0].startswith(f"More than {MOST_ROWS} outbox messages are selected")
    assert OutboxMessage.objects.count() == MOST_ROWS + 1


def test_the_most_records(root: Visitor) -> None:
    """As many as a page can show are confirmed in a form that Django accepts."""
    first = rows.record("k0")
    values = {field.attname: getattr(first, field.attname) for field in first._meta.fields[1:]}
    copies = [IdempotencyRecord(key=f"k{number}", **values) for number in range(1, MOST_ROWS)]
    IdempotencyRecord.objects.bulk_create(copies)
    asked = root.take(RECORDS, "forget", first.pk, index="0", select_across="1")
    form = {
        each.attributes["name"]: each.attributes["value"]
        for each in asked.root.find("input", type="hidden")
        if each.attributes["name"] != "_selected_action"
    }
    told = root.confirm(RECORDS, "forget", *asked.selections, versions=form["versions"])
    assert told.messages == [f"{MOST_ROWS} idempotency records were forgotten."]


def test_too_many_locks(root: Visitor, settings: Settings) -> None:
    """The largest number of locks is released at once, and a larger one is refused."""
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 5000
    chosen = [f'{hold(f"l{number}", IDLE)}"l{number}"' for number in range(MOST_ROWS + 1)]
    for more in ({}, {"confirmed": "1"}):
        page = root.take(LOCKS, "release", *chosen, **more)
        (told,) = root.get(page.response["Location"]).messages
        assert told.startswith(f"More than {MOST_ROWS} locks are selected")
    assert root.confirm(LOCKS, "release", *chosen[1:]).messages == ["500 locks were released."]


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


@every_decision
def test_a_log_that_fails(site: str, url: str, decision: str, make: Any) -> None:
    """A decision that can't be logged is not carried out, and sends no signal."""
    root, row = make_visitor(is_superuser=True), make()
    before, messages = columns(row), OutboxMessage.objects.count()
    root.client.raise_request_exception = False
    with (
        broken_log(),
        hearing(signals.message_retried, signals.message_discarded, signals.record_forgotten,
                signals.run_resumed, signals.run_ended) as heard,
    ):  # fmt: skip
        assert root.confirm(url, decision, row.pk).status == 500
    assert columns(row) == before
    assert OutboxMessage.objects.count() == messages
    assert heard == []
