"""The relay in trouble: messages that can't be sent, and servers that are gone or out of order."""

import base64
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery, group
from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, connections, transaction
from kombu import Queue
from psycopg import sql
from pytest_django import Settings

from django_celery_safe import send_on_commit
from django_celery_safe.databases import Now
from django_celery_safe.exceptions import ConfigurationError
from django_celery_safe.models import OutboxRelay
from django_celery_safe.sending import relay as relay_module
from django_celery_safe.sending.outbox import outbox_aliases
from django_celery_safe.sending.publisher import BrokerGone
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import message_dead, task_send_failed
from tests.app.tasks import add
from tests.conftest import MakeDatabase
from tests.listening import receiving
from tests.locks.lines import line_to
from tests.processes import dead_port, wait_for
from tests.sending.conftest import MakeApp, dying_sender, hearing, ids, make_due, table
from tests.sending.published import RabbitMQQueues, Sent, take_published
from tests.sending.test_relay import drain, leave, relaying
from tests.sending.test_unique import once
from tests.servers import PostgresServer, RabbitMQServer, RedisServer
from tests.servers.databases import registered
from tests.statements import raising

#: An argument that no log and no row's error may show.
SECRET = "hunter2"


@pytest.fixture
def own_task(fragile_redis: RedisServer, make_app: MakeApp) -> Any:
    """A task of an app whose broker is the test's own Redis."""
    return make_app(broker_url=fragile_redis.url, result_backend=None).tasks[add.name]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a relay wait for a tenth of a second where it would wait for many."""
    monkeypatch.setattr(relay_module, "IDLE", 0.05)
    monkeypatch.setattr(relay_module, "SHORTEST_PAUSE", 0.06)
    monkeypatch.setattr(relay_module, "LONGEST_PAUSE", 0.1)


@contextmanager
def recording_waits(stop: threading.Event, pauses: list[float]) -> Iterator[None]:
    """Record for how long a relay waits, unless nothing was due, in the block."""

    def wait(seconds: float) -> bool:
        if seconds != relay_module.IDLE:
            pauses.append(seconds)
        return threading.Event.wait(stop, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "wait", wait)
        yield


def messages_of(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """Return what the relay logged at a level."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and record.module in ("relay", "outbox")
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


POISON: dict[str, tuple[str, Callable[[str], str]]] = {
    "broken JSON": ("properties", lambda text: text[:-20]),
    "no headers": (
        "properties",
        lambda text: changed(text, options={"exchange": "", "declare": []}),
    ),
    "odd declaration": (
        "properties",
        lambda text: changed(
            text, options={**json.loads(text)["options"], "declare": [{SECRET: 1}]}
        ),
    ),
}


@pytest.mark.parametrize(("column", "change"), POISON.values(), ids=POISON)
def test_a_poison_message_is_set_aside(
    column: str,
    change: Callable[[str], str],
    alias: str,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is tried again later, and dead in the end; all others of its batch are sent."""
    caplog.set_level(logging.DEBUG, "django_celery_safe")
    others = leave(alias, 2)
    with dying_sender(alias, due=True):
        bad = add.apply_async_on_commit(
            (SECRET,), {"y": SECRET}, using=alias, outbox=True, argsrepr="()", kwargsrepr="{}"
        )
    others += leave(alias, 2)
    row = table(alias).get(task_id=bad.id)
    table(alias).filter(pk=row.pk).update(**{column: change(getattr(row, column))})

    with hearing(task_send_failed, message_dead) as told:
        drain(alias, attempts=2)
        assert ids(sent()) == others
        assert table(alias).get().attempts == 1
        assert drain(alias, attempts=2) == 0
        assert table(alias).get().attempts == 1
        make_due(alias)
        drain(alias, attempts=2)
    (dead,) = table(alias).dead()
    assert (dead.task_id, dead.attempts, sent()) == (bad.id, 2, [])
    assert [said["signal"] for said in told] == [task_send_failed, message_dead]
    assert [said["task_id"] for said in told] == [bad.id] * 2
    assert {said["kept"] for said in told} == {True}
    assert str(told[1]["error"]) in dead.error
    assert [len(messages_of(caplog, level)) for level in ("WARNING", "ERROR")] == [1, 1]
    assert_no_secret(dead.error, caplog.text)


def test_a_redis_key_of_another_type(
    alias: str, redis_server: RedisServer, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages to that one queue fail, without their content in the error; the others go out."""
    with redis_server.client(db=1) as client:
        client.set("odd", "no list")
    with dying_sender(alias, due=True):
        add.apply_async_on_commit((SECRET,), using=alias, outbox=True, queue="odd", argsrepr="()")
    others = leave(alias, 3)
    drain(alias)
    assert set(ids(sent())) == set(others)
    (row,) = table(alias).all()
    assert row.attempts == 1
    assert "WRONGTYPE" in row.error
    assert_no_secret(row.error, caplog.text)


@pytest.mark.long
def test_what_rabbitmq_refuses(
    alias: str, make_app: MakeApp, rabbitmq_server: RabbitMQServer
) -> None:
    """A full queue, or a missing exchange, costs its messages an attempt only."""
    name, full = (f"{what}-{os.urandom(4).hex()}" for what in ("own", "full"))
    app = make_app(broker_url=rabbitmq_server.url, task_default_queue=name)
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    app.amqp.queues.add(Queue(full, queue_arguments=arguments))
    task = app.tasks[add.name]
    (first,) = leave(alias, task=task, queue=full)
    wanted = leave(alias, 2, task=task)
    refused = dict.fromkeys(leave(alias, task=task, queue=full), "Nack")
    missing = leave(alias, 2, task=task, exchange="missing", routing_key="anywhere")
    wanted += leave(alias, 2, task=task)
    for task_ids, ago in ((refused, 0.5), (missing, 60)):
        due_at = Now() - timedelta(seconds=ago)
        table(alias).filter(task_id__in=task_ids).update(due_at=due_at)
    refused |= dict.fromkeys(missing, "NOT_FOUND")
    assert drain(alias) == 5
    assert set(table(alias).values_list("task_id", flat=True)) == set(refused)
    for row in table(alias):
        assert (row.attempts, refused[row.task_id] in row.error) == (1, True)
    queues = RabbitMQQueues(rabbitmq_server)
    assert (ids(queues.take(full)), ids(queues.take(name))) == ([first], wanted)
    queues.forget([name, full], [])


# A broker that is gone.


@contextmanager
def out_of_memory(server: RedisServer) -> Iterator[None]:
    """It takes nothing more."""
    with server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextmanager
def other_password(server: RedisServer) -> Iterator[None]:
    """It wants a password that the relay has not."""
    with server.client() as client:
        client.config_set("requirepass", SECRET)
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        client.config_set("requirepass", "")


TROUBLES = [
    RedisServer.stopped,
    pytest.param(RedisServer.silence, marks=pytest.mark.long),  # each of its tries is waited for
    out_of_memory,
    other_password,
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_a_broker_that_is_gone_is_waited_for(
    trouble: Callable[[RedisServer], Any],
    alias: str,
    fragile_redis: RedisServer,
    own_task: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No attempt is used, the rows are given back, it is told once; then everything is sent."""
    pauses: list[float] = []
    if trouble is RedisServer.silence:
        monkeypatch.setattr(relay_module, "LONGEST_WAIT", 2.0)
    with relaying(alias) as stop:
        leave(alias, 2, task=own_task)
        wait_for(lambda: not table(alias).exists())
        assert len(take_published(fragile_redis, 0)) == 2
        with trouble(fragile_redis), recording_waits(stop, pauses):
            wanted = leave(alias, 3, task=own_task)
            with suppress(TimeoutError):
                wait_for(lambda: len(pauses) > 3 or any(attempts(alias)), 20)
            assert attempts(alias) == [0] * 3
            assert len(pauses) > 3
            assert pauses[:3] == [0.06, 0.1, 0.1]
            (error,) = messages_of(caplog, "ERROR")
            assert "broker can't be reached" in error
            assert alias in error
        wait_for(lambda: not table(alias).exists(), 20)
    assert len(messages_of(caplog, "ERROR")) == 1
    assert [text for text in messages_of(caplog, "WARNING") if "relayed again" in text] != []
    published = ids(take_published(fragile_redis, 0))
    # A silent server may have got what nobody could tell.
    assert set(published) == set(wanted)
    assert trouble is RedisServer.silence or len(published) == 3


@pytest.mark.usefixtures("quick")
def test_a_lost_race_is_no_outage(
    alias: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under SERIALIZABLE others are faster now and then: the relay goes on, without an error."""
    lost = OperationalError("another transaction was faster")
    lost.__cause__ = psycopg.errors.SerializationFailure()
    outcomes, pauses = list[OperationalError](), list[float]()

    def relay_batch(self: Relay) -> int:
        if outcomes:
            raise outcomes.pop()
        return 0

    monkeypatch.setattr(Relay, "relay_batch", relay_batch)
    with relaying(alias) as stop, recording_waits(stop, pauses):
        outcomes.extend([lost] * 3)
        wait_for(lambda: len(pauses) > 2)
    assert pauses == [0.06] * 3
    assert messages_of(caplog, "ERROR") == []


def test_a_restart_costs_nothing(alias: str, fragile_redis: RedisServer, own_task: Any) -> None:
    """A relay whose connection was closed meanwhile connects anew, and no attempt is used."""
    relay = Relay(alias)
    leave(alias, 2, task=own_task)
    relay.drain()
    fragile_redis.restart()
    wanted = leave(alias, 2, task=own_task)
    with hearing(task_send_failed) as failures:
        relay.drain()
    assert failures == []
    assert ids(take_published(fragile_redis, 0)) == wanted


@pytest.mark.parametrize("kind", ["sends", "group"])
def test_a_message_that_breaks_the_connection_costs_the_others_nothing(
    kind: str, alias: str, fragile_redis: RedisServer, own_task: Any
) -> None:
    """The broker answers before it and after it: it fails alone, at the commit and in a relay."""
    with fragile_redis.client() as client:
        client.config_set("proto-max-bulk-len", 2**20)
    parts = [own_task.s(text) for text in ("first", "x" * 2**21, "third")]
    with hearing(task_send_failed) as failures:
        with transaction.atomic(using=alias):
            if kind == "group":
                results = list(send_on_commit(group(parts), using=alias, outbox=True))
            else:
                results = [send_on_commit(part, using=alias, outbox=True) for part in parts]
        first, broken, third = [result.id for result in results]
        # The broker may have some messages of the group already, so they may come twice.
        assert set(ids(take_published(fragile_redis, 0))) == {first, third}
        relay = Relay(alias)
        relay.drain()
    assert [failure["task_id"] for failure in failures] == [broken, broken]
    row = table(alias).get()
    assert (row.task_id, row.attempts) == (broken, 1)


@pytest.mark.parametrize(("cuts", "after"), [(1, 12000), (2, 300)])
def test_a_connection_that_is_cut_in_mid_batch(
    cuts: int, after: int, alias: str, fragile_redis: RedisServer, make_app: MakeApp
) -> None:
    """Unconfirmed messages are published again: none is missing, and no attempt is used."""
    with line_to(fragile_redis.port) as line:
        app = make_app(broker_url=f"redis://127.0.0.1:{line.port}/0", result_backend=None)
        wanted = leave(alias, 30, task=app.tasks[add.name])
        line.cuts = [after] * cuts
        with hearing(task_send_failed) as failures, suppress(BrokerGone):
            drain(alias)
        assert failures == []
        make_due(alias)
        drain(alias)
        assert line.cuts == []
    assert set(ids(take_published(fragile_redis, 0))) == set(wanted)
    assert not table(alias).exists()


def test_a_transport_that_is_not_installed_uses_up_no_attempt(
    alias: str, fragile_redis: RedisServer, own_task: Any
) -> None:
    """A relay whose environment lacks the broker's client gives all rows back."""
    leave(alias, 2, task=own_task)
    own_task.app.conf.broker_url = "nothing-here://localhost"
    with pytest.raises(BrokerGone):
        drain(alias)
    assert attempts(alias) == [0, 0]
    assert table(alias).due().count() == 2


def test_one_broker_that_is_gone_does_not_keep_the_other_waiting(
    alias: str, fragile_redis: RedisServer
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
                url = fragile_redis.url if name == answering else gone
                app.conf.update(broker_url=url, result_backend=None)
                left[name] = leave(alias, 2, task=app.tasks[add.name])
            with pytest.raises(BrokerGone):
                drain(alias)
            assert ids(take_published(fragile_redis, 0)) == left.pop(answering)
            assert attempts(alias) == [0] * 2
            assert set(table(alias).values_list("task_id", flat=True)) == set(*left.values())
            table(alias).discard()


def test_what_a_relay_did_not_reach_is_given_back(
    alias: str,
    redis_server: RedisServer,
    sent: Sent,
    in_redis: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If half of the lease is over in mid-batch, the batch's other rows become due at once."""
    clock, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    with redis_server.client(db=1) as client:
        client.set("odd", "no list")
    # Messages that are published one by one.
    leave(alias, task=once, queue="odd")
    wanted = leave(alias, 3, task=once)

    def take_long(**_: Any) -> None:
        assert not table(alias).due().exists()
        ahead[0] += relay_module.LEASE.total_seconds() / 2

    relay = Relay(alias)
    with receiving(task_send_failed, take_long):
        assert (relay.relay_batch(), relay.count, ahead) == (4, 0, [30.0])
    wait_for(lambda: table(alias).due().count() == 3, 20)
    assert (relay.relay_batch(), relay.count) == (3, 3)
    assert ids(sent()) == wanted


def test_a_batch_that_a_time_limit_ends_is_given_back(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's SoftTimeLimitExceeded in mid-batch, as in the shipped task, leaves all of it due."""
    wanted = leave(alias, 3)

    relay, interrupt = Relay(alias), raising(SoftTimeLimitExceeded())
    with monkeypatch.context() as patch:
        patch.setattr(redis.Redis, "execute_command", interrupt)
        patch.setattr(redis.client.Pipeline, "execute", interrupt)
        with pytest.raises(SoftTimeLimitExceeded):
            relay.relay_batch()
    assert sent() == []
    wait_for(lambda: table(alias).due().count() == 3, 20)
    assert attempts(alias) == [0] * 3
    assert relay.relay_batch() == 3
    assert ids(sent()) == wanted


# A database that is gone.


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
def test_a_database_gone_in_mid_relay(
    postgres_alias: str,
    postgres_server: PostgresServer,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published rows are deleted when the database is back, and not sent again."""
    wanted = leave(postgres_alias, 5)
    connections[postgres_alias].close()
    with ExitStack() as outage:
        faults, record_sent = [postgres_server.stopped()], Relay._record_sent

        def record_and_lose(*args: Any, **options: Any) -> None:
            record_sent(*args, **options)
            if faults:
                outage.enter_context(faults.pop())

        monkeypatch.setattr(Relay, "_record_sent", record_and_lose)
        with relaying(postgres_alias):
            wait_for(lambda: messages_of(caplog, "ERROR"), 20)
            outage.close()
            wait_for(lambda: not table(postgres_alias).exists(), 20)
            late = leave(postgres_alias)
            wait_for(lambda: not table(postgres_alias).exists(), 20)
    assert ids(sent()) == [*wanted, *late]
    (error,) = messages_of(caplog, "ERROR")
    assert "database can't be reached" in error
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


def test_one_database_that_is_gone_does_not_keep_the_others_waiting(
    make_database: MakeDatabase, sent: Sent, settings: Settings, monkeypatch: pytest.MonkeyPatch
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


def test_only_those_wait_whose_lock_store_is_gone(
    alias: str, fragile_redis: RedisServer, sent: Sent, settings: Settings
) -> None:
    """Unique tasks wait until it is back, and lose no attempt; all others are sent."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": fragile_redis.url}
    settings.CACHES = {"default": cache}
    waiting, others = leave(alias, 2, task=once), leave(alias, 2)
    fragile_redis.stop()
    assert drain(alias) == 2
    assert ids(sent()) == others
    assert set(table(alias).values_list("task_id", flat=True)) == {*waiting}
    assert attempts(alias) == [0] * 2
    assert not table(alias).due().exists()
    fragile_redis.start()
    make_due(alias)
    assert drain(alias) == 2
    assert ids(sent()) == waiting
