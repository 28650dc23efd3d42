"""The relay in trouble: messages that can't be sent, and servers that are gone or out of order."""

import base64
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from celery import Celery, chord, group, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import after_task_publish
from django.db import connections, transaction
from kombu import Queue
from kombu.exceptions import OperationalError
from psycopg import sql

from django_celery_safe import SafeTask, conf, send_on_commit, single_instance
from django_celery_safe.databases import Now
from django_celery_safe.exceptions import ConfigurationError
from django_celery_safe.models import OutboxRelay
from django_celery_safe.sending import relay as relay_module
from django_celery_safe.sending import trouble as trouble_module
from django_celery_safe.sending.broker import BrokerGone, bounded_producer
from django_celery_safe.sending.outbox import outbox_aliases
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import message_dead, task_send_failed
from tests.app.tasks import add, total
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.kinds import KINDS
from tests.processes import dead_port, wait_for
from tests.sending.conftest import MakeApp, hearing
from tests.sending.published import Published, take_published
from tests.sending.test_outbox_messages import events_of
from tests.sending.test_relay import (
    drain,
    dying_sender,
    ids,
    leave,
    make_due,
    rabbitmq_app,
    relaying,
    table,
    take_from_rabbitmq,
    unique,
)
from tests.servers import PostgresServer, RabbitMQServer, RedisServer
from tests.servers.databases import registered

if TYPE_CHECKING:
    from pytest_django import Settings

Sent = Callable[[], list[Published]]

#: An argument that no log and no row's error may show.
SECRET = "hunter2"


@pytest.fixture(params=KINDS)
def alias(request: pytest.FixtureRequest, make_database: MakeDatabase) -> str:
    """The alias of a database of each kind."""
    return make_database(request.param)


@pytest.fixture
def outbox(make_database: MakeDatabase) -> str:
    """The alias of a database, where its kind makes no difference."""
    return make_database("sqlite-immediate")


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be stopped, paused and put out of order."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def own_task(own_redis: RedisServer, make_app: MakeApp) -> Any:
    """A task of an app whose broker is the test's own Redis."""
    return make_app(broker_url=own_redis.url, result_backend=None).tasks[add.name]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a relay wait for a tenth of a second where it would wait for many."""
    monkeypatch.setattr(relay_module, "IDLE", 0.05)
    monkeypatch.setattr(trouble_module, "SHORTEST_PAUSE", 0.05)
    monkeypatch.setattr(trouble_module, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(relay_module, "LONGEST_WAIT", 1.5)


class Proxy:
    """
    A TCP proxy in front of a server, which cuts connections when told to.

    Args:
        port: Of the server.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        #: How many more connections are cut, and after how many bytes of the client.
        self.cuts, self.after = 0, 0
        #: How many connections there were.
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """Close all connections that are open, as a server does that ends them."""
        while self._open:
            self._close(self._open.pop())

    def close(self) -> None:
        """Close everything."""
        self._close(self._listener)
        self.drop()

    def change(self, data: bytes) -> bytes:
        """Return what is passed on instead of some bytes."""
        return data

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.count += 1
                limit = None
                if self.cuts > 0:
                    self.cuts, limit = self.cuts - 1, self.after
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                for pair, most in (((client, server), limit), ((server, client), None)):
                    threading.Thread(target=self._pass, args=(*pair, most), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    break
                passed += len(data)
                sink.sendall(self.change(data))
        self._close(source)
        self._close(sink)

    @staticmethod
    def _close(one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Have a proxy during the block."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def messages_of(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """Return what the relay logged at a level."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and record.module in ("relay", "outbox", "trouble")
    ]


def attempts(alias: str) -> list[int]:
    """Return how many attempts each row has used."""
    return list(table(alias).order_by("pk").values_list("attempts", flat=True))


def assert_no_secret(*texts: str) -> None:
    """Check that an argument stands in no text, plain or as Redis has a body."""
    for text in texts:
        assert SECRET not in text
        assert base64.b64encode(SECRET.encode()).decode()[:6] not in text


# Messages that can't be sent.


def changed(properties: str, **changes: Any) -> str:
    """Return a row's properties with other ones; None removes one."""
    new = {**json.loads(properties), **changes}
    return json.dumps({name: value for name, value in new.items() if value is not None})


def with_option(properties: str, name: str, value: Any) -> str:
    """Return a row's properties with another option of its publication."""
    return changed(properties, options={**json.loads(properties)["options"], name: value})


POISON: dict[str, Callable[[str], str]] = {
    "broken JSON": lambda text: text[:-20],
    "no JSON": lambda text: SECRET,
    "nothing": lambda text: "",
    "another kind of JSON": lambda text: f'["{SECRET}"]',
    "no options": lambda text: changed(text, options=None),
    "no content type": lambda text: changed(text, content_type=None),
    "no headers": lambda text: changed(text, options={"exchange": "", "declare": []}),
    "odd options": lambda text: changed(text, options=[SECRET]),
    "unknown compression": lambda text: with_option(text, "compression", "squeeze"),
    "odd declaration": lambda text: with_option(text, "declare", [{SECRET: 1}]),
    "odd date": lambda text: with_option(
        text, "headers", {"eta": {"__type__": "datetime", "__value__": "tomorrow"}}
    ),
}


EDITS = {
    **{name: ("properties", change) for name, change in POISON.items()},
    "odd chord": ("chord_calls", lambda text: '[["nothing"]]'),
}


@pytest.mark.parametrize(("column", "change"), EDITS.values(), ids=EDITS.keys())
def test_a_poison_message_is_set_aside(
    column: str,
    change: Callable[[str], str],
    outbox: str,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is tried again later, and dead in the end; all others of its batch are sent."""
    caplog.set_level(logging.DEBUG, "django_celery_safe")
    others = leave(outbox, 2)
    with dying_sender(outbox):
        bad = add.apply_async_on_commit(
            (SECRET,), {"y": SECRET}, using=outbox, outbox=True, argsrepr="()", kwargsrepr="{}"
        )
    make_due(outbox)
    others += leave(outbox, 2)
    row = table(outbox).get(task_id=bad.id)
    table(outbox).filter(pk=row.pk).update(**{column: change(getattr(row, column))})

    with hearing(task_send_failed, message_dead) as told:
        drain(outbox, attempts=2)
        assert ids(sent()) == others
        assert table(outbox).get().attempts == 1
        assert drain(outbox, attempts=2) == 0
        assert table(outbox).get().attempts == 1
        make_due(outbox)
        drain(outbox, attempts=2)
    (dead,) = table(outbox).dead()
    assert (dead.task_id, dead.attempts, sent()) == (bad.id, 2, [])
    assert [said["signal"] for said in told] == [task_send_failed, message_dead]
    assert [said["task_id"] for said in told] == [bad.id] * 2
    assert {said["kept"] for said in told} == {True}
    assert str(told[1]["error"]) in dead.error
    assert [len(messages_of(caplog, level)) for level in ("WARNING", "ERROR")] == [1, 1]
    assert_no_secret(dead.error, caplog.text)


@pytest.mark.parametrize("change", ["content type", "body"])
def test_what_only_a_worker_can_judge_is_sent(change: str, outbox: str, sent: Sent) -> None:
    """The relay does not read bodies: garbage, or an unknown content type, goes to the worker."""
    wanted = leave(outbox)
    row = table(outbox).get()
    if change == "body":
        table(outbox).update(body=b"\xff\x00")
    else:
        properties = changed(row.properties, content_type="application/unheard-of")
        table(outbox).update(properties=properties)
    assert drain(outbox) == 1
    (message,) = sent()
    assert [message.id] == wanted
    if change == "body":
        assert message.data == b"\xff\x00"
    else:
        assert message.content_type == "application/unheard-of"


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_redis_key_of_another_type(
    is_declared: bool,
    outbox: str,
    broker: Celery,
    redis_server: RedisServer,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages to that one queue fail, without their content in the error; the others go out."""
    relay = Relay(outbox)
    if is_declared:
        leave(outbox, queue="odd")
        relay.drain()
        sent()
    with redis_server.client(db=1) as client:
        client.set("odd", "no list")
    with dying_sender(outbox):
        add.apply_async_on_commit((SECRET,), using=outbox, outbox=True, queue="odd", argsrepr="()")
    make_due(outbox)
    others = leave(outbox, 3)
    relay.drain()
    relay.close()
    assert set(ids(sent())) == set(others)
    (row,) = table(outbox).all()
    assert row.attempts == 1
    assert "WRONGTYPE" in row.error
    assert_no_secret(row.error, caplog.text)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["PRECONDITION_FAILED", "NOT_FOUND"])
def test_what_rabbitmq_refuses(
    fault: str, outbox: str, make_app: MakeApp, rabbitmq_server: RabbitMQServer
) -> None:
    """A queue declared otherwise, or a missing exchange, costs its messages an attempt only."""
    app = rabbitmq_app(make_app, rabbitmq_server)
    task = app.tasks[add.name]
    options: dict[str, Any] = {"exchange": "missing", "routing_key": "anywhere"}
    name = f"odd-{os.urandom(4).hex()}"
    if fault == "PRECONDITION_FAILED":
        with app.connection_for_write() as connection:
            Queue(name, queue_arguments={"x-max-length": 7})(connection.default_channel).declare()
        app.amqp.queues.add(Queue(name))
        options = {"queue": name}
    wanted = leave(outbox, 2, task=task)
    bad = leave(outbox, 2, task=task, **options)
    wanted += leave(outbox, 2, task=task)
    table(outbox).filter(task_id__in=bad).update(due_at=Now() - timedelta(minutes=1))
    assert drain(outbox) == 4
    assert set(table(outbox).values_list("task_id", flat=True)) == set(bad)
    assert [(row.attempts, fault in row.error) for row in table(outbox).all()] == [(1, True)] * 2
    assert set(take_from_rabbitmq(app)) == set(wanted)
    if fault == "PRECONDITION_FAILED":
        with app.connection_for_write() as connection:
            Queue(name)(connection.default_channel).delete()


# A broker that is gone.


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """It refuses connections."""
    server.stop()
    yield
    server.start()


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """It accepts connections and is silent."""
    server.pause()
    yield
    server.resume()


@contextmanager
def out_of_memory(server: RedisServer) -> Iterator[None]:
    """It takes nothing more."""
    with server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextmanager
def read_only(server: RedisServer) -> Iterator[None]:
    """It is the replica of a master that is not there."""
    with server.client() as client:
        client.replicaof(server.host, dead_port())
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def other_password(server: RedisServer) -> Iterator[None]:
    """It wants a password that the relay has not."""
    with server.client() as client:
        client.config_set("requirepass", SECRET)
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        client.config_set("requirepass", "")


TROUBLES = [stopped, paused, out_of_memory, read_only, other_password]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "was_connected",
    [pytest.param(False, id="new", marks=pytest.mark.long), pytest.param(True, id="connected")],
)
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_a_broker_that_is_gone_is_waited_for(
    trouble: Callable[[RedisServer], Any],
    was_connected: bool,
    outbox: str,
    own_redis: RedisServer,
    own_task: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No attempt is used, the rows are given back, it is told once; then everything is sent."""
    pauses: list[float] = []
    original = trouble_module.Trouble.pause

    def pause(self: Any, error: Exception) -> float:
        pauses.append(original(self, error))
        return pauses[-1]

    monkeypatch.setattr(trouble_module.Trouble, "pause", pause)
    with ExitStack() as stack:
        if was_connected:
            stack.enter_context(relaying(outbox))
            leave(outbox, 2, task=own_task)
            wait_for(lambda: not table(outbox).exists())
            assert len(take_published(own_redis, 0)) == 2
        with trouble(own_redis):
            wanted = leave(outbox, 3, task=own_task)
            if not was_connected:
                stack.enter_context(relaying(outbox))
            with suppress(TimeoutError):
                wait_for(lambda: len(pauses) > 3 or any(attempts(outbox)), 20)
            assert attempts(outbox) == [0] * 3
            assert len(pauses) > 3
            assert pauses[:3] == [0.05, 0.1, 0.1]
            (error,) = messages_of(caplog, "ERROR")
            assert "broker can't be reached" in error
            assert outbox in error
        wait_for(lambda: not table(outbox).exists(), 20)
    assert len(messages_of(caplog, "ERROR")) == 1
    assert [text for text in messages_of(caplog, "WARNING") if "relayed again" in text] != []
    published = ids(take_published(own_redis, 0))
    # A paused server may have got what nobody could tell.
    assert set(published) == set(wanted)
    assert trouble is paused or len(published) == 3


@pytest.mark.usefixtures("quick")
def test_relays_side_by_side_wait_for_a_broker(
    outbox: str, own_redis: RedisServer, own_task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that finds nothing due, since the other has claimed it, does not say that all is well."""
    with paused(own_redis):
        wanted = leave(outbox, 3, task=own_task)
        with relaying(outbox), relaying(outbox):
            # Each has found the broker silent; further log records come within a few waits.
            with suppress(TimeoutError):
                wait_for(lambda: messages_of(caplog, "WARNING"), 3)
            assert messages_of(caplog, "WARNING") == []
            assert len(messages_of(caplog, "ERROR")) <= 2
            assert attempts(outbox) == [0] * 3
    drain(outbox)
    assert set(ids(take_published(own_redis, 0))) == set(wanted)


def test_rows_are_given_back_at_once(outbox: str, own_redis: RedisServer, own_task: Any) -> None:
    """Another relay need not wait for a lease; drain() raises the error."""
    leave(outbox, 3, task=own_task)
    own_redis.stop()
    with pytest.raises(BrokerGone, match="OperationalError"):
        drain(outbox)
    wait_for(lambda: table(outbox).due().count() == 3, 20)
    own_redis.start()
    assert drain(outbox) == 3


def test_a_fault_that_lasts_is_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause doubles up to half a minute; a new fault after a good time is told at once."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trouble = trouble_module.Trouble("default")
    pauses = []
    for _ in range(10):
        pauses.append(trouble.pause(BrokerGone(OSError("refused"))))
        now[0] += pauses[-1]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert sum(pauses[:-1]) > 120
    assert len(messages_of(caplog, "ERROR")) == 3
    trouble.is_over()
    trouble.is_over()
    assert len(messages_of(caplog, "WARNING")) == 1
    assert trouble.pause(BrokerGone(OSError("refused"))) == 0.5
    assert len(messages_of(caplog, "ERROR")) == 4


def test_a_restart_costs_nothing(outbox: str, own_redis: RedisServer, own_task: Any) -> None:
    """A relay whose connection was closed meanwhile connects anew, and no attempt is used."""
    relay = Relay(outbox)
    leave(outbox, 2, task=own_task)
    relay.drain()
    own_redis.restart()
    wanted = leave(outbox, 2, task=own_task)
    with hearing(task_send_failed) as failures:
        relay.drain()
    relay.close()
    assert failures == []
    assert ids(take_published(own_redis, 0)) == wanted


@pytest.mark.parametrize("kind", ["sends", "group"])
def test_a_message_that_breaks_the_connection_costs_the_others_nothing(
    kind: str, outbox: str, own_redis: RedisServer, own_task: Any
) -> None:
    """The broker answers before it and after it: it fails alone, at the commit and in a relay."""
    with own_redis.client() as client:
        client.config_set("proto-max-bulk-len", 2**20)
    parts = [own_task.s(text) for text in ("first", "x" * 2**21, "third")]
    with hearing(task_send_failed) as failures:
        with transaction.atomic(using=outbox):
            if kind == "group":
                results = list(send_on_commit(group(parts), using=outbox, outbox=True))
            else:
                results = [send_on_commit(part, using=outbox, outbox=True) for part in parts]
        first, broken, third = [result.id for result in results]
        # The broker may have some messages of the group already, so they may come twice.
        assert set(ids(take_published(own_redis, 0))) == {first, third}
        relay = Relay(outbox)
        relay.drain()
        relay.close()
    assert [failure["task_id"] for failure in failures] == [broken, broken]
    row = table(outbox).get()
    assert (row.task_id, row.attempts) == (broken, 1)


@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("after", [300, 3000, 12000])
def test_a_connection_that_is_cut_in_mid_batch(
    cuts: int, after: int, outbox: str, own_redis: RedisServer, make_app: MakeApp
) -> None:
    """Unconfirmed messages are published again: none is missing, and no attempt is used."""
    with proxy_to(own_redis.port) as proxy:
        app = make_app(broker_url=f"redis://127.0.0.1:{proxy.port}/0", result_backend=None)
        wanted = leave(outbox, 30, task=app.tasks[add.name])
        proxy.cuts, proxy.after = cuts, after
        with hearing(task_send_failed) as failures, suppress(BrokerGone):
            drain(outbox)
        assert failures == []
        make_due(outbox)
        drain(outbox)
        assert proxy.cuts == 0
    assert set(ids(take_published(own_redis, 0))) == set(wanted)
    assert not table(outbox).exists()


@pytest.mark.long
@pytest.mark.parametrize("after", [600, 9000])
def test_a_connection_to_rabbitmq_that_is_cut_in_mid_batch(
    after: int, outbox: str, rabbitmq_server: RabbitMQServer, make_app: MakeApp
) -> None:
    """One message may be there twice, none is missing, no attempt is used."""
    with proxy_to(rabbitmq_server.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
        app = rabbitmq_app(make_app, rabbitmq_server, broker_write_url=url)
        wanted = leave(outbox, 20, task=app.tasks[add.name])
        proxy.cuts, proxy.after = 1, after
        with hearing(task_send_failed) as failures, suppress(BrokerGone):
            drain(outbox)
        assert failures == []
        drain(outbox)
        assert proxy.cuts == 0
        published = take_from_rabbitmq(app)
    assert set(published) == set(wanted)
    assert len(published) <= 21
    assert not table(outbox).exists()


@pytest.mark.long
def test_an_idle_connection_that_rabbitmq_closed(
    outbox: str, rabbitmq_server: RabbitMQServer, make_app: MakeApp
) -> None:
    """It opens anew, and nobody notices."""
    with proxy_to(rabbitmq_server.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
        app = rabbitmq_app(make_app, rabbitmq_server, broker_write_url=url)
        task = app.tasks[add.name]
        relay = Relay(outbox)
        wanted = leave(outbox, 2, task=task)
        relay.drain()
        proxy.drop()
        wanted += leave(outbox, 2, task=task)
        with hearing(task_send_failed) as failures:
            relay.drain()
        relay.close()
        assert (failures, proxy.count) == ([], 2)
    assert take_from_rabbitmq(app) == wanted


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_a_silent_rabbitmq_is_waited_for(
    outbox: str,
    rabbitmq_server: RabbitMQServer,
    make_app: MakeApp,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No attempt is used; everything is sent when it answers again."""
    app = rabbitmq_app(make_app, rabbitmq_server)
    with relaying(outbox):
        wanted = leave(outbox, 1, task=app.tasks[add.name])
        wait_for(lambda: not table(outbox).exists())
        rabbitmq_server.pause()
        try:
            wanted += leave(outbox, 3, task=app.tasks[add.name])
            wait_for(lambda: messages_of(caplog, "ERROR") or any(attempts(outbox)), 30)
            assert attempts(outbox) == [0] * 3
        finally:
            rabbitmq_server.resume()
        wait_for(lambda: not table(outbox).exists(), 30)
    assert len(messages_of(caplog, "ERROR")) == 1
    assert set(take_from_rabbitmq(app)) == set(wanted)


def test_a_transport_that_is_not_installed_uses_up_no_attempt(
    outbox: str, own_redis: RedisServer, own_task: Any
) -> None:
    """A relay whose environment lacks the broker's client gives all rows back."""
    leave(outbox, 2, task=own_task)
    own_task.app.conf.broker_url = "nothing-here://localhost"
    with pytest.raises(BrokerGone):
        drain(outbox)
    assert attempts(outbox) == [0, 0]
    assert table(outbox).due().count() == 2


@pytest.mark.parametrize("count", [1, 2])
def test_one_broker_that_is_gone_does_not_keep_the_other_waiting(
    count: int, outbox: str, own_redis: RedisServer
) -> None:
    """With two apps, the messages of the one whose broker is there go out, whichever it is."""
    names = ("here", "there")
    gone = f"redis://127.0.0.1:{dead_port()}/0"
    # The order in which a relay takes its apps is no certain one.
    for answering in names * 2:
        with ExitStack() as stack:
            left = {}
            for name in names:
                app = Celery(name, set_as_current=False)
                stack.callback(app.close)
                url = own_redis.url if name == answering else gone
                app.conf.update(broker_url=url, result_backend=None)
                left[name] = leave(outbox, count, task=app.tasks[add.name])
            with pytest.raises(BrokerGone):
                drain(outbox)
            assert ids(take_published(own_redis, 0)) == left.pop(answering)
            assert attempts(outbox) == [0] * count
            assert set(table(outbox).values_list("task_id", flat=True)) == set(*left.values())
            table(outbox).discard()


def test_what_a_relay_did_not_reach_is_given_back(
    outbox: str,
    redis_server: RedisServer,
    sent: Sent,
    settings: "Settings",
    redis_cache_settings: MakeRedisCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If half of the lease is over in mid-batch, the batch's other rows become due at once."""
    settings.CACHES = redis_cache_settings("django-redis")
    clock, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    with redis_server.client(db=1) as client:
        client.set("odd", "no list")
    # Messages that are published one by one.
    leave(outbox, task=unique, queue="odd")
    wanted = leave(outbox, 3, task=unique)

    def take_long(**_: Any) -> None:
        assert not table(outbox).due().exists()
        ahead[0] += relay_module.LEASE.total_seconds() / 2

    relay = Relay(outbox)
    task_send_failed.connect(take_long, weak=False)
    try:
        assert (relay.relay_batch(), relay.count, ahead) == (4, 0, [30.0])
    finally:
        task_send_failed.disconnect(take_long)
    wait_for(lambda: table(outbox).due().count() == 3, 20)
    assert (relay.relay_batch(), relay.count) == (3, 3)
    relay.close()
    assert ids(sent()) == wanted


def test_a_batch_that_a_time_limit_ends_is_given_back(
    outbox: str, own_redis: RedisServer, own_task: Any
) -> None:
    """Celery's SoftTimeLimitExceeded in mid-batch, as in the shipped task, leaves all of it due."""
    relay = Relay(outbox)
    leave(outbox, task=own_task)
    relay.drain()
    take_published(own_redis, 0)
    wanted = leave(outbox, 3, task=own_task)

    def end(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    def end_when_claimed() -> None:
        try:
            wait_for(lambda: not table(outbox).due().exists())
            threading.Event().wait(1)  # by then the relay waits for the broker's answer
        finally:
            connections[outbox].close()
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=end_when_claimed)
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with paused(own_redis):
            thread.start()
            with pytest.raises(SoftTimeLimitExceeded):
                relay.relay_batch()
            wait_for(lambda: table(outbox).due().count() == 3, 20)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        relay.close()
    assert attempts(outbox) == [0] * 3
    assert drain(outbox) == 3
    # The paused server may have got what nobody could tell.
    assert set(ids(take_published(own_redis, 0))) == set(wanted)


# A database that is gone.


@contextmanager
def once_published(act: Callable[[], object]) -> Iterator[None]:
    """Do something right after the first publication of the block."""
    left = [act]

    def do(**_: Any) -> None:
        if left:
            left.pop()()

    after_task_publish.connect(do, weak=False)
    try:
        yield
    finally:
        after_task_publish.disconnect(do)
    assert not left


def test_a_body_that_cant_be_read_silences_no_event(
    outbox: str, own_redis: RedisServer, make_app: MakeApp
) -> None:
    """Events are sent even for a message that can't be decoded, and for those after it."""
    app = make_app(broker_url=own_redis.url, result_backend=None, task_send_sent_event=True)
    wanted = leave(outbox, 3, task=app.tasks[add.name])
    first = table(outbox).order_by("pk").first()
    assert first is not None
    table(outbox).filter(pk=first.pk).update(body=b"\xff\x00")
    with events_of(app) as events, hearing(after_task_publish):
        assert drain(outbox) == 3
        wait_for(lambda: len(events()) == 3)
        assert {event["uuid"] for event in events()} == set(wanted)


@pytest.mark.usefixtures("quick")
def test_the_events_of_a_batch_cost_one_wait(
    outbox: str, own_redis: RedisServer, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that falls silent before Celery's events are sent is asked for the first alone."""
    app = make_app(broker_url=own_redis.url, result_backend=None, task_send_sent_event=True)
    wanted = leave(outbox, 5, task=app.tasks[add.name])
    with hearing(after_task_publish) as told, once_published(own_redis.pause):
        assert drain(outbox) == 5
    own_redis.resume()
    assert [said["headers"]["id"] for said in told] == wanted
    assert not table(outbox).exists()
    (line,) = [text for text in caplog.messages if "its receivers could not be notified" in text]
    assert wanted[0] in line


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", ["ended", "stopped"])
def test_a_database_gone_in_mid_relay(
    fault: str,
    make_database: MakeDatabase,
    postgres_server: PostgresServer,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Published rows are deleted when the database is back, and not sent again."""
    alias = make_database("postgres")
    wanted = leave(alias, 5)
    is_gone = threading.Event()

    def take_away() -> None:
        if fault == "stopped":
            postgres_server.stop()
        else:
            name = connections.settings[alias]["NAME"]
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            with psycopg.connect(postgres_server.url) as connection:
                connection.execute(ended, [name])
        is_gone.set()

    connections[alias].close()
    try:
        with once_published(take_away), relaying(alias):
            assert is_gone.wait(30)
            if fault == "stopped":
                wait_for(lambda: messages_of(caplog, "ERROR"), 20)
                postgres_server.start()
            wait_for(lambda: not table(alias).exists(), 20)
            late = leave(alias)
            wait_for(lambda: not table(alias).exists(), 20)
    finally:
        postgres_server.start()
    assert ids(sent()) == [*wanted, *late]
    # A session that was ended is replaced at once.
    outages = int(fault == "stopped")
    errors, warnings = messages_of(caplog, "ERROR"), messages_of(caplog, "WARNING")
    assert len([text for text in errors if "database can't be reached" in text]) == outages
    assert len([text for text in warnings if "relayed again" in text]) == outages


@pytest.mark.parametrize("races", [5, 50], ids=["a few", "more than one turn repeats"])
def test_a_lost_race_is_no_outage(
    races: int, postgres_alias: str, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    """Under SERIALIZABLE others are faster now and then; the relay sends, and warns of nothing."""
    name = table(postgres_alias).model._meta.db_table
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute(
            f"""
            CREATE SEQUENCE races;
            CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('races') <= {races} THEN
                    RAISE 'could not serialize access' USING ERRCODE = 'serialization_failure';
                END IF;
                RETURN NEW;
            END $$;
            """
        )
        wanted = leave(postgres_alias)
        cursor.execute(
            f"CREATE TRIGGER lose BEFORE UPDATE ON {name} FOR EACH ROW EXECUTE FUNCTION lose()"
        )
    stop = threading.Event()

    def stop_relay(**kwargs: Any) -> None:
        stop.set()

    after_task_publish.connect(stop_relay)
    try:
        with closing(Relay(postgres_alias)) as relay:
            relay.run(stop)
    finally:
        after_task_publish.disconnect(stop_relay)
    assert ids(sent()) == wanted
    assert not messages_of(caplog, "ERROR") + messages_of(caplog, "WARNING")


@contextmanager
def taking_no_writes(alias: str, server: PostgresServer) -> Iterator[None]:
    """Let a database be read only for who connects to it, as a replica is."""
    name = sql.Identifier(connections.settings[alias]["NAME"])

    def alter(change: str) -> None:
        with server.connect() as connection:
            connection.execute(sql.SQL("ALTER DATABASE {} ").format(name) + sql.SQL(change))
        connections[alias].close()

    alter("SET default_transaction_read_only = on")
    try:
        yield
    finally:
        alter("RESET default_transaction_read_only")


@pytest.mark.usefixtures("quick")
def test_a_database_that_takes_no_writes_is_waited_for(
    make_database: MakeDatabase,
    postgres_server: PostgresServer,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a failover, say: a relay tells of it once and goes on when it may write."""
    alias = make_database("postgres")
    wanted = leave(alias, 2)
    with ExitStack() as stack:
        with taking_no_writes(alias, postgres_server):
            stack.enter_context(relaying(alias))
            wait_for(lambda: messages_of(caplog, "ERROR"), 20)
        wait_for(lambda: not table(alias).exists(), 20)
    assert ids(sent()) == wanted
    (error,) = messages_of(caplog, "ERROR")
    assert "database can't be reached" in error
    assert "read-only transaction" in error
    assert len([text for text in messages_of(caplog, "WARNING") if "relayed again" in text]) == 1


def test_a_replica_has_no_outbox(
    make_database: MakeDatabase, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that takes no writes is left alone, which the log says; others are not."""
    caplog.set_level(logging.INFO, "django_celery_safe")
    alias, other = make_database("postgres"), make_database("postgres")
    assert {alias, other} <= set(outbox_aliases())
    assert messages_of(caplog, "INFO") == []
    with taking_no_writes(alias, postgres_server):
        found = outbox_aliases()
    assert other in found
    assert alias not in found
    line = f"The outbox of {alias!r} is left alone, since it is read-only."
    assert messages_of(caplog, "INFO") == [line]


def test_an_alias_that_stands_for_another_has_no_outbox(alias: str) -> None:
    """Nor has a replica by TEST MIRROR, whose rows are another's, or Django's stand-in for none."""
    mirror = {**connections.settings[alias], "TEST": {"MIRROR": alias}}
    with registered("mirror", mirror), registered("nothing", {}):
        assert table("mirror").count() == 0
        assert connections["nothing"].vendor == "unknown"
        found = set(outbox_aliases())
    assert alias in found
    assert not found & {"mirror", "nothing"}


def test_a_database_without_autocommit_is_refused(alias: str) -> None:
    """The changes of a relay there would not be committed."""
    manual = {**connections.settings[alias], "AUTOCOMMIT": False}
    with registered("manual", manual), pytest.raises(ConfigurationError) as caught:
        Relay("manual")
    assert str(caught.value).startswith("The database 'manual' has AUTOCOMMIT off")


def test_a_database_whose_insert_returns_nothing(
    outbox: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without RETURNING, which MySQL alone may lack, the send is an error; nothing is sent."""
    # A SQLite of before 3.35, as Django sees it.
    features = type(connections[outbox].features)
    monkeypatch.setattr(features, "can_return_rows_from_bulk_insert", False)
    why = "can't hold an outbox, since its INSERT returns no keys"
    with pytest.raises(ConfigurationError, match=why), transaction.atomic(using=outbox):
        add.apply_async_on_commit((1,), using=outbox, outbox=True)
    assert not table(outbox).exists()
    assert sent() == []


def test_one_database_that_is_gone_does_not_keep_the_others_waiting(
    make_database: MakeDatabase,
    sent: Sent,
    settings: "Settings",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shipped task relays the outboxes that it can, and fails all the same."""
    from django_celery_safe.tasks import relay_outbox

    settings.DATABASE_ROUTERS = ["tests.routing.NotInDefault"]
    gone, there = make_database("postgres"), make_database("sqlite-immediate")
    wanted = leave(there)
    connections[gone].close()
    monkeypatch.setitem(connections.settings[gone], "PORT", str(dead_port()))
    connections[gone].settings_dict["PORT"] = str(dead_port())
    with suppress(Exception):
        relay_outbox()
    assert ids(sent()) == wanted
    assert OutboxRelay.objects.using(there).exists()


# Others that are gone.


def test_a_lock_store_that_is_gone(
    outbox: str,
    own_redis: RedisServer,
    sent: Sent,
    settings: "Settings",
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tasks with unique_until are put off, without an attempt and with one line; others go out."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": own_redis.url}
    settings.CACHES = {"default": cache}
    before, late, after = leave(outbox), leave(outbox, 3, task=unique), leave(outbox)
    own_redis.stop()
    with hearing(task_send_failed) as failures:
        assert drain(outbox) == 2
    assert ids(sent()) == [*before, *after]
    assert (failures, attempts(outbox)) == ([], [0] * 3)
    assert not table(outbox).due().exists()
    (line,) = messages_of(caplog, "WARNING")
    assert "3 message(s) stay in the outbox for another 10 s" in line
    own_redis.start()
    make_due(outbox)
    assert drain(outbox) == 3
    assert ids(sent()) == late


def test_a_result_backend_that_is_gone(
    outbox: str,
    own_redis: RedisServer,
    redis_server: RedisServer,
    make_app: MakeApp,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A chord, of which it has to know first, is put off in the same way; others go out."""
    app = make_app(result_backend=own_redis.url)
    task = app.tasks[add.name]
    before = leave(outbox, task=task)
    with dying_sender(outbox):
        result = send_on_commit(
            chord([task.s(1), task.s(2)], app.tasks[total.name].s()), using=outbox, outbox=True
        )
    make_due(outbox)
    after = leave(outbox, task=task)
    own_redis.stop()
    started_at = time.monotonic()
    assert drain(outbox) == 2
    # One connection is refused; many tries would use up the lease.
    assert time.monotonic() - started_at < 10
    assert ids(take_published(redis_server)) == [*before, *after]
    assert attempts(outbox) == [0] * 2
    assert not table(outbox).due().exists()
    (line,) = messages_of(caplog, "WARNING")
    assert "2 message(s) stay in the outbox for another 10 s" in line
    assert "chord" in line
    own_redis.start()
    make_due(outbox)
    assert drain(outbox) == 2
    assert ids(take_published(redis_server)) == [part.id for part in result.parent]


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end", cache="elsewhere")
def unique_elsewhere(number: int) -> None:
    """Be sent once until it ends, by another store of locks."""


def leave_chord(alias: str, app: Celery, part: Any) -> list[str]:
    """Leave a chord of two such tasks in the outbox that is due; return their ids."""
    header = [part.s(10), part.s(11)]
    with dying_sender(alias):
        result = send_on_commit(chord(header, app.tasks[total.name].s()), using=alias, outbox=True)
    make_due(alias)
    return [member.id for member in result.parent]


@pytest.mark.parametrize("gone", ["result backend", "lock store"])
def test_only_those_wait_that_need_what_is_gone(
    gone: str,
    outbox: str,
    own_redis: RedisServer,
    redis_server: RedisServer,
    make_app: MakeApp,
    settings: "Settings",
) -> None:
    """A chord of unique tasks needs both, and holds up none that needs only the other of them."""
    urls = {
        "result backend": redis_server.database_url(2),
        "lock store": redis_server.database_url(3),
        gone: own_redis.url,
    }
    settings.CACHES = {
        name: {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
        for name, url in [
            ("default", urls["lock store"]),
            ("elsewhere", redis_server.database_url(4)),
        ]
    }
    app = make_app(result_backend=urls["result backend"])
    plain, once, once_elsewhere = (app.tasks[task.name] for task in (add, unique, unique_elsewhere))
    both = leave_chord(outbox, app, once)
    locked, elsewhere = leave(outbox, 2, task=once), leave(outbox, 2, task=once_elsewhere)
    whole = leave_chord(outbox, app, plain)
    others = leave(outbox, 2, task=plain)
    waiting = whole if gone == "result backend" else locked
    wanted = {*locked, *elsewhere, *whole, *others} - set(waiting)

    own_redis.stop()
    assert drain(outbox) == 6
    assert set(ids(take_published(redis_server))) == wanted
    assert set(table(outbox).values_list("task_id", flat=True)) == {*both, *waiting}
    assert attempts(outbox) == [0] * 4
    own_redis.start()
    make_due(outbox)
    assert drain(outbox) == 4
    assert set(ids(take_published(redis_server))) == {*both, *waiting}


def test_connections_that_are_all_in_use(
    outbox: str, make_app: MakeApp, redis_server: RedisServer
) -> None:
    """A send that gets none says so, with the setting that bounds them, and a relay has its row."""
    app = make_app(broker_pool_limit=1)
    task = app.tasks[add.name]
    with bounded_producer(app, conf.send_timeout()):
        result = task.apply_async_on_commit((1,), using=outbox, outbox=True)
    assert isinstance(result.send_error, OperationalError)
    assert str(result.send_error) == (
        "all connections of this process to the broker are in use (broker_pool_limit is 1)"
    )
    assert attempts(outbox) == [0]
    after = task.apply_async_on_commit((2,), using=outbox, outbox=True)
    assert after.send_error is None
    make_due(outbox)
    assert drain(outbox) == 1
    assert ids(take_published(redis_server)) == [after.id, result.id]
