"""
A relay sends the same message from the outbox that Celery itself would have sent.

Each kind of send is made twice: directly, by Celery's ``apply_async`` outside of a
transaction, and into the outbox by a process that then never publishes, so that a relay
does. The messages are read from the broker without Celery, and compared whole.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID, uuid4

import pytest
from amqp import PreconditionFailed
from celery import Celery, _state, chain, chord, group, shared_task
from celery.canvas import Signature
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.signals import after_task_publish, before_task_publish
from django.db import connections, transaction
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kombu import Exchange, Queue, binding
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.capture import ChordCall, Message
from django_celery_safe.sending.publisher import DELAYED
from django_celery_safe.sending.relay import Relay
from django_celery_safe.sending.serialization import to_message, to_row
from tests.app.tasks import add, note, total
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.listening import receiving
from tests.processes import (
    CeleryWorker,
    Journal,
    run_in_processes,
    start_in_process,
    wait_for,
)
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.sending.conftest import hearing
from tests.sending.published import Published, take_published
from tests.sending.queued import Queues, RabbitMQQueues, RedisQueues, comparable, without
from tests.sending.relaying import meet_once_claimed
from tests.sending.test_messages import CANVASES, OPTIONS, stamped
from tests.servers import RedisServer
from tests.versions import IS_CELERY_57

if TYPE_CHECKING:
    from pytest_django import Settings

#: Seconds until a result must be there.
PATIENCE = 60

#: A moment in UTC, and one whose time zone is not said, which for Celery is UTC too.
LATER = datetime(2100, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
LATER_NAIVE = LATER.replace(tzinfo=None)


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end")
def once(number: int) -> int:
    """Be sent once for each number."""
    return number


@shared_task(base=SafeTask, serializer="pickle", time_limit=99, ignore_result=True)
def special(*args: Any) -> None:
    """Have options of its own."""


@shared_task(name="tests.sending.plain_celery")
def plain_celery(*args: Any) -> None:
    """Have Celery's own base."""


@shared_task(base=SafeTask, bind=True)
def send_from_a_run(self: Any, through_outbox: bool) -> str:
    """Send to a queue that nobody reads, with what a running task hands on."""
    canvas = chain(add.s(1).set(queue="unread"), group(add.s(2), add.s(3)).set(queue="unread"))
    if not through_outbox:
        add.apply_async((0,), queue="unread")
        canvas.apply_async(queue="unread")
    else:
        with never_published("default"):
            add.apply_async((0,), queue="unread", outbox=True)
            send_on_commit(canvas, outbox=True, queue="unread")
    return str(self.request.id)


@contextmanager
def never_published(alias: str) -> Iterator[None]:
    """Commit what is sent inside, and die, as it were, before it is published; it is due then."""
    with transaction.atomic(using=alias):
        yield
        connections[alias].run_on_commit.clear()
    OutboxMessage.objects.using(alias).pending().release()


@dataclass(frozen=True)
class Kind:
    """
    One kind of send.

    Attributes:
        make: Makes what is sent, for tasks of the current app.
        options: Of ``apply_async``.
        conf: Of the app.
        queues: Where the messages go.
        declares: Queues that are there before.
        exchanges: What else it leaves on a broker.
    """

    make: Callable[[], Signature[Any]] = lambda: add.s(1, y=2)
    options: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, Any] = field(default_factory=dict)
    queues: tuple[str, ...] = ("celery",)
    declares: tuple[Queue, ...] = ()
    exchanges: tuple[str, ...] = ()


class Line:
    """
    A broker, an app that sends to it, and a database with an outbox.

    Args:
        conf: Of the app, on top of that.
    """

    def __init__(self, queues: Queues, app: Celery, alias: str, kind: Kind, clear: Any) -> None:
        self.queues, self.app, self.alias = queues, app, alias
        self.kind, self._clear = kind, clear

    def prepare(self, *, forget: bool = True) -> None:
        """
        Begin with empty queues, and without a lock of an earlier send.

        Args:
            forget: Whether the broker knows none of the queues, but for those declared.
        """
        self.take()
        self._clear()
        if forget:
            self.queues.forget(self.kind.queues, self.kind.exchanges)
        with self.app.connection_for_write() as connection:
            for queue in self.kind.declares:
                queue(connection.default_channel).declare()

    def take(self) -> list[Published]:
        """Take what this kind of send left."""
        return self.queues.take(*self.kind.queues)

    def send(self) -> Any:
        """Send directly."""
        return self.kind.make().apply_async(**self.kind.options)

    def keep(self) -> Any:
        """Send into the outbox, where it stays."""
        with never_published(self.alias):
            return send_on_commit(
                self.kind.make(), using=self.alias, outbox=True, **self.kind.options
            )

    def relay(self) -> int:
        """Relay all that is due, and return how many messages that were."""
        relay = Relay(self.alias)
        try:
            relay.drain()
        finally:
            relay.close()
        assert not OutboxMessage.objects.using(self.alias).exists()
        return relay.count

    def directly(self, send: Callable[[], Any] | None = None) -> tuple[list[Published], Any]:
        """Send directly; return the messages, and the result."""
        # The app's connection, once open, declares a queue but once.
        self.prepare(forget=False)
        result = (send or self.send)()
        return self.take(), result

    def relayed(self, keep: Callable[[], Any] | None = None) -> tuple[list[Published], Any]:
        """Send through outbox and relay; return the messages, and the result."""
        self.prepare()
        result = (keep or self.keep)()
        assert self.take() == []
        self.prepare()
        self.relay()
        return self.take(), result


class MakeLine(Protocol):
    """Makes what a test sends through; its app is the current one until the test ends."""

    def __call__(
        self, kind: Kind = Kind(), alias: str | None = None, name: str = "own", **conf: Any
    ) -> Line:
        """
        Return it.

        Args:
            alias: Of the database; unset: a new SQLite file.
            name: Of the app; a relay elsewhere looks for it.
            conf: Celery's configuration, on top of that of the kind.
        """


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def queues(request: pytest.FixtureRequest) -> Queues:
    """Each of the brokers."""
    server = request.getfixturevalue(f"{request.param}_server")
    return RedisQueues(server) if request.param == "redis" else RabbitMQQueues(server)


@pytest.fixture
def locks(redis_cache_settings: MakeRedisCache, settings: "Settings") -> None:
    """Locks are in the private Redis."""
    settings.CACHES = redis_cache_settings("django-redis")


def conf_for(queues: Queues, redis_server: RedisServer) -> dict[str, Any]:
    """Return Celery's configuration for a broker."""
    return {
        "broker_url": queues.url,
        "broker_transport_options": queues.transport_options,
        "result_backend": redis_server.database_url(2),
        "accept_content": ["json", "pickle"],
    }


@contextmanager
def current_app_of_tests(name: str, conf: dict[str, Any]) -> Iterator[Celery]:
    """Have a Celery app, the current one, with a pool of connections of its own."""
    before = _state._tls.current_app  # type: ignore[attr-defined]
    app = Celery(name, set_as_current=False)
    # Kombu has one pool for all apps with equal options.
    options = {**conf.get("broker_transport_options", {}), "client_properties": {"id": uuid4().hex}}
    app.conf.update({**conf, "broker_transport_options": options})
    app.set_current()
    try:
        yield app
    finally:
        _state._set_current_app(before)  # type: ignore[attr-defined]
        app.pool.force_close_all()
        app.close()


@pytest.fixture
def make_line(
    queues: Queues, redis_server: RedisServer, locks: None, request: pytest.FixtureRequest
) -> Iterator[MakeLine]:
    """Make what a test sends through, and leave nothing of it on the broker."""
    with ExitStack() as stack:

        def make(
            kind: Kind = Kind(), alias: str | None = None, name: str = "own", **conf: Any
        ) -> Line:
            conf = {**conf_for(queues, redis_server), **kind.conf, **conf}
            app = stack.enter_context(current_app_of_tests(name, conf))
            alias = alias or request.getfixturevalue("sqlite_alias")
            line = Line(queues, app, alias, kind, redis_server.flush)
            stack.callback(queues.forget, kind.queues, kind.exchanges)
            return line

        yield make


def shop(name: str = "all", kind: str = "topic", **options: Any) -> Queue:
    """Return a queue with an exchange of its own."""
    return Queue(name, Exchange("shop", type=kind), **options)


TRACE: dict[str, Any] = {
    "plain": {"none": None, "true": True, "number": -7, "text": "ä\u2028"},
    "list": [1, [2, {"deep": []}], ("a", "tuple")],
    "moment": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "price": Decimal("10.50"),
}

KINDS: dict[str, Kind] = {
    "plain": Kind(),
    "no arguments": Kind(lambda: special.s()),
    "text": Kind(lambda: note.s("ä\u2028\U0001f600 ", value={"moment": LATER, "id": UUID(int=7)})),
    "Celery's own task": Kind(lambda: plain_celery.s(1)),
    "options of the task": Kind(lambda: special.s((1, 2))),
    "queue": Kind(options={"queue": "slow"}, queues=("slow",)),
    "unknown queue": Kind(
        options={
            "queue": shop(
                routing_key="shop.#",
                bindings=[binding(Exchange("shop2", type="fanout"))],
                queue_arguments={"x-max-length": 9},
                max_priority=7,
                message_ttl=600.5,
            ),
            "priority": 5,
        },
        queues=("all",),
        exchanges=("shop", "shop2"),
    ),
    "priority": Kind(options={"priority": 6}, queues=("celery",)),
    "no priority": Kind(options={"priority": 0}),
    "eta": Kind(options={"eta": LATER}),
    "eta, naive": Kind(options={"eta": LATER_NAIVE}),
    "json": Kind(options={"serializer": "json"}),
    "pickle": Kind(lambda: add.s((1, {2}), LATER), options={"serializer": "pickle"}),
    "gzip": Kind(options={"compression": "gzip"}),
    "bzip2": Kind(options={"compression": "bzip2"}),
    "lzma, pickle": Kind(options={"compression": "lzma", "serializer": "pickle"}),
    "headers": Kind(options={"headers": TRACE}),
    "stamps": Kind(lambda: stamped(add.s(1))),
    "shadow": Kind(options={"shadow": "another name"}),
    "link": Kind(options={"link": [note.s("journal"), add.s(1)]}),
    "link_error": Kind(options={"link_error": [note.si("errors"), add.si(1)]}),
    "by name": Kind(lambda: Signature("elsewhere.index", (1,), {"tags": ["a", None]})),
    "by name, queue": Kind(
        lambda: Signature("elsewhere.index"), options={"queue": "far"}, queues=("far",)
    ),
    "reply_to": Kind(options={"reply_to": "answers"}),
    "correlation_id": Kind(options={"correlation_id": "own"}),
    "task_id": Kind(options={"task_id": "an-id-of-our-own"}),
    "ignored result": Kind(options={"ignore_result": True}),
    "time limits": Kind(options={"time_limit": 30, "soft_time_limit": 20.5}),
    "representations": Kind(options={"argsrepr": "(secret)", "kwargsrepr": "{}"}),
    "transient": Kind(options={"delivery_mode": "transient"}),
    "not persistent": Kind(options={"delivery_mode": 1}),
    "family": Kind(options={"root_id": "r", "parent_id": "p", "group_id": "g", "group_index": 3}),
    "retries": Kind(options={"retries": 2}),
    "properties": Kind(options={"app_id": "shop", "message_id": "m", "type": "order"}),
    "retry policy": Kind(options={"retry": False, "retry_policy": {"max_retries": 1}}),
    "unique": Kind(lambda: once.s(1)),
    "unique, in a chain": Kind(lambda: chain(once.s(2), add.s(1))),
    "single instance for this call": Kind(
        options={"single_instance": {"key": "{x}", "timeout": 50, "on_conflict": "skip"}},
    ),
    "chunks": Kind(lambda: add.chunks(zip(range(4), range(4), strict=True), 2)),
    **{
        f"canvas: {name}": Kind(make)
        for name, make in CANVASES.items()
        # These two name the tests' own app.
        if name not in ("task by name", "immutable chain")
    },
}

#: Kinds that hang on the app's configuration, or on what the broker knows.
CONFIGURED: dict[str, Kind] = {
    "route": Kind(
        conf={"task_routes": {add.name: {"queue": "adding", "priority": 9}}}, queues=("adding",)
    ),
    "route with exchange": Kind(
        conf={
            "task_queues": [shop(routing_key="shop.#")],
            "task_routes": {add.name: {"queue": "all", "routing_key": "shop.add"}},
        },
        queues=("all",),
        exchanges=("shop",),
    ),
    "declaration": Kind(
        options={
            "exchange": "shop",
            "routing_key": "shop.add",
            "exchange_type": "topic",
            "declare": [Exchange("shop", type="topic"), shop(routing_key="shop.add")],
        },
        queues=("all",),
        exchanges=("shop",),
    ),
    "known queue with arguments": Kind(
        conf={
            "task_queues": [
                shop(
                    routing_key="shop.add",
                    kind="direct",
                    queue_arguments={"x-max-length": 3},
                    max_priority=5,
                )
            ],
            "task_default_queue": "all",
        },
        queues=("all",),
        exchanges=("shop",),
    ),
    "default queue, compressed": Kind(
        conf={"task_default_queue": "others", "task_compression": "zlib"}, queues=("others",)
    ),
    "default priority": Kind(conf={"task_default_priority": 3}),
    "default delivery mode": Kind(conf={"task_default_delivery_mode": "transient"}),
    "default serializer": Kind(conf={"task_serializer": "pickle"}),
    "local time": Kind(
        conf={"enable_utc": False, "timezone": "Europe/Berlin"}, options={"eta": LATER}
    ),
    "protocol 1": Kind(lambda: add.s(1).on_error(note.si("errors")), conf={"task_protocol": 1}),
    "protocol 1, options": Kind(
        conf={"task_protocol": 1},
        options={"headers": {"trace": [1]}, "eta": LATER, "priority": 2, "compression": "zlib"},
    ),
}

#: Values that JSON can hold, and an AMQP table can not.
ONLY_REDIS: dict[str, Kind] = {
    "headers": Kind(
        options={
            "headers": {
                "id of order": UUID(int=7),
                "day": LATER.date(),
                "time": LATER.time(),
                "local": datetime.fromisoformat("2026-07-01T12:00:00.000001+05:30"),
                "text": b"text",
                "bytes": b"\xff\x00",
            }
        }
    ),
    # Kombu itself can't write it into an AMQP property.
    "reply_to, queue": Kind(options={"reply_to": Queue("answers")}),
}
#: Features that Redis lacks, or forgets unless a consumer or a declaration comes first.
ONLY_RABBITMQ: dict[str, Kind] = {
    "fanout": Kind(
        options={"queue": shop(kind="fanout")},
        queues=("all",),
        exchanges=("shop",),
    ),
    "exchange and routing key": Kind(
        options={"exchange": "shop", "routing_key": "shop.add", "exchange_type": "topic"},
        queues=("all",),
        declares=(shop(routing_key="shop.#"),),
        exchanges=("shop",),
    ),
    "exchange object": Kind(
        options={"exchange": Exchange("shop", type="topic"), "routing_key": "shop.add"},
        queues=("all",),
        declares=(shop(routing_key="shop.#"),),
        exchanges=("shop",),
    ),
    "bytes in headers": Kind(options={"headers": {"text": b"text", "bytes": b"\xff\x00"}}),
    "headers exchange": Kind(
        options={
            "queue": shop(kind="headers", binding_arguments={"x-match": "all", "region": "north"}),
            "headers": {"region": "north"},
        },
        queues=("all",),
        exchanges=("shop",),
    ),
    "quorum queue": Kind(
        options={
            "queue": Queue("sure", queue_arguments={"x-queue-type": "quorum"}),
            "exchange": "",
            "routing_key": "sure",
        },
        queues=("sure",),
    ),
    "mandatory": Kind(options={"mandatory": True}),
    "yaml": Kind(options={"serializer": "yaml"}),
    "msgpack": Kind(options={"serializer": "msgpack"}),
}


def check(line: Line) -> list[Published]:
    """Compare a direct send with a relayed one; return the relayed messages."""
    direct, result = line.directly()
    relayed, kept_result = line.relayed()
    assert comparable(relayed, kept_result) == comparable(direct, result)
    # A group of nothing sends nothing.
    assert direct or result.children == []
    return relayed


@pytest.mark.parametrize("kind", [*KINDS.values(), *CONFIGURED.values()], ids=[*KINDS, *CONFIGURED])
def test_what_is_relayed_is_what_celery_sends(kind: Kind, make_line: MakeLine) -> None:
    """Queue, routing, body bytes, headers, properties and ids are those of a direct send."""
    check(make_line(kind))


@pytest.mark.parametrize("kind", ONLY_REDIS.values(), ids=ONLY_REDIS)
@pytest.mark.parametrize("queues", ["redis"], indirect=True)
def test_what_is_relayed_is_what_celery_sends_to_redis(kind: Kind, make_line: MakeLine) -> None:
    """Messages that only Redis can carry are the same, too."""
    check(make_line(kind))


@pytest.mark.parametrize("kind", ONLY_RABBITMQ.values(), ids=ONLY_RABBITMQ)
@pytest.mark.long
@pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)
def test_what_is_relayed_is_what_celery_sends_to_rabbitmq(kind: Kind, make_line: MakeLine) -> None:
    """Exchanges and queues that only RabbitMQ has are the same too."""
    check(make_line(kind))


#: Queues that a call names as objects; what the app has configured; what they bind.
OWN_QUEUES: dict[str, tuple[list[Queue], Queue]] = {
    "unknown": ([], KINDS["unknown queue"].options["queue"]),
    "known": ([shop(routing_key="shop.all")], shop(routing_key="shop.all")),
    "of a known name, with a priority": (
        [shop(routing_key="shop.all")],
        shop(routing_key="shop.all", max_priority=7),
    ),
    "of a known name, with none": (
        [shop(routing_key="shop.all", max_priority=7)],
        shop(routing_key="shop.all"),
    ),
}


@pytest.mark.parametrize(("known", "queue"), OWN_QUEUES.values(), ids=OWN_QUEUES)
@pytest.mark.long
@pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)
def test_the_relay_declares_a_queue_as_the_sender_would(
    known: list[Queue], queue: Queue, make_line: MakeLine
) -> None:
    """Arguments and bindings of the queue that a relay makes are those that were given."""
    line = make_line(
        Kind(
            options={"queue": queue},
            conf={"task_queues": known} if known else {},
            queues=("all",),
            exchanges=("shop", "shop2"),
        )
    )
    check(line)
    with line.app.connection_for_write() as connection:
        # RabbitMQ refuses other arguments than those it has.
        queue(connection.default_channel).queue_declare()
        for bound in queue.bindings:
            producer = connection.Producer()
            producer.publish({}, exchange=bound.exchange.name, routing_key="")
            assert len(line.take()) == 1
        with pytest.raises(PreconditionFailed):
            Queue("all", max_priority=3)(connection.default_channel).queue_declare()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_apply_async_with_outbox_is_the_same(options: dict[str, Any], make_line: MakeLine) -> None:
    """A task's own apply_async with outbox=True makes the message of one without."""
    line = make_line(Kind(queues=("celery", "slow")))
    direct, result = line.directly(lambda: add.apply_async((1,), {"y": 2}, **options))

    def keep() -> Any:
        with never_published(line.alias):
            return add.apply_async((1,), {"y": 2}, outbox=True, using=line.alias, **options)

    relayed, kept_result = line.relayed(keep)
    assert len(relayed) == 1
    assert comparable(relayed, kept_result) == comparable(direct, result)


def relay_here(alias: str, conf: dict[str, Any]) -> int:
    """In another process: relay with an app that is configured as the sender's."""
    app = Celery("own")
    app.conf.update(conf)
    relay = Relay(alias)
    relay.drain()
    return relay.count


@pytest.mark.parametrize("kind", CONFIGURED.values(), ids=CONFIGURED)
def test_another_process_relays_what_was_configured(kind: Kind, make_line: MakeLine) -> None:
    """A relay of the same project elsewhere finds routes and queues as they were."""
    line = make_line(kind)
    direct, result = line.directly()
    line.prepare()
    kept_result = line.keep()
    conf = {**line.app.conf.changes, **kind.conf}
    with start_in_process(relay_here, line.alias, conf) as process:
        assert process.result() == 1
    assert comparable(line.take(), kept_result) == comparable(direct, result)


def test_the_command_relays_all_kinds_at_once(
    make_line: MakeLine, sqlite_alias: str, settings: "Settings"
) -> None:
    """In one batch of another process, each kind's messages are those of its direct send."""
    sends = {}
    everything = Kind(queues=("celery", "slow", "far", "all"), exchanges=("shop", "shop2"))
    line = make_line(everything, sqlite_alias, "tests")  # as the app of the command
    names = [name for name in KINDS if name != "canvas: empty group"]
    for name in names:
        line.kind = KINDS[name]
        sends[name] = line.directly()
    rows = OutboxMessage.objects.using(sqlite_alias)
    kept = {}
    for name in names:
        line.kind = KINDS[name]
        line._clear()
        known = set(rows.values_list("task_id", flat=True))
        with never_published(sqlite_alias):
            result = send_on_commit(
                line.kind.make(), using=sqlite_alias, outbox=True, **line.kind.options
            )
        kept[name] = result, set(rows.values_list("task_id", flat=True)) - known
    line.kind = everything
    line.prepare()
    count = rows.count()
    settings.CELERY_BROKER_URL = line.queues.url
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {}
    settings.CELERY_RESULT_BACKEND = line.app.conf.result_backend
    assert run_command("relay", "--once", "--database", sqlite_alias).endswith(
        f"Sent {count} message(s).\n"
    )
    assert not rows.exists()
    messages = line.take()
    assert len(messages) == count
    for name, (result, ids) in kept.items():
        own = [message for message in messages if message.id in ids]
        direct, direct_result = sends[name]
        assert comparable(own, result) == comparable(direct, direct_result), name


def run_command(*arguments: str) -> str:
    """Run ``manage.py celery_outbox`` with the settings of this test."""
    done = subprocess.run(
        [sys.executable, "-m", "django", "celery_outbox", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings_environment()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_receivers_change_before_the_publication_is_kept(make_line: MakeLine) -> None:
    """A before_task_publish receiver runs at the send, once, and what it changes is relayed."""
    line = make_line()
    calls = []

    def change(headers: Any, properties: Any, declare: Any, body: Any, **_: Any) -> None:
        calls.append(headers["id"])
        headers.update(trace={"span": len(TRACE)}, shadow="changed")
        properties.update(priority=7, app_id="receiver", reply_to="others")
        body[1]["y"] = 40

    with receiving(before_task_publish, change):
        direct, _ = line.directly()
        relayed, result = line.relayed()
        assert calls[1:] == [result.id]
    assert comparable(relayed) == comparable(direct)
    assert relayed[0].body[1] == {"y": 40}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param((KINDS | CONFIGURED)[name], id=name)
        for name in (
            *("plain", "queue", "gzip", "headers", "canvas: chain"),
            *("declaration", "route with exchange", "protocol 1"),
        )
    ],
)
def test_receivers_are_told_of_the_publication_by_the_relay(
    kind: Kind, make_line: MakeLine
) -> None:
    """after_task_publish is sent once for a message, when it is out, with Celery's values."""
    line = make_line(kind)
    with hearing(after_task_publish) as heard:
        line.directly()
    with hearing(after_task_publish) as heard_late:
        line.prepare()
        line.keep()
        assert heard_late == []
        assert line.relay() == len(heard)
    assert as_data(heard_late) == as_data(heard)


def as_data(heard: list[dict[str, Any]]) -> Any:
    """Return what signals said, with lists for tuples and without new ids."""
    return comparable([Published("", {}, without(said, ["signal"]), "", "", b"") for said in heard])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param((KINDS | CONFIGURED)[name], id=name)
        for name in ("plain", "eta", "queue", "route", "route with exchange", "declaration")
    ],
)
def test_the_event_of_the_send_is_published_by_the_relay(kind: Kind, make_line: MakeLine) -> None:
    """There is one task-sent event if it is on, at the relay, with Celery's values."""
    line = make_line(kind, task_send_sent_event=True)
    line.prepare()
    with events_of(line.app) as events:
        direct = line.send().id
        (event,) = wait_for(events)
    line.prepare()
    with events_of(line.app) as events:
        relayed = line.keep().id
        assert events() == []
        line.relay()
        (late,) = wait_for(events)
    assert (event.pop("uuid"), late.pop("uuid")) == (direct, relayed)
    assert (event.pop("root_id"), late.pop("root_id")) == (direct, relayed)
    moving = ("timestamp", "clock", "local_received")
    assert without(late, moving) == without(event, moving)


@contextmanager
def events_of(app: Celery) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Give what returns the task-sent events that were published since the block began."""
    heard: list[dict[str, Any]] = []

    def hear(body: Any, message: Any) -> None:
        # Workers, and relays of other apps, send events of their own.
        events = body if isinstance(body, list) else [body]
        heard.extend(event for event in events if event["type"] == "task-sent")

    with app.connection() as connection:
        receiver = app.events.Receiver(connection)
        queue = receiver.queue(connection.default_channel)
        consumer = connection.Consumer([queue], callbacks=[hear], accept=["json"], no_ack=True)

        def drain() -> list[dict[str, Any]]:
            try:
                while True:
                    connection.drain_events(timeout=0.05)
            except TimeoutError:
                return heard

        with consumer:
            drain()  # Redis is only listened to from here on
            yield drain


@pytest.mark.parametrize("kind", [Kind(options={"countdown": 600})], ids=["countdown"])
def test_a_countdown_begins_at_the_call(kind: Kind, make_line: MakeLine) -> None:
    """The ETA is that of the send, not of the relay; all else is as in a direct send."""
    line = make_line(kind)
    direct, _ = line.directly()
    before = datetime.now(UTC)
    line.keep()
    after = datetime.now(UTC)
    wait_until(after + timedelta(seconds=0.3))
    line.relay()
    relayed = line.take()
    eta = datetime.fromisoformat(relayed[0].headers["eta"])
    assert before <= eta - timedelta(seconds=600) <= after
    assert comparable(moved(relayed, "eta")) == comparable(moved(direct, "eta"))


def wait_until(moment: datetime) -> None:
    """Wait for a moment."""
    wait_for(lambda: datetime.now(UTC) > moment, PATIENCE)


def moved(messages: list[Published], *names: str) -> list[Published]:
    """Return messages without what hangs on the moment of the send."""
    return [
        Published(
            **{
                **vars(message),
                "headers": without(message.headers, names),
                "properties": without(message.properties, names),
            }
        )
        for message in messages
    ]


#: Makes ``expires``; each is a minute from now.
EXPIRES: dict[str, Callable[[], Any]] = {
    "seconds": lambda: 60,
    "moment": lambda: datetime.now(UTC) + timedelta(seconds=60),
    "moment elsewhere": lambda: (datetime.now(UTC) + timedelta(seconds=60)).astimezone(
        datetime.fromisoformat("2026-07-01T12:00:00+05:30").tzinfo
    ),
    "naive moment": lambda: datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=60),
    "text": lambda: (datetime.now(UTC) + timedelta(seconds=60)).isoformat(),
    "text with Z": lambda: f"{datetime.now(UTC) + timedelta(seconds=60):%Y-%m-%dT%H:%M:%S}Z",
}


@pytest.mark.parametrize("protocol", [2, 1])
@pytest.mark.parametrize("expires", EXPIRES.values(), ids=EXPIRES)
def test_the_time_to_live_is_what_is_left_at_the_relay(
    expires: Callable[[], Any], protocol: int, make_line: MakeLine
) -> None:
    """``expires`` stays that of the send; the broker gets the rest of the time."""
    if protocol == 1 and isinstance(expires(), str) and not IS_CELERY_57:
        pytest.skip("Celery before 5.7 can't send it, not even by itself")
    line = make_line(task_protocol=protocol)
    line.kind = Kind(options={"expires": expires()})
    direct, _ = line.directly()
    line.prepare()
    line.kind = Kind(options={"expires": expires()})
    called = datetime.now(UTC)
    line.keep()
    wait_until(called + timedelta(seconds=0.3))
    before = datetime.now(UTC)
    line.relay()
    after = datetime.now(UTC)
    relayed = line.take()
    left = timedelta(milliseconds=int(relayed[0].properties["expiration"]))
    sent = relayed[0].headers if protocol == 2 else json.loads(relayed[0].data)
    ends = datetime.fromisoformat(sent["expires"])
    ends = ends if ends.tzinfo else ends.replace(tzinfo=UTC)
    rounding = timedelta(milliseconds=1)
    assert ends - after - rounding <= left <= ends - before + rounding
    if protocol == 2:
        moving = ("expires", "expiration")
        assert comparable(moved(relayed, *moving)) == comparable(moved(direct, *moving))


@pytest.mark.parametrize("queues", ["redis"], indirect=True)
def test_what_expired_before_the_relay_is_sent_as_expired(make_line: MakeLine) -> None:
    """A time to live that is over becomes 0, never negative, and the message no failure."""
    line = make_line(Kind(options={"expires": 0.01}))
    line.keep()
    wait_until(datetime.now(UTC) + timedelta(seconds=0.05))
    assert line.relay() == 1
    assert line.take()[0].properties["expiration"] == "0"


@pytest.mark.parametrize("queues", ["redis"], indirect=True)
def test_a_signature_of_another_app_goes_out_by_its_own(
    make_line: MakeLine, redis_server: RedisServer
) -> None:
    """A message of another app goes to that app's broker, into its default queue."""
    line = make_line()
    elsewhere = RedisQueues(redis_server, 3)
    conf = {**line.app.conf.changes, "broker_url": elsewhere.url, "task_default_queue": "others"}
    with current_app_of_tests("other", conf) as other:
        line.app.set_current()
        line.queues, line.kind = elsewhere, Kind(lambda: other.tasks[add.name].s(1))
        (relayed,) = check(line)
    assert relayed.queue == "others"
    assert take_published(redis_server) == []


@pytest.mark.parametrize("queues", ["redis"], indirect=True)
def test_a_fanout_reaches_who_listens_on_redis(
    make_line: MakeLine, redis_server: RedisServer
) -> None:
    """Where a message has no queue, as in a Redis fanout, listeners get it, in a batch too."""
    line = make_line(Kind(options={"queue": shop(kind="fanout")}, queues=("all",)))
    with redis_server.client(db=1) as client, client.pubsub() as listening:
        listening.psubscribe("/1.shop*")  # of this database: workers on others speak, too
        listening.get_message(timeout=PATIENCE)
        direct = line.send().id
        line.prepare()
        ids = [direct, line.keep().id, line.keep().id]
        line.relay()
        heard = [wait_for(lambda: listening.get_message(timeout=1), PATIENCE) for _ in ids]
    assert len({message["channel"] for message in heard}) == 1
    for message, task_id in zip(heard, ids, strict=True):
        assert f'"id": "{task_id}"'.encode() in message["data"]


QUORUM = Queue(
    "sure",
    Exchange("sure", type="topic"),
    routing_key="sure.tasks",
    queue_arguments={"x-queue-type": "quorum"},
)


@pytest.fixture
def delaying(make_line: MakeLine) -> Line:
    """What sends to a quorum queue; the queue ``probe`` gets a copy of each delayed message."""
    kind = Kind(
        conf={"task_queues": [QUORUM], "task_default_queue": "sure"},
        queues=("sure", "probe"),
        exchanges=("sure",),
    )
    line = make_line(kind)
    with line.app.connection_for_write() as connection:
        declare_native_delayed_delivery_exchanges_and_queues(connection, "classic")
        channel = connection.default_channel
        QUORUM(channel).declare()
        bind_queue_to_native_delayed_delivery_exchange(connection, QUORUM)
        probe = Queue("probe")(channel)
        probe.declare()
        probe.bind_to(DELAYED, "#")
    return line


def delay_of(message: Published) -> tuple[int, str]:
    """Return the delay in a routing key, s, and the rest of the key."""
    *bits, key = message.properties["delivery_info"]["routing_key"].split(".", 28)
    return int("".join(bits), 2), key


@pytest.mark.long
@pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)
def test_a_delay_of_a_quorum_queue_is_what_is_left_at_the_relay(delaying: Line) -> None:
    """The routing key by which RabbitMQ delays is made anew from the ETA."""
    delaying.kind.make().apply_async(countdown=60)
    (direct,) = delaying.queues.take("probe")
    with never_published(delaying.alias):
        send_on_commit(add.s(1, y=2), using=delaying.alias, outbox=True, countdown=60)
    wait_until(datetime.now(UTC) + timedelta(seconds=2.1))
    before = datetime.now(UTC)
    delaying.relay()
    (relayed,) = delaying.queues.take("probe")
    left = (datetime.fromisoformat(relayed.headers["eta"]) - before).total_seconds()
    seconds, key = delay_of(relayed)
    assert delay_of(direct) == (60, "sure.tasks")
    assert key == "sure.tasks"
    assert seconds <= 58
    assert left - 5 < seconds < left + 1
    assert comparable(moved([relayed], "eta", "delivery_info")) == comparable(
        moved([direct], "eta", "delivery_info")
    )


@pytest.mark.long
@pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)
def test_what_is_late_for_a_quorum_queue_arrives(delaying: Line) -> None:
    """With an ETA that has passed it takes the shortest delay, and arrives as a direct send."""
    delaying.kind.make().apply_async(countdown=1)
    with never_published(delaying.alias):
        send_on_commit(add.s(1, y=2), using=delaying.alias, outbox=True, countdown=1)
    wait_until(datetime.now(UTC) + timedelta(seconds=1.1))
    delaying.relay()
    assert [delay_of(message)[0] for message in delaying.queues.take("probe")] == [1, 1]
    arrived: list[Published] = []
    wait_for(lambda: arrived.extend(delaying.queues.take("sure")) or len(arrived) == 2, PATIENCE)
    direct, relayed = (moved([message], *TRAVELLED) for message in arrived)
    assert comparable(relayed) == comparable(direct)


#: Headers in which RabbitMQ records a message's delays, and the ETA itself.
TRAVELLED = (
    "eta",
    "x-death",
    *(
        f"x-{which}-death-{what}"
        for which in ("first", "last")
        for what in ("reason", "queue", "exchange")
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)
def test_a_quorum_queue_gets_at_once_what_has_no_eta(delaying: Line) -> None:
    """Without ETA the message goes to the queue itself."""
    delaying.keep()
    delaying.relay()
    assert delaying.queues.take("probe") == []
    (relayed,) = delaying.queues.take("sure")
    delaying.send()
    (direct,) = delaying.queues.take("sure")
    assert comparable([relayed]) == comparable([direct])


@pytest.fixture(scope="module")
def worked(make_module_database: MakeDatabase) -> str:
    """The alias, here, of the SQLite file that is the workers' default database."""
    return make_module_database("sqlite-immediate")


#: The queue of the workers, apart from those that the other tests read.
WORKED = "worked"


@contextmanager
def working(conf: dict[str, Any], alias: str) -> Iterator[CeleryWorker]:
    """Have a worker with the tasks of this module."""
    database = connections.settings[alias]
    settings = {
        **{f"CELERY_{name.upper()}": value for name, value in conf.items()},
        "DATABASES": {"default": {name: database[name] for name in ("ENGINE", "NAME", "OPTIONS")}},
    }
    arguments = ("--include", __name__)
    with CeleryWorker(
        "tests.sending.worker_app",
        pool="solo",
        concurrency=1,
        arguments=arguments,
        settings=settings,
    ) as worker:
        yield worker


@dataclass(frozen=True)
class Workplace:
    """A broker with a worker on it, and the configuration of both."""

    queues: Queues
    conf: dict[str, Any]


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def workplace(
    request: pytest.FixtureRequest, redis_server: RedisServer, worked: str
) -> Iterator[Workplace]:
    """A worker on each broker."""
    server = request.getfixturevalue(f"{request.param}_server")
    on_rabbitmq = request.param == "rabbitmq"
    queues: Queues = RabbitMQQueues(server) if on_rabbitmq else RedisQueues(server, 4)
    conf = {
        "broker_url": queues.url,
        "result_backend": redis_server.database_url(5),
        "task_default_queue": WORKED,
    }
    with working(conf, worked):
        yield Workplace(queues, conf)
    queues.forget([WORKED, "unread"], [])


@pytest.fixture
def sender(workplace: Workplace) -> Iterator[Celery]:
    """An app that sends to the worker, and has the name of the worker's."""
    with current_app_of_tests("sending", workplace.conf) as app:
        yield app


def relay_beside(alias: str, conf: dict[str, Any]) -> int:
    """In one of several processes: relay a few rows at a time, all at once."""
    from django_celery_safe.sending import relay as module

    module.BATCH = 2  # type: ignore[misc]
    app = Celery("sending")
    app.conf.update(conf)
    relay = Relay(alias)
    meet_once_claimed()
    relay.drain()
    return relay.count


@shared_task(base=SafeTask)
def record(numbers: list[int], journal: str) -> int:
    """Write one line into a journal and return the sum."""
    Journal(Path(journal)).write("recorded", value=sum(numbers))
    return sum(numbers)


def canvases(journal: str) -> dict[str, tuple[Signature[Any], Any]]:
    """Return canvases, and what they come to."""
    body = record.s(journal)
    return {
        "task": (add.s(1, 2), 3),
        "chain": (chain(add.s(1, 2), add.s(3), add.s(4)), 10),
        "group": (group(add.s(number, 1) for number in range(5)), [1, 2, 3, 4, 5]),
        "chord": (chord([add.s(number, 1) for number in range(7)], body), 28),
        "chord of chords": (chord([chord([add.s(1), add.s(2)], body), add.s(4)], body), 7),
        "chain of group": (chain(add.s(1, 2), group(add.s(1), add.s(2)), total.s()), 9),
        "group, then group": (
            chain(group(add.s(1), add.s(2)), group(total.s(), total.s()), body),
            6,
        ),
    }


def test_canvases_relayed_by_two_relays_run_as_direct_ones(
    workplace: Workplace, sender: Celery, postgres_alias: str, tmp_path: Path
) -> None:
    """Side by side two relays send every message once; each chord's body runs once."""
    journals = [Journal(tmp_path / name) for name in ("direct", "relayed")]
    direct = {
        name: (canvas.apply_async(), value)
        for name, (canvas, value) in canvases(str(journals[0].path)).items()
    }
    with never_published(postgres_alias):
        relayed = {
            name: (send_on_commit(canvas, using=postgres_alias, outbox=True), value)
            for name, (canvas, value) in canvases(str(journals[1].path)).items()
        }
    count = OutboxMessage.objects.using(postgres_alias).count()
    counts = run_in_processes(relay_beside, 2, postgres_alias, workplace.conf, timeout=PATIENCE)
    assert sum(counts) == count
    assert min(counts) > 0
    assert not OutboxMessage.objects.using(postgres_alias).exists()
    for way, results in (("direct", direct), ("relayed", relayed)):
        for name, (result, value) in results.items():
            try:
                came = result.get(timeout=PATIENCE)
            except CeleryTimeout:
                pytest.fail(f"The {way} {name} came to nothing: {result.state}, {result.children}.")
            assert came == value, (way, name)
    for journal in journals:
        assert journal.tally("value", "recorded") == {28: 1, 3: 1, 7: 1, 6: 1}


def test_what_a_running_task_hands_on_is_relayed(
    workplace: Workplace, sender: Celery, worked: str
) -> None:
    """Inside a task root and parent are those of its run, as in a direct send."""
    sent = {}
    for through_outbox in (False, True):
        result = send_from_a_run.delay(through_outbox)
        assert result.get(timeout=PATIENCE) == result.id
        if through_outbox:
            assert workplace.queues.take("unread") == []
            relay = Relay(worked)
            relay.drain()
            relay.close()
        messages = workplace.queues.take("unread")
        assert {message.headers["root_id"] for message in messages} == {result.id}
        assert {message.headers["parent_id"] for message in messages} == {result.id}
        sent[through_outbox] = comparable(messages)
        assert len(messages) == 2
    assert sent[True] == sent[False]


@pytest.mark.long
@pytest.mark.parametrize("relayed", [True, False], ids=["relayed", "at commit"])
def test_a_result_comes_through_rpc(
    relayed: bool, rpc: dict[str, Any], worked: str, sqlite_alias: str
) -> None:
    """With the result backend rpc:// the result comes to the sender, whoever publishes."""
    with current_app_of_tests("own", rpc) as app:
        if not relayed:
            with transaction.atomic(using=sqlite_alias):
                result = add.apply_async((1, 2), outbox=True, using=sqlite_alias)
        else:
            with never_published(sqlite_alias):
                result = add.apply_async((1, 2), outbox=True, using=sqlite_alias)
            with app.producer_or_acquire() as producer:
                app.backend.on_task_call(producer, result.id)  # lets this process hear of it
            with start_in_process(relay_here, sqlite_alias, rpc) as process:
                assert process.result() == 1
        assert not OutboxMessage.objects.using(sqlite_alias).exists()
        assert result.get(timeout=PATIENCE) == 3
        app.backend.result_consumer.stop()


@pytest.fixture(scope="module")
def rpc(request: pytest.FixtureRequest, worked: str) -> Iterator[dict[str, Any]]:
    """Configuration of a worker, which runs, whose results come through RabbitMQ."""
    queues = RabbitMQQueues(request.getfixturevalue("rabbitmq_server"))
    conf = {
        "broker_url": queues.url,
        "result_backend": "rpc://",
        "task_default_queue": "worked-rpc",
    }
    with working(conf, worked):
        yield conf
    queues.forget(["worked-rpc"], [])


#: Without the search for the smallest failure, which takes minutes for so much.
QUICKLY = hypothesis_settings(
    max_examples=100, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
)

#: Values that headers and properties can carry, and kombu's JSON can hold.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.none() | st.just(UTC)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(), VALUES, max_size=5)
NAMES = st.text("abc.-", min_size=1, max_size=9)
#: As text, with or without an offset, as Celery has them.
MOMENTS = st.none() | st.datetimes(timezones=st.none() | st.just(UTC)).map(datetime.isoformat)
EXCHANGES = st.builds(
    Exchange,
    NAMES,
    type=st.sampled_from(["direct", "topic", "fanout", "headers", "x-own"]),
    durable=st.booleans(),
    auto_delete=st.booleans(),
    arguments=st.none() | HEADERS,
    delivery_mode=st.none() | st.sampled_from([1, 2]),
)
BINDINGS = st.builds(binding, EXCHANGES, routing_key=NAMES, arguments=st.none() | HEADERS)
QUEUES = st.builds(
    Queue,
    NAMES,
    EXCHANGES | st.none(),
    routing_key=NAMES,
    bindings=st.lists(BINDINGS, max_size=2),
    durable=st.booleans(),
    auto_delete=st.booleans(),
    queue_arguments=st.none() | HEADERS,
    binding_arguments=st.none() | HEADERS,
    expires=st.none() | st.floats(1, 99),
    message_ttl=st.none() | st.floats(1, 99),
    max_length=st.none() | st.integers(1, 99),
    max_length_bytes=st.none() | st.integers(1, 99),
    max_priority=st.none() | st.integers(1, 9),
)
OPTIONS_OF_PUBLISH = st.fixed_dictionaries(
    {
        "headers": HEADERS,
        "routing_key": st.none() | NAMES,
        "exchange": st.none() | st.just("") | NAMES | EXCHANGES,
        "declare": st.none() | st.lists(QUEUES | EXCHANGES, max_size=2),
        "retry": st.booleans(),
        "retry_policy": st.fixed_dictionaries({"max_retries": st.none() | st.integers(0, 9)}),
    },
    optional={
        "priority": st.integers(0, 9),
        "expiration": st.floats(0, 1e9),
        "delivery_mode": st.sampled_from([1, 2, "transient", "persistent"]),
        "compression": st.sampled_from(["zlib", "bzip2"]),
        "reply_to": st.text(),
        "correlation_id": st.text(),
        "app_id": VALUES,
    },
)


@pytest.mark.long
@given(
    options=OPTIONS_OF_PUBLISH,
    data=st.text() | st.binary(),
    task=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=255),
    event=st.none() | st.dictionaries(st.text(), VALUES, min_size=1),
    eta=MOMENTS,
    expires=MOMENTS,
)
@QUICKLY
def test_a_row_brings_back_its_message(
    round_app: Celery,
    options: dict[str, Any],
    data: str | bytes,
    task: str,
    event: Any,
    eta: str | None,
    expires: str | None,
) -> None:
    """The message read from a row equals the one that was kept, with any options and headers."""
    message = Message(
        app=round_app,
        task=task,
        task_id="id",
        data=data,
        content_type="application/x-own",
        content_encoding="utf-8" if isinstance(data, str) else "binary",
        options=options,
        eta=eta,
        expires=expires,
        event=event,
        result_wanted=True,
    )
    row = OutboxMessage(**to_row(message, [])._asdict())
    back, calls = to_message(row)
    assert calls == []
    assert (back.app, back.task, back.task_id) == (round_app, task, "id")
    assert back.data == (data.encode() if isinstance(data, str) else data)
    assert (back.content_type, back.content_encoding) == (
        message.content_type,
        message.content_encoding,
    )
    assert (back.eta, back.expires, back.event) == (eta, expires, event)
    assert spelt_out(back.options) == spelt_out({**options, "declare": options["declare"] or []})


@pytest.fixture(scope="module")
def round_app() -> Iterator[Celery]:
    """An app that knows none of the queues above."""
    with closing(Celery("round", set_as_current=False)) as app:
        yield app


def spelt_out(value: Any) -> Any:
    """Return a value with all that entities of kombu consist of."""
    if isinstance(value, (Queue, Exchange, binding)):
        name = type(value).__name__
        attributes = vars(value) if isinstance(value, binding) else value.as_dict()
        if "bindings" in attributes:
            attributes["bindings"] = set(attributes["bindings"])  # in no order
        return name, {key: spelt_out(one) for key, one in attributes.items()}
    if isinstance(value, dict):
        return {key: spelt_out(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((spelt_out(one) for one in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [spelt_out(one) for one in value]
    return value


@given(
    size=st.integers(0, 99),
    results=st.lists(st.uuids().map(str), max_size=4),
    body=st.lists(st.integers(), max_size=3),
)
@QUICKLY
def test_a_row_brings_back_what_the_result_backend_must_know(
    round_app: Celery, size: int, results: list[str], body: list[int]
) -> None:
    """The calls that make a chord known come back with results and signatures of the same app."""
    options = {"routing_key": "a", "exchange": "", "declare": None, "headers": {}}
    message = Message(round_app, "t", "id", b"", "", "", options, None, None, None, True)
    signature = round_app.signature("t", args=(body,), immutable=True)
    members = [round_app.AsyncResult(task_id) for task_id in results]
    calls = [
        ChordCall(round_app, "set_chord_size", ("group", size), {}),
        ChordCall(round_app, "apply_chord", (("group", members), signature), {"countdown": 1}),
    ]
    _, back = to_message(OutboxMessage(**to_row(message, calls)._asdict()))
    assert [(call.app, call.method, call.kwargs) for call in back] == [
        (round_app, "set_chord_size", {}),
        (round_app, "apply_chord", {"countdown": 1}),
    ]
    assert list(back[0].args) == ["group", size]
    (group_id, found), found_body = back[1].args
    assert (group_id, [result.id for result in found]) == ("group", results)
    assert all(result.app is round_app for result in found)
    assert isinstance(found_body, Signature)
    assert dict(found_body) == {**signature, "args": [body]}
