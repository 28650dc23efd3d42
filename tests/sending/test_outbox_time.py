"""How long an outbox send may take, and who sends its rows in long transactions and forks."""

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chord, group
from django.db import connections, transaction
from kombu.exceptions import OperationalError

from django_celery_safe import send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending import broker as broker_module
from django_celery_safe.sending import departure
from tests.app.models import Person
from tests.app.tasks import add
from tests.processes import dead_port, start_in_process
from tests.sending.conftest import MakeApp
from tests.sending.published import Published
from tests.sending.relaying import count_calls
from tests.servers import RedisServer, Server

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]

#: OUTBOX_SEND_TIMEOUT where a broker is silent, s.
TIMEOUT = 0.8
#: Time after which a commit hangs, s: Celery itself would wait for minutes, or without end.
HANGS = 30.0


def row_ids(using: str = "default") -> list[str]:
    """Return the task ids of the rows of a database."""
    rows = OutboxMessage.objects.using(using).order_by("pk")
    return list(rows.values_list("task_id", flat=True))


@pytest.fixture
def alias(db_alias: str) -> str:
    """The alias of a database of this test."""
    return db_alias


SENDS: dict[str, Callable[[Any, str], Any]] = {
    "task": lambda task, alias: task.apply_async_on_commit((1,), using=alias, outbox=True),
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


# Brokers that refuse, or say nothing.


@pytest.fixture
def patience(settings: "Settings") -> None:
    """Give a broker that is silent little time."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": TIMEOUT}


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_refuses_costs_next_to_nothing(
    scheme: str, alias: str, make_app: MakeApp, called_ports: list[int]
) -> None:
    """A commit asks it twice at the most: Celery pauses only before the third time."""
    port = dead_port()
    app = make_app(broker_url=f"{scheme}://127.0.0.1:{port}//")
    for count in range(1, 4):
        called_ports.clear()
        result = commit(lambda: SENDS["task"](app.tasks[add.name], alias), alias)
        assert isinstance(result.send_error, OperationalError)
        assert 1 <= called_ports.count(port) <= 2
        assert len(row_ids(alias)) == count


@pytest.mark.parametrize(
    ("url", "form", "rows"),
    [
        ("redis://127.0.0.1:{0}/0", "task", 1),
        ("redis://127.0.0.1:{0}/0", "chord", 2),
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


@pytest.mark.parametrize("form", ["task", "group"])
@pytest.mark.parametrize("name", ["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def test_after_a_silence_nobody_waits_again(
    name: str,
    form: str,
    alias: str,
    make_app: MakeApp,
    request: pytest.FixtureRequest,
    settings: "Settings",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For OUTBOX_SEND_TIMEOUT sends are left to the relay at once, whether or not it is back."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 1.5}  # of which connected sends get 90 %
    now = [100.0]
    monkeypatch.setattr(broker_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server: Server = request.getfixturevalue(f"{name}_server")
    app = make_app(broker_url=server.url, task_default_queue="outbox-time")

    def send() -> Any:
        return commit(lambda: SENDS[form](app.tasks[add.name], alias), alias)

    assert send().send_error is None
    with server.silence():
        errors = [send().send_error, send().send_error]
    now[0] += 1.4
    errors.append(send().send_error)
    assert [type(error) for error in errors] == [OperationalError] * 3
    told = ["the broker was silent a moment ago" in str(error) for error in errors]
    assert told == [False, True, True]
    rows = OutboxMessage.objects.using(alias)
    assert set(rows.values_list("attempts", flat=True)) == {0}
    left = row_ids(alias)
    assert len(left) == {"task": 3, "group": 15}[form]
    now[0] += 0.2  # the third did not prolong the pause
    assert (send().send_error, row_ids(alias)) == (None, left)


@pytest.mark.usefixtures("patience")
def test_a_large_message_to_a_silent_broker_is_given_up_in_time(
    make_app: MakeApp, redis_server: RedisServer, alias: str
) -> None:
    """A send that fills the socket's buffer waits as long as one that waits for an answer."""
    task, arguments = make_app().tasks[add.name], ("5 MB " * 1_000_000,)
    with redis_server.silence():
        result = commit(
            lambda: task.apply_async_on_commit(arguments, using=alias, outbox=True), alias
        )
    assert isinstance(result.send_error, OperationalError)
    assert row_ids(alias) == [result.id]


@pytest.mark.parametrize("scheme", ["redis", pytest.param("amqp", marks=pytest.mark.long)])
def test_the_next_of_several_brokers_gets_it(
    scheme: str, make_app: MakeApp, request: pytest.FixtureRequest, alias: str
) -> None:
    """If the first of a failover list refuses, the message goes to the second at once."""
    name = {"redis": "redis_server", "amqp": "rabbitmq_server"}[scheme]
    server: Server = request.getfixturevalue(name)
    url = f"{scheme}://127.0.0.1:{dead_port()}//;{server.url}"
    app = make_app(broker_url=url, task_default_queue="outbox-time")
    result = commit(lambda: SENDS["group"](app.tasks[add.name], alias), alias)
    assert (result.send_error, row_ids(alias)) == (None, [])


@pytest.mark.usefixtures("patience")
def test_threads_do_not_queue_up_at_a_silent_broker(
    make_app: MakeApp, silent: socket.socket, alias: str
) -> None:
    """Where there are more threads than connections, one waits for the broker, and no other."""
    broker = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    app, errors = make_app(broker_url=broker, broker_pool_limit=1), list[str]()
    assert app.pool.limit == 1  # of the whole process, and can't shrink while threads use it

    def run() -> None:
        result = commit(lambda: SENDS["task"](app.tasks[add.name], alias), alias)
        errors.append(str(result.send_error))
        connections[alias].close()

    in_threads(run, 3)
    assert count_calls(silent) == 1
    quick = ("broker_pool_limit is 1", "a moment ago")
    assert sum(any(text in error for text in quick) for error in errors) == 2
    assert len(row_ids(alias)) == len(errors) == 3


def send_to_silence(form: str, alias: str, backend: str, broker: str) -> str:
    """Send with a silent result backend or broker; in a process of its own, since it may hang."""
    app = Celery("quiet", set_as_current=False)
    app.conf.update(broker_url=broker, result_backend=backend)
    result = commit(lambda: SENDS[form](app.tasks[add.name], alias), alias)
    return type(result.send_error).__name__


@pytest.mark.parametrize(
    ("form", "backend", "broker", "error"),
    [
        ("task", "silent", "redis", "NoneType"),
        ("chord", "silent", "redis", "TimeoutError"),
        ("task", "rpc://", "silent", "OperationalError"),
    ],
)
@pytest.mark.usefixtures("patience")
def test_a_silent_result_backend_is_given_up_in_time(
    form: str,
    backend: str,
    broker: str,
    error: str,
    silent: socket.socket,
    redis_server: RedisServer,
    sqlite_immediate_alias: str,
) -> None:
    """A chord that it can't be told of stays in the outbox; other tasks need no result backend."""
    url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    urls = {"silent": url, "redis": redis_server.database_url(1)}
    arguments = (form, sqlite_immediate_alias, urls.get(backend, backend), urls[broker])
    with start_in_process(send_to_silence, *arguments) as process:
        assert process.result(timeout=HANGS) == error
    assert (row_ids(sqlite_immediate_alias) == []) == (error == "NoneType")


# Long transactions.


@pytest.mark.sql
@pytest.mark.parametrize("taken", [5, 1])
def test_rows_that_a_relay_has_are_left_to_it(
    taken: int, alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender publishes none of a canvas of which a relay has claimed a part meanwhile."""
    monkeypatch.setattr(departure, "GRACE", -60.0)  # the transaction took that much longer

    def claim() -> None:
        rows = OutboxMessage.objects.using(alias)
        assert len(rows.claim(taken, timedelta(seconds=60))) == taken

    with transaction.atomic(using=alias):
        transaction.on_commit(claim, using=alias)
        result = SENDS["group"](add, alias)
    assert sent() == []
    assert row_ids(alias) == [part.id for part in result]
    assert result.send_error is None


# Threads and forks.


def in_threads(function: Callable[[], None], count: int) -> None:
    """Run a function in several threads at once."""
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_around_a_fork(alias: str) -> list[str]:
    """Send before a fork, and then in both processes at once; return the errors."""

    def send() -> str:
        return repr(commit(lambda: SENDS["task"](add, alias), alias).send_error)

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


@pytest.mark.parametrize("name", ["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def test_a_fork_sends_by_connections_of_its_own(
    name: str, sqlite_immediate_alias: str, request: pytest.FixtureRequest
) -> None:
    """After a process that has published forks, both publish, and neither harms the other."""
    server: Server = request.getfixturevalue(f"{name}_server")
    changes = {"CELERY_BROKER_URL": server.url, "CELERY_TASK_DEFAULT_QUEUE": "outbox-time"}
    arguments = (send_around_a_fork, sqlite_immediate_alias)
    with start_in_process(*arguments, settings=changes) as process:
        assert process.result(timeout=60) == ["None"] * 42
    assert row_ids(sqlite_immediate_alias) == []
