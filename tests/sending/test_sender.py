"""The sends of one commit: their rows, the time that the commit waits, threads and forks."""

import gc
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.signals import after_task_publish
from django.db import DatabaseError, connections, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import OperationalError
from pytest_django import Settings

from django_celery_safe import send_on_commit
from django_celery_safe.databases import Now
from django_celery_safe.sending import commit as sender_module
from django_celery_safe.sending import publisher as broker_module
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import task_send_failed
from tests.app.models import Person
from tests.app.tasks import add
from tests.background import elsewhere
from tests.kinds import more_for_claim
from tests.listening import receiving
from tests.processes import dead_port, start_in_process, wait_for
from tests.sending.conftest import ONE_TRY, TABLE, MakeApp, count_calls, hearing, ids, table
from tests.sending.published import Sent
from tests.sending.test_outbox import keep, row_ids
from tests.servers import RabbitMQServer, RedisServer, Server
from tests.statements import raising

pytestmark = pytest.mark.django_db(transaction=True)


# The row decides.


@pytest.mark.sql
@pytest.mark.parametrize(("grace", "asks"), [(120.0, "SELECT"), (-1.0, "UPDATE")])
def test_a_savepoint_that_is_rolled_back_by_its_id_sends_nothing(
    grace: float,
    asks: str,
    alias: str,
    sent: Sent,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Django runs the callbacks all the same; a message whose row is not there is not sent.

    All sends of a commit look once for their rows, or claim them after a long transaction.
    """
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 30}
    monkeypatch.setattr(sender_module, "GRACE", grace)
    with transaction.atomic(using=alias):
        kept = [keep(number, alias) for number in range(10)]
        savepoint = connections[alias].savepoint()
        gone = keep(10, alias)
        send_on_commit(group(add.s(11), add.s(12)), using=alias, outbox=True)
        connections[alias].savepoint_rollback(savepoint)
        kept += [keep(number, alias) for number in range(10)]
        monkeypatch.setattr(sender_module, "GRACE", 120.0)  # otherwise a slow one claims them
        queries = CaptureQueriesContext(connections[alias]).__enter__()
    queries.__exit__(None, None, None)
    assert ids(sent()) == [result.id for result in kept]
    assert not table(alias).exists()
    assert gone.send_error is None
    words = [query["sql"].split()[0] for query in queries.captured_queries if TABLE in query["sql"]]
    more = more_for_claim(alias) if asks == "UPDATE" else 0
    assert words == [asks, *["SELECT"] * more, "DELETE"]


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


# Callbacks of others.


def test_what_a_callback_that_raises_kept_back_is_relayed(alias: str, sent: Sent) -> None:
    """Django runs no callback after it; the row is committed, and a relay finds it."""
    fail = raising(LookupError("a callback of the project's own"))
    with pytest.raises(LookupError), transaction.atomic(using=alias):
        transaction.on_commit(fail, using=alias)
        result = keep(1, alias)
    assert sent() == []
    table(alias).update(due_at=Now() - timedelta(seconds=1))
    Relay(alias).drain()
    assert ids(sent()) == [result.id]


def test_a_test_runs_only_the_callbacks_of_its_block(alias: str, sent: Sent) -> None:
    """A send from before captureOnCommitCallbacks() stays unsent, as does one rolled back in it."""
    inside = []

    class Case(TestCase):
        databases = frozenset({alias})

        def runTest(self) -> None:  # noqa: N802
            keep(1, alias)
            with self.captureOnCommitCallbacks(using=alias, execute=True) as callbacks:
                inside.append(keep(2, alias).id)
                with transaction.atomic(using=alias):
                    add.apply_async_on_commit((3,), using=alias)
                    transaction.set_rollback(True, using=alias)
                inside.append(add.apply_async_on_commit((4,), using=alias).id)
            assert len(callbacks) == len(inside)

    Case().debug()
    assert ids(sent()) == inside


# One wait for all.


def test_the_outbox_sends_of_a_commit_share_its_time(
    alias: str, sent: Sent, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow broker gets what OUTBOX_SEND_TIMEOUT allows for all; a relay has the rest at once."""
    monkeypatch.setattr(sender_module, "GRACE", 45.0)
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
    assert len(sent()) == 3
    assert [bool(one.send_error) for one in results] == [False] * 3 + [True] * 5
    assert "OUTBOX_SEND_TIMEOUT is over for this commit" in str(results[-1].send_error)
    assert [one["kept"] for one in told] == [True] * 5
    # The sends take so long that the rows are claimed on the way, and released all the same.
    wait_for(lambda: table(alias).due().count() == 5)  # SQLite's clock has milliseconds


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


# Brokers that refuse, or say nothing.

#: Time after which a commit hangs, s: Celery itself would wait for minutes, or without end.
HANGS = 30.0


SENDS: dict[str, Callable[[Any, str], Any]] = {
    "task": lambda task, alias: keep(1, alias, task),
    "group": lambda task, alias: send_on_commit(
        group(task.s(n) for n in range(5)), using=alias, outbox=True
    ),
    "chord": lambda task, alias: send_on_commit(
        chord([task.s(1), task.s(2)], task.s()), using=alias, outbox=True
    ),
}


def commit(send: Callable[[], Any], using: str) -> Any:
    """Return the result of a send in a transaction, whose commit takes no time to speak of."""
    began = time.perf_counter()
    with transaction.atomic(using=using):
        Person.everyone.using(using).create()
        result = send()
    assert time.perf_counter() - began < HANGS
    return result


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest) -> Server:
    """The private Redis, and RabbitMQ."""
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture
def patience(settings: Settings) -> None:
    """Give a broker that is silent little time."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 0.8}


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_refuses_costs_next_to_nothing(
    scheme: str, alias: str, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit asks it twice at the most: Celery pauses only before the third time."""
    called, connect = list[Any](), socket.socket.connect

    def recording(self: socket.socket, address: Any) -> None:
        called.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", recording)
    port = dead_port()
    app = make_app(broker_url=f"{scheme}://127.0.0.1:{port}//")
    for count in range(1, 4):
        called.clear()
        result = commit(lambda: keep(1, alias, app.tasks[add.name]), alias)
        assert isinstance(result.send_error, OperationalError)
        assert 1 <= called.count(("127.0.0.1", port)) <= 2
        assert len(row_ids(alias)) == count


@pytest.mark.parametrize(
    ("url", "form", "rows"),
    [
        ("redis://127.0.0.1:{0}/0", "task", 1),
        ("redis://127.0.0.1:{0}/0", "group", 5),
        ("redis://127.0.0.1:{0}/0;redis://127.0.0.1:{0}/1", "task", 1),
        ("amqp://127.0.0.1:{0}//", "group", 5),
        ("amqp://127.0.0.1:{0}//;amqp://127.0.0.1:{0}//other", "task", 1),
    ],
)
@pytest.mark.usefixtures("patience")
def test_a_silent_broker_is_waited_for_once(
    url: str, form: str, rows: int, make_app: MakeApp, silent: socket.socket, alias: str
) -> None:
    """The commit returns after OUTBOX_SEND_TIMEOUT, with the rows kept and nothing raised."""
    app = make_app(broker_url=url.format(silent.getsockname()[1]))
    result = commit(lambda: SENDS[form](app.tasks[add.name], alias), alias)
    assert isinstance(result.send_error, OperationalError)
    assert len(row_ids(alias)) == rows
    assert count_calls(silent) == 1


def test_after_a_silence_nobody_waits_again(
    alias: str, make_app: MakeApp, server: Server, settings: Settings, monkeypatch: Any
) -> None:
    """For OUTBOX_SEND_TIMEOUT sends are left to the relay at once, whether or not it is back."""
    timeout, now = 4.0 if isinstance(server, RabbitMQServer) else 1.5, [100.0]
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": timeout}
    monkeypatch.setattr(broker_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    app = make_app(broker_url=server.url, task_default_queue="outbox-time")

    def send() -> Any:
        return commit(lambda: SENDS["group"](app.tasks[add.name], alias), alias)

    assert send().send_error is None
    with server.silence():
        errors = [send().send_error, send().send_error]
    now[0] += timeout - 0.1
    errors.append(send().send_error)
    assert [type(error) for error in errors] == [OperationalError] * 3
    told = ["the broker was silent a moment ago" in str(error) for error in errors]
    assert told == [False, True, True]
    rows = table(alias)
    assert set(rows.values_list("attempts", flat=True)) == {0}
    left = row_ids(alias)
    assert len(left) == 15
    now[0] += 0.2  # the third did not prolong the pause
    assert (send().send_error, row_ids(alias)) == (None, left)


def test_the_next_of_several_brokers_gets_it(make_app: MakeApp, server: Server, alias: str) -> None:
    """If the first of a failover list refuses, the message goes to the second at once."""
    scheme = server.url.partition(":")[0]
    url = f"{scheme}://127.0.0.1:{dead_port()}//;{server.url}"
    app = make_app(broker_url=url, task_default_queue="outbox-time")
    result = commit(lambda: SENDS["group"](app.tasks[add.name], alias), alias)
    assert (result.send_error, row_ids(alias)) == (None, [])


@pytest.mark.usefixtures("patience")
def test_threads_do_not_queue_up_at_a_silent_broker(
    make_app: MakeApp, silent: socket.socket, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are more threads than connections, one waits for the broker, and no other."""
    monkeypatch.setattr(broker_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    broker = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    app = make_app(broker_url=broker, broker_pool_limit=1)
    assert app.pool.limit == 1  # of the whole process, and can't shrink while threads use it

    def send() -> str:
        result = commit(lambda: keep(1, alias, app.tasks[add.name]), alias)
        return str(result.send_error)

    sends = [elsewhere(alias, send) for _ in range(3)]
    errors = [one.result() for one in sends]
    assert count_calls(silent) == 1
    quick = ("broker_pool_limit is 1", "a moment ago")
    assert sum(any(text in error for text in quick) for error in errors) == 2
    assert len(row_ids(alias)) == len(errors) == 3


def send_to_silence(form: str, alias: str, backend: str, broker: str) -> str:
    """Send with a silent result backend or broker; in a process of its own, since it may hang."""
    app = Celery("quiet", set_as_current=False)
    app.conf.update(broker_url=broker, result_backend=backend)
    try:
        result = commit(lambda: SENDS[form](app.tasks[add.name], alias), alias)
    except Exception as error:
        return type(error).__name__
    return type(result.send_error).__name__


@pytest.mark.parametrize(("form", "error"), [("task", "NoneType"), ("chord", "TimeoutError")])
@pytest.mark.usefixtures("patience")
def test_a_silent_result_backend_is_given_up_in_time(
    form: str,
    error: str,
    silent: socket.socket,
    redis_server: RedisServer,
    sqlite_immediate_alias: str,
) -> None:
    """If its result backend does not answer, a chord is refused; a task is sent."""
    backend = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    arguments = (form, sqlite_immediate_alias, backend, redis_server.database_url(1))
    with start_in_process(send_to_silence, *arguments) as process:
        assert process.result(timeout=HANGS) == error
    assert row_ids(sqlite_immediate_alias) == []


# Long transactions.


@pytest.mark.sql
@pytest.mark.parametrize("taken", [5, 1])
def test_rows_that_a_relay_has_are_left_to_it(
    taken: int,
    alias: str,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sender publishes what no relay has claimed meanwhile, and warns of nothing."""
    monkeypatch.setattr(sender_module, "GRACE", -60.0)  # the transaction took that much longer

    def claim() -> None:
        assert len(table(alias).claim(taken, timedelta(seconds=60), "a relay's")) == taken

    with transaction.atomic(using=alias):
        transaction.on_commit(claim, using=alias)
        result = SENDS["group"](add, alias)
    wanted = [part.id for part in result]
    assert sorted(ids(sent())) == sorted(set(wanted) - set(row_ids(alias)))
    assert len(row_ids(alias)) == taken
    assert (result.send_error, caplog.records) == (None, [])


# Threads and forks.


def send_around_a_fork(alias: str) -> list[str]:
    """Send before a fork, and then in both processes at once; return the errors."""

    def send() -> str:
        return repr(commit(lambda: keep(1, alias), alias).send_error)

    errors = [send()]
    connections[alias].close()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        # Objects of the parent that the child drops must not end the parent's connections.
        gc.collect()
        os.write(writer, json.dumps([send() for _ in range(20)]).encode())
        os._exit(0)
    os.close(writer)
    errors += [send() for _ in range(20)]
    with open(reader) as pipe:
        errors += json.load(pipe)
    os.waitpid(child, 0)
    return [*errors, send()]


def test_a_fork_sends_by_connections_of_its_own(
    server: Server, sqlite_immediate_alias: str
) -> None:
    """After a process that has published forks, both publish, and neither harms the other."""
    changes = {"CELERY_BROKER_URL": server.url, "CELERY_TASK_DEFAULT_QUEUE": "outbox-time"}
    arguments = (send_around_a_fork, sqlite_immediate_alias)
    with start_in_process(*arguments, settings=changes) as process:
        assert process.result(timeout=60) == ["None"] * 42
    assert row_ids(sqlite_immediate_alias) == []
