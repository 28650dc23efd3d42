"""Rows of the outbox on the sending side: when they are there, and when they are gone."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group, shared_task
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import after_task_publish
from django.db import DEFAULT_DB_ALIAS, DatabaseError, DataError, connections, transaction
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import OperationalError
from pytest_django import Settings

from django_celery_safe import (
    ConfigurationError,
    NotSerializable,
    SafeTask,
    databases,
    iter_locks,
    send_on_commit,
)
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending import outbox
from django_celery_safe.sending import publisher as publisher_module
from django_celery_safe.sending.outbox import MessageTable
from django_celery_safe.signals import task_duplicate, task_send_failed, task_sent
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.background import elsewhere
from tests.listening import receiving
from tests.sending.conftest import TABLE, MakeApp, hearing, ids, refusing, rolled_back, table
from tests.sending.published import Sent, ids_in
from tests.sending.test_unique import lock_of, once
from tests.statements import raising

pytestmark = pytest.mark.django_db(transaction=True)


@shared_task(base=SafeTask, outbox=True)
def kept(*args: object) -> None:
    """Go through the outbox whatever the setting says."""


@shared_task(base=SafeTask, outbox=False)
def not_kept(*args: object) -> None:
    """Never go through the outbox unless a call says so."""


@shared_task(base=SafeTask, send_on_commit=True, outbox=True)
def deferring(*args: object) -> None:
    """Go through the outbox with every send."""


def rows(using: str = DEFAULT_DB_ALIAS) -> list[OutboxMessage]:
    """Return the outbox of a database, in order."""
    return list(table(using).order_by("pk"))


def row_ids(using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Return the task ids of the rows of a database, in order."""
    return [row.task_id for row in rows(using)]


def keep(number: Any, using: str = DEFAULT_DB_ALIAS, task: Any = add, **options: Any) -> Any:
    """Send a task through the outbox of a database."""
    return task.apply_async_on_commit((number,), using=using, outbox=True, **options)


def keep_chain(number: Any, using: str) -> Any:
    """Send a chain through the outbox of a database."""
    return send_on_commit(chain(add.s(number), add.s(2)), using=using, outbox=True)


# Transactions.


@pytest.mark.sql
def test_a_row_is_there_until_the_broker_has_its_message(alias: str, sent: Sent) -> None:
    """It is part of the transaction, unseen by others; the commit publishes and deletes it."""
    with hearing(task_sent) as told, transaction.atomic(using=alias):
        result = keep(1, alias)
        (row,) = rows(alias)
        assert (row.task, row.task_id, row.attempts) == (add.name, result.id, 0)
        assert str(row) == f"{add.name}[{result.id}]"
        assert elsewhere(alias, rows, alias).result() == []
        assert sent() == []
    assert rows(alias) == []
    assert ids(sent()) == [result.id]
    assert result.send_error is None
    assert [said["task_id"] for said in told] == [result.id]


def test_the_row_is_committed_when_its_message_is_published(alias: str, sent: Sent) -> None:
    """A process that dies between the two leaves a row, also without a transaction."""
    states: list[tuple[bool, int]] = []

    def look(**_: Any) -> None:
        states.append((connections[alias].in_atomic_block, len(rows(alias))))

    for send in (keep, keep_chain):
        with receiving(after_task_publish, look):
            result = send(1, alias)
            with transaction.atomic(using=alias):
                send(2, alias)
        assert (rows(alias), result.send_error) == ([], None)
    assert states == [(False, 1)] * 4
    assert len(sent()) == 4


@pytest.mark.parametrize("count", [1, 3])
def test_without_a_broker_the_rows_stay(
    count: int, alias: str, without_broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised, in a transaction or not; the result, a signal and a warning tell."""
    task = without_broker.tasks[add.name]

    def send() -> Any:
        if count == 1:
            return task.apply_async((1,), using=alias, outbox=True)
        return send_on_commit(group(task.s(n) for n in range(count)), using=alias, outbox=True)

    with hearing(task_send_failed) as told:
        results = [send()]
        with transaction.atomic(using=alias):
            results.append(send())
    assert [type(result.send_error) for result in results] == [OperationalError] * 2
    assert [row.attempts for row in rows(alias)] == [0] * (2 * count)
    assert [said["task_id"] for said in told] == row_ids(alias)
    assert {said["kept"] for said in told} == {True}
    assert {said["error"] for said in told} == {result.send_error for result in results}
    levels = {record.levelname for record in caplog.records if "outbox keeps" in record.message}
    assert levels == {"WARNING"}


# Costs.


def test_a_canvas_is_one_insert(alias: str, sent: Sent) -> None:
    """All its messages are inserted at once, and published in their order."""
    canvas = chord([chord([add.s(1), add.s(2)], total.s()), add.s(3)], total.s())
    with transaction.atomic(using=alias):
        with CaptureQueriesContext(connections[alias]) as inside:
            result = send_on_commit(canvas, using=alias, outbox=True)
        kept_ids = row_ids(alias)
    words = [query["sql"].split()[0] for query in inside.captured_queries]
    assert words == ["INSERT"]
    assert len(kept_ids) == 3
    assert set(kept_ids) <= ids_in(result)
    assert ids(sent()) == kept_ids
    assert rows(alias) == []


BROKEN: dict[str, Callable[[], Signature[Any]]] = {
    "arguments": lambda: group(add.s(1), add.s(object())),
    "chord body": lambda: chord([add.s(1), add.s(2)], total.s(object())),
    "row": lambda: group(add.s(1), add.s(2).set(task_id="a\0b")),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_a_canvas_is_kept_whole_or_not_at_all(
    make: Callable[[], Signature[Any]], postgres_alias: str, sent: Sent
) -> None:
    """One member that can't be kept keeps the others out; the transaction goes on."""
    with transaction.atomic(using=postgres_alias):
        with pytest.raises((TypeError, DataError)):
            send_on_commit(make(), using=postgres_alias, outbox=True)
        assert rows(postgres_alias) == []
        Person.everyone.using(postgres_alias).create()
        good = keep(1, postgres_alias)
    assert ids(sent()) == [good.id]
    assert Person.everyone.using(postgres_alias).count() == 1
    assert rows(postgres_alias) == []


def test_large_messages_are_written_a_few_at_a_time(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An INSERT has a number of bytes at most, or a single message; all are published."""
    monkeypatch.setattr(databases, "BATCH_BYTES", 5000)
    monkeypatch.setattr(outbox, "PACKET_BYTES", 5000)  # of MySQL
    signatures = [add.s("x" * 2000), add.s("x" * 9000), add.s(1), add.s(2)]
    with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as inside:
        result = send_on_commit(group(signatures), using=alias, outbox=True)
    words = [query["sql"].split()[0] for query in inside.captured_queries]
    assert words.count("INSERT") == 3
    assert ids(sent()) == [one.id for one in result]
    assert rows(alias) == []


# Eager tasks.


def test_eager_tasks_need_no_row(broker: Celery) -> None:
    """An eager task needs no row, since it can't be lost; it runs at the commit."""
    broker.conf.task_always_eager = True
    with CaptureQueriesContext(connections[DEFAULT_DB_ALIAS]) as queries:
        at_once = [keep(1), send_on_commit(group(add.s(1), add.s(2)), outbox=True)]
        with transaction.atomic():
            later = [keep(2), send_on_commit(chain(add.s(1), add.s(2)), outbox=True)]
            assert later[0].state == "PENDING"
    assert [result.get() for result in (*at_once, *later)] == [1, [1, 2], 2, 3]
    assert [query for query in queries.captured_queries if TABLE in query["sql"]] == []


# Ways to ask for the outbox.


@pytest.mark.parametrize(
    ("setting", "send", "count"),
    [
        (None, lambda: add.delay_on_commit(1), 0),
        (True, lambda: add.delay_on_commit(1), 1),
        (True, lambda: not_kept.delay_on_commit(1), 0),
        (True, lambda: kept.apply_async_on_commit((1,), outbox=False), 0),
        (False, lambda: not_kept.apply_async_on_commit((1,), outbox=True), 1),
        (True, lambda: send_on_commit(chain(kept.s(1), add.s(2)), outbox=False), 0),
        (None, lambda: add.s(1).set(outbox=True).delay(), 1),
        (None, lambda: send_on_commit(group(not_kept.s(1), add.s(2), kept.s(3))), 3),
        (None, lambda: send_on_commit(chain(add.s(1), group(chain(add.s(3), kept.s())))), 1),
        (None, lambda: group(deferring.s(3), deferring.s(4)).delay(), 2),
    ],
)
def test_argument_beats_attribute_beats_setting(
    setting: bool | None, send: Callable[[], Any], count: int, sent: Sent, settings: Settings
) -> None:
    """
    The first of them that says anything decides; without a word there is no row.

    An option of a signature counts as an argument. One task that wants the outbox decides
    for its canvas, so that no part of it is lost alone.
    """
    settings.DJANGO_CELERY_SAFE = {} if setting is None else {"OUTBOX": setting}
    with transaction.atomic():
        send()
        assert (len(rows()), sent()) == (count, [])
    messages = sent()
    assert (len(messages), rows()) == (count or 1, [])
    for message in messages:
        assert "outbox" not in {**message.headers, **message.properties}


@pytest.mark.sql
def test_a_database_without_the_table_is_an_error(alias: str, sent: Sent) -> None:
    """The error says which database, and what to run."""
    with connections[alias].schema_editor() as editor:
        editor.delete_model(OutboxMessage)
    for context in (transaction.atomic(using=alias), rolled_back(alias)):
        with pytest.raises(ConfigurationError, match=f"migrate.*--database={alias}"), context:
            keep(1, alias)
    with pytest.raises(ConfigurationError, match=f"The database '{alias}' has no outbox"):
        keep(1, alias)
    assert sent() == []


# Messages that can be kept, and others.


def test_what_can_not_be_sent_raises_at_the_call(alias: str, sent: Sent) -> None:
    """Nothing is written, and the transaction goes on."""
    with transaction.atomic(using=alias):
        with pytest.raises(NotSerializable):
            keep(object(), alias)
        with pytest.raises(NotSerializable, match="outbox row keeps plain data"):
            keep(1, alias, errback=object())
        with pytest.raises(NotSerializable, match=f"header of task {add.name}"):
            keep(1, alias, headers={"ours": [{1: object()}]})
        with pytest.raises(NotSerializable, match=r"its task_id.*256 characters"):
            keep(1, alias, task_id="x" * 256)
        assert rows(alias) == []
        longest = keep(1, alias, task_id="x" * 255)
        assert row_ids(alias) == [longest.id]
    assert ids(sent()) == [longest.id]
    assert rows(alias) == []


@pytest.mark.sql
def test_arguments_of_5_mb_are_kept(alias: str, sent: Sent) -> None:
    """They arrive whole, and neither the row's text nor a log has them."""
    text = "5 MB " * 1_000_000
    with transaction.atomic(using=alias):
        kept.apply_async_on_commit((text, "ü\0\n"), using=alias)
        (row,) = rows(alias)
        assert len(bytes(row.body)) > len(text)
        assert len(row.properties) < 10_000
        assert len(str(row)) < 200
    (message,) = sent()
    assert message.body[0] == [text, "ü\0\n"]
    assert rows(alias) == []


def test_another_broker_is_an_error(broker: Celery, make_app: MakeApp, sent: Sent) -> None:
    """A commit and a relay send to the app's own broker."""
    elsewhere = make_app(broker_url=refusing())
    with elsewhere.connection_for_write() as connection:
        with transaction.atomic(), pytest.raises(TypeError, match="to another broker"):
            send_on_commit(add.s(1), outbox=True, connection=connection)
        producer = elsewhere.amqp.Producer(connection, auto_declare=False)
        with transaction.atomic(), pytest.raises(TypeError, match="to another broker"):
            add.apply_async_on_commit((2,), producer=producer)
        with pytest.raises(TypeError, match="outbox=False"):
            keep(1, connection=connection)
    assert rows() == []
    # A producer of its own is left aside: it may be someone else's by the time of the commit.
    with broker.producer_or_acquire() as given, transaction.atomic():
        result = keep(1, producer=given)
        assert row_ids() == [result.id]
    assert ids(sent()) == [result.id]
    assert rows() == []


def test_retention_keeps_rows_as_sent(alias: str, sent: Sent, settings: Settings) -> None:
    """With a retention a row says when it was sent, and nobody sends it again."""
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": None}, "OUTBOX_SEND_TIMEOUT": 30}
    with transaction.atomic(using=alias):
        both = send_on_commit(group(add.s(1), add.s(2)), using=alias, outbox=True)
        results = [keep(1, alias), *both]
    assert set(row_ids(alias)) == {result.id for result in results}
    assert ids(sent()) == row_ids(alias)
    assert [(row.state, row.due_at) for row in rows(alias)] == [("sent", None)] * 3
    assert all(row.sent_at >= row.created_at for row in rows(alias) if row.sent_at)


def test_a_row_that_can_not_be_deleted_stays(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database gone after the publication: a warning, no error, and a relay sends it again."""
    refuse = raising(DatabaseError("server closed the connection"))
    monkeypatch.setattr(MessageTable, "record_sent", refuse)
    with transaction.atomic(using=alias):
        result = keep(1, alias)
    assert ids(sent()) == row_ids(alias) == [result.id]
    assert result.send_error is None
    (warning,) = [record for record in caplog.records if record.name.endswith("commit")]
    assert warning.levelname == "WARNING"
    assert "a relay sends them" in warning.getMessage()


@pytest.mark.parametrize("outbox", [True, False])
def test_a_soft_time_limit_at_the_commit_is_raised_after_the_others_are_safe(
    outbox: bool, alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Published rows are deleted, the others are due, and the committing task gets the limit.

    Without the outbox nobody else sends the others, so they go out before it is raised.
    """
    original, interrupted = publisher_module.put, "the second"

    def put(message: Any, *args: Any, **options: Any) -> None:
        if message.task_id == interrupted:
            raise SoftTimeLimitExceeded
        original(message, *args, **options)

    monkeypatch.setattr(publisher_module, "put", put)
    members = [add.s(1), add.s(2).set(task_id=interrupted), add.s(3)]
    with pytest.raises(SoftTimeLimitExceeded), transaction.atomic(using=alias):
        result = send_on_commit(group(members), using=alias, outbox=outbox)
    first, second, third = [part.id for part in result]
    left = [second, third] if outbox else []
    assert ids(sent()) == ([first] if outbox else [first, third])
    assert row_ids(alias) == left
    assert {row.task_id for row in table(alias).due()} == set(left)
    assert [row.attempts for row in rows(alias)] == [0] * len(left)
    assert isinstance(result.send_error, SoftTimeLimitExceeded)


# Tasks that are sent once.


@pytest.mark.usefixtures("locks_in_memory")
def test_a_duplicate_is_dropped_with_its_row(alias: str, sent: Sent) -> None:
    """
    In the same transaction or later; its result is that of the message sent before.
    The lock is taken at the commit, not before.

    In a canvas it goes out, since others wait for it.
    """
    with hearing(task_duplicate) as told, transaction.atomic(using=alias):
        first, second = keep(1, alias, once), keep(1, alias, once)
        assert len(rows(alias)) == 2
        assert (first.is_duplicate, [*iter_locks()]) == (None, [])
    assert lock_of(1).holder.task_id == first.id
    third = keep(1, alias, once)
    with transaction.atomic(using=alias):
        members = send_on_commit(group(once.s(1), once.s(2)), using=alias, outbox=True)
    assert [one.is_duplicate for one in (first, second, third)] == [False, True, True]
    assert first.id == second.id == third.id
    assert [one.send_error for one in (first, second, third)] == [None] * 3
    assert ids(sent()) == [first.id, *(member.id for member in members)]
    assert rows(alias) == []
    assert [said["sent_id"] for said in told] == [first.id]
