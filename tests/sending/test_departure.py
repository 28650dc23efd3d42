"""The sends of one commit share the look at their rows and the time that the commit waits."""

import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord, group
from celery.signals import after_task_publish
from django.db import DatabaseError, connections, transaction
from django.test.utils import CaptureQueriesContext
from kombu import Connection
from kombu.exceptions import OperationalError

from django_celery_safe import send_on_commit
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxMessages
from django_celery_safe.sending import departure as departure_module
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import task_send_failed
from tests.app.models import Person
from tests.app.tasks import add
from tests.kinds import words_of_change
from tests.listening import receiving
from tests.processes import wait_for
from tests.sending.conftest import ONE_TRY, MakeApp, hearing
from tests.sending.published import Published
from tests.sending.relaying import count_calls

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]

TABLE = OutboxMessage._meta.db_table


@pytest.fixture
def alias(db_alias: str) -> str:
    """The alias of a database of this test."""
    return db_alias


def table(alias: str) -> OutboxMessages:
    """Return all rows of a database."""
    return OutboxMessage.objects.using(alias)


def keep(number: int, using: str, task: Any = add, **options: Any) -> Any:
    """Send a task through the outbox of a database."""
    return task.apply_async_on_commit((number,), using=using, outbox=True, **options)


def ids(messages: list[Published]) -> list[str]:
    """Return the ids of messages."""
    return [message.id for message in messages]


# The row decides.


@pytest.mark.sql
def test_a_savepoint_that_is_rolled_back_by_its_id_sends_nothing(
    alias: str, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    """Django runs the callbacks all the same; a message whose row is not there is not sent."""
    with transaction.atomic(using=alias):
        before = keep(1, alias)
        savepoint = connections[alias].savepoint()
        gone = keep(2, alias)
        send_on_commit(group(add.s(3), add.s(4)), using=alias, outbox=True)
        connections[alias].savepoint_rollback(savepoint)
        after = keep(5, alias)
    assert ids(sent()) == [before.id, after.id]
    assert not table(alias).exists()
    assert gone.send_error is None
    told = [one.getMessage() for one in caplog.records if "rolled back" in one.getMessage()]
    assert [text.partition(" message(s)")[0] for text in told] == ["1", "2"]


def test_a_commit_of_which_postgresql_makes_a_rollback_sends_nothing(
    postgres_alias: str, sent: Sent
) -> None:
    """The error of a raw query is caught inside ``atomic()``: COMMIT raises nothing then."""
    with transaction.atomic(using=postgres_alias):
        Person.everyone.using(postgres_alias).create()
        keep(1, postgres_alias)
        with connections[postgres_alias].cursor() as cursor, suppress(DatabaseError):
            cursor.execute("SELECT 1 / 0")
    assert not Person.everyone.using(postgres_alias).exists()
    assert sent() == []


@pytest.mark.sql
def test_after_a_long_transaction_the_row_decides_too(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender claims the rows of all sends of the commit by one query, and misses one."""
    monkeypatch.setattr(departure_module, "GRACE", -1.0)
    with transaction.atomic(using=alias):
        savepoint = connections[alias].savepoint()
        keep(1, alias)
        connections[alias].savepoint_rollback(savepoint)
        result = keep(2, alias)
        monkeypatch.setattr(departure_module, "GRACE", 5.0)
        queries = CaptureQueriesContext(connections[alias]).__enter__()
    queries.__exit__(None, None, None)
    assert ids(sent()) == [result.id]
    words = [query["sql"].split()[0] for query in queries.captured_queries if TABLE in query["sql"]]
    assert words == [*words_of_change(alias), "DELETE"]


def test_the_sends_of_a_commit_look_for_their_rows_once(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty sends cost one look, and one DELETE each."""
    monkeypatch.setattr(departure_module, "GRACE", 60.0)  # otherwise a slow one claims them
    with transaction.atomic(using=alias):
        results = [keep(number, alias) for number in range(20)]
        queries = CaptureQueriesContext(connections[alias]).__enter__()
    queries.__exit__(None, None, None)
    assert ids(sent()) == [result.id for result in results]
    words = [query["sql"].split()[0] for query in queries.captured_queries if TABLE in query["sql"]]
    assert words == ["SELECT"] + ["DELETE"] * 20


def test_more_rows_than_one_statement_looks_for(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for in parts, and all are sent."""
    monkeypatch.setattr(departure_module, "LOOK", 3)
    with transaction.atomic(using=alias):
        singles = [keep(number, alias).id for number in range(4)]
        members = send_on_commit(group(add.s(n) for n in range(5)), using=alias, outbox=True)
        singles += [keep(number, alias).id for number in range(2)]
    assert sorted(ids(sent())) == sorted([*singles, *(one.id for one in members)])
    assert not table(alias).exists()


# Callbacks of others.


def test_what_a_callback_that_raises_kept_back_is_relayed(alias: str, sent: Sent) -> None:
    """Django runs no callback after it; the row is committed, and a relay finds it."""

    def fail() -> None:
        raise LookupError("a callback of the project's own")

    with pytest.raises(LookupError), transaction.atomic(using=alias):
        transaction.on_commit(fail, using=alias)
        result = keep(1, alias)
    assert sent() == []
    table(alias).update(due_at=Now() - timedelta(seconds=1))
    with closing(Relay(alias)) as relay:
        relay.drain()
    assert ids(sent()) == [result.id]


# One wait for all.


def test_the_outbox_sends_of_a_commit_share_its_time(
    alias: str, sent: Sent, settings: "Settings", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow broker gets what OUTBOX_SEND_TIMEOUT allows for all; a relay has the rest at once."""
    monkeypatch.setattr(departure_module, "GRACE", 45.0)
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 30}
    clock, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])

    def take_long(**_: Any) -> None:
        ahead[0] += 10

    with (
        receiving(after_task_publish, take_long),
        hearing(task_send_failed) as told,
        transaction.atomic(using=alias),
    ):
        results = [keep(number, alias) for number in range(8)]
        queries = CaptureQueriesContext(connections[alias]).__enter__()
    queries.__exit__(None, None, None)
    assert len(sent()) == 3
    assert [bool(one.send_error) for one in results] == [False] * 3 + [True] * 5
    assert "OUTBOX_SEND_TIMEOUT is over for this commit" in str(results[-1].send_error)
    assert [one["kept"] for one in told] == [True] * 5
    wait_for(lambda: table(alias).due().count() == 5)  # SQLite's clock has milliseconds
    words = [query["sql"].split()[0] for query in queries.captured_queries if TABLE in query["sql"]]
    assert words[0] == "SELECT"
    # The sends take so long that the rows are claimed on the way, and released all the same.
    assert words.count("DELETE") == 3
    assert words[-1] == "UPDATE"


SHORT: Any = {"socket_timeout": 0.2, "socket_connect_timeout": 0.2, "retry_on_timeout": False}


def test_plain_sends_of_a_commit_wait_once_for_a_silent_broker(
    make_app: MakeApp, silent: socket.socket, sent: Sent
) -> None:
    """The others fail at once with the error of the first; another broker gets its messages."""
    app = make_app(
        broker_url=f"redis://127.0.0.1:{silent.getsockname()[1]}/0",
        broker_transport_options={**ONE_TRY, **SHORT},
        task_publish_retry_policy=ONE_TRY,
    )
    task = app.tasks[add.name]
    with transaction.atomic():
        alone = task.delay_on_commit(1)
    each = count_calls(silent)
    assert each
    assert alone.send_error is not None
    with hearing(task_send_failed) as told, transaction.atomic():
        first, second = task.delay_on_commit(1), task.delay_on_commit(2)
        third = send_on_commit(chain(task.s(3), task.s(4)))
        other = add.delay_on_commit(5)
    assert count_calls(silent) <= each
    assert isinstance(first.send_error, OperationalError)
    assert second.send_error is third.send_error is first.send_error
    assert [one["error"] for one in told] == [first.send_error] * 3
    assert ids(sent()) == [other.id]
    with transaction.atomic():
        again = task.delay_on_commit(6)
    assert again.send_error is not first.send_error  # another commit asks again
    assert count_calls(silent) >= 1


def test_a_broker_of_the_call_that_is_gone_is_nobody_elses(
    make_app: MakeApp, silent: socket.socket, sent: Sent
) -> None:
    """Sends by a connection of one's own fail together, and those by the app's own go out."""
    url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    with Connection(url, transport_options={**ONE_TRY, **SHORT}) as nowhere, transaction.atomic():
        options: Any = {"connection": nowhere, "retry": False}
        lost = [add.apply_async_on_commit((number,), **options) for number in range(2)]
        result = add.delay_on_commit(3)
    assert lost[0].send_error is lost[1].send_error
    assert isinstance(lost[0].send_error, OperationalError)
    assert ids(sent()) == [result.id]


@pytest.mark.parametrize("outbox", [True, False])
def test_the_chords_of_a_commit_wait_once_for_a_silent_result_backend(
    outbox: bool, make_app: MakeApp, silent: socket.socket, settings: "Settings", sent: Sent
) -> None:
    """The second chord fails at once with the error of the first, and a plain task is sent."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 5.0}
    app = make_app(
        result_backend=f"redis://127.0.0.1:{silent.getsockname()[1]}/0",
        redis_socket_timeout=0.2,
        redis_socket_connect_timeout=0.2,
        result_backend_transport_options={"retry_policy": {"max_retries": 0}},
    )
    task = app.tasks[add.name]
    with transaction.atomic():
        first, second = (
            send_on_commit(chord([task.s(1), task.s(2)], task.s()), outbox=outbox) for _ in "12"
        )
    assert first.send_error is not None
    assert second.send_error is first.send_error
    assert sent() == []
    assert table("default").count() == (6 - 2 if outbox else 0)
