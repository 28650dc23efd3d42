"""
A relay sends the same message from the outbox that Celery itself would have sent.

Each kind of send is made twice: directly, by Celery's ``apply_async`` outside of a
transaction, and into the outbox by a process that then never publishes, so that a relay
does. The messages are read from the broker without Celery, and compared whole.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from amqp import PreconditionFailed
from celery import Celery, _state, chain, chord, shared_task
from celery.canvas import Signature
from celery.signals import after_task_publish
from django.db import transaction
from kombu import Exchange, Queue, binding
from pytest_django import Settings

from django_celery_safe import NotSerializable, SafeTask, send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.app.tasks import add, note, total
from tests.processes import wait_for
from tests.sending.conftest import dying_sender, hearing
from tests.sending.published import (
    Published,
    Queues,
    RabbitMQQueues,
    RedisQueues,
    comparable,
    run_here,
    without,
)
from tests.sending.test_unique import once
from tests.servers import RedisServer

#: A moment in UTC.
LATER = datetime(2100, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)


@shared_task(base=SafeTask, serializer="pickle", time_limit=99, ignore_result=True)
def special(*args: Any) -> None:
    """Have options of its own."""


@shared_task(name="tests.sending.plain_celery")
def plain_celery(*args: Any) -> None:
    """Have Celery's own base."""


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
        self.kind, self.clear_locks = kind, clear

    def prepare(self, *, forget: bool = True) -> None:
        """
        Begin with empty queues, and without a lock of an earlier send.

        Args:
            forget: Whether the broker knows none of the queues, but for those declared.
        """
        self.take()
        self.clear_locks()
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
        kind = self.kind
        with dying_sender(self.alias, due=True):
            return send_on_commit(kind.make(), using=self.alias, outbox=True, **kind.options)

    def relay(self) -> int:
        """Relay all that is due, and return how many messages that were."""
        relay = Relay(self.alias)
        relay.drain()
        assert not OutboxMessage.objects.using(self.alias).exists()
        return relay.count

    def directly(self) -> tuple[list[Published], Any]:
        """Send directly; return the messages, and the result."""
        # The app's connection, once open, declares a queue but once.
        self.prepare(forget=False)
        result = self.send()
        return self.take(), result

    def relayed(self) -> tuple[list[Published], Any]:
        """Send through outbox and relay; return the messages, and the result."""
        self.prepare()
        result = self.keep()
        assert self.take() == []
        self.prepare()
        self.relay()
        return self.take(), result


#: Makes what a test sends through; its app is the current one until the test ends.
MakeLine = Callable[..., Line]


@pytest.fixture
def queues(request: pytest.FixtureRequest, redis_server: RedisServer) -> Queues:
    """The private Redis, or RabbitMQ for a test that asks for it."""
    if getattr(request, "param", "redis") == "redis":
        return RedisQueues(redis_server)
    return RabbitMQQueues(request.getfixturevalue("rabbitmq_server"))


#: Runs a test on RabbitMQ.
on_rabbitmq = pytest.mark.parametrize("queues", ["rabbitmq"], indirect=True)


@pytest.fixture
def make_line(
    queues: Queues, redis_server: RedisServer, in_redis: None, settings: Settings, sqlite_alias: str
) -> Iterator[MakeLine]:
    """Make what a test sends through, with locks in Redis; leave nothing of it on the broker."""
    # On a loaded machine RabbitMQ may answer later than in 2 s: it would be asked once more.
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 30}
    before = _state._tls.current_app  # type: ignore[attr-defined]
    # Kombu has one pool for all apps with equal options.
    own_pool = {**queues.transport_options, "client_properties": {"id": uuid4().hex}}
    with ExitStack() as stack:

        def make(kind: Kind = Kind(), **conf: Any) -> Line:
            app = stack.enter_context(closing(Celery("own")))
            app.conf.update(
                broker_url=queues.url,
                broker_transport_options=own_pool,
                accept_content=["json", "pickle"],
                **{"result_backend": redis_server.database_url(2), **kind.conf, **conf},
            )
            stack.callback(app.pool.force_close_all)
            stack.callback(queues.forget, kind.queues, kind.exchanges)
            return Line(queues, app, sqlite_alias, kind, redis_server.flush)

        yield make
    _state._set_current_app(before)  # type: ignore[attr-defined]


def shop(name: str = "all", kind: str = "topic", **options: Any) -> Queue:
    """Return a queue with an exchange of its own."""
    return Queue(name, Exchange("shop", type=kind), **options)


TRACE: dict[str, Any] = {
    "plain": {"none": None, "true": True, "number": -7, "text": "ä\u2028"},
    "list": [1, [2, {"deep": []}], ("a", "tuple")],
    "price": Decimal("10.50"),
    "id of order": UUID(int=7),
    "day": LATER.date(),
    "local": datetime.fromisoformat("2026-07-01T12:00:00.000001+05:30"),
    "bytes": b"\xff\x00",
}

#: A queue with each argument that its declaration can have.
DETAILED = shop(
    routing_key="shop.#",
    bindings=[binding(Exchange("shop2", type="fanout"))],
    queue_arguments={"x-max-length": 9},
    max_priority=7,
    message_ttl=600.5,
)
#: A queue that the app knows, declared with arguments.
KNOWN = shop(
    kind="direct", routing_key="shop.add", queue_arguments={"x-max-length": 3}, max_priority=5
)

#: A queue that takes messages by their headers.
BY_HEADERS = shop(kind="headers", binding_arguments={"x-match": "all", "region": "north"})

#: Kinds whose messages a relay can send with any configuration, together.
KINDS: dict[str, Kind] = {
    "text": Kind(lambda: note.s("ä\u2028\U0001f600 ", value={"moment": LATER, "id": UUID(int=7)})),
    "Celery's own task": Kind(lambda: plain_celery.s(1)),
    "options of the task": Kind(lambda: special.s((1, 2))),
    "by name": Kind(
        lambda: Signature("elsewhere.index", (1,), {"tags": ["a", None]}),
        options={"queue": "far"},
        queues=("far",),
    ),
    "eta": Kind(options={"eta": LATER, "priority": 0}),
    "lzma, pickle": Kind(
        lambda: add.s((1, {2}), LATER), options={"compression": "lzma", "serializer": "pickle"}
    ),
    "headers": Kind(options={"headers": TRACE, "reply_to": Queue("answers")}),
    "links": Kind(options={"link": [note.s("journal"), add.s(1)], "link_error": [add.si(1)]}),
    "other options": Kind(
        options={
            "task_id": UUID(int=9),
            "app_id": "shop",
            "message_id": "m",
            "type": "order",
            "correlation_id": "own",
            "shadow": "another name",
            "argsrepr": "(secret)",
            "kwargsrepr": "{}",
            "delivery_mode": "transient",
            "retry": False,
            "retry_policy": {"max_retries": 1},
            "root_id": "r",
            "parent_id": "p",
            "group_id": "g",
            "group_index": 3,
            "retries": 2,
            "time_limit": 30,
            "soft_time_limit": 20.5,
            "ignore_result": True,
        }
    ),
    "unique, in a chain": Kind(lambda: chain(once.s(2), add.s(1))),
    "single instance for this call": Kind(
        options={"single_instance": {"key": "{x}", "timeout": 50, "on_conflict": "skip"}}
    ),
    "chord of chords": Kind(
        lambda: chord([chord([add.s(1), add.s(2)], total.s()), add.s(3)], total.s())
    ),
}

#: A kind whose messages go through the exchange of a queue of ``shop``.
ShopKind = partial(Kind, queues=("all",), exchanges=("shop",))

#: Kinds that hang on the app's configuration, or on what the broker knows.
CONFIGURED: dict[str, Kind] = {
    "detailed queue": ShopKind(
        conf={"task_queues": [DETAILED]},
        options={"queue": "all", "priority": 5},
        exchanges=("shop", "shop2"),
    ),
    "route with exchange": ShopKind(
        conf={
            "task_queues": [KNOWN],
            "task_routes": {add.name: {"queue": "all", "routing_key": "shop.add", "priority": 9}},
        }
    ),
    "declaration": ShopKind(
        options={
            "exchange": "shop",
            "routing_key": "shop.add",
            "exchange_type": "topic",
            "declare": [shop(routing_key="shop.add")],
        },
        conf={"task_queues": [shop(routing_key="shop.add")]},
    ),
    "defaults": Kind(
        conf={
            "task_default_queue": "others",
            "task_compression": "zlib",
            "task_default_priority": 3,
            "task_default_delivery_mode": "transient",
            "task_serializer": "pickle",
            "enable_utc": False,
            "timezone": "Europe/Berlin",
        },
        options={"eta": LATER},
        queues=("others",),
    ),
    "protocol 1": Kind(
        lambda: add.s(1).on_error(note.si("errors")),
        conf={"task_protocol": 1},
        options={"headers": {"trace": [1]}, "eta": LATER, "priority": 2, "compression": "zlib"},
    ),
}

#: Features that Redis lacks, or forgets unless a consumer or a declaration comes first.
ON_RABBITMQ: dict[str, Kind] = {
    "exchange object": ShopKind(
        options={"exchange": Exchange("shop", type="topic"), "routing_key": "shop.add"},
        declares=(shop(routing_key="shop.#"),),
    ),
    "bytes in headers": Kind(
        options={"headers": {"text": b"text", "bytes": b"\xff\x00"}, "serializer": "msgpack"}
    ),
    "headers exchange": ShopKind(
        options={"queue": "all", "headers": {"region": "north"}}, conf={"task_queues": [BY_HEADERS]}
    ),
}


def check(line: Line) -> list[Published]:
    """Compare a direct send with a relayed one; return the relayed messages."""
    direct, result = line.directly()
    relayed, kept_result = line.relayed()
    assert comparable(relayed, kept_result) == comparable(direct, result)
    assert direct
    return relayed


@pytest.mark.parametrize("kind", [*KINDS.values(), *CONFIGURED.values()], ids=[*KINDS, *CONFIGURED])
def test_what_is_relayed_is_what_celery_sends(kind: Kind, make_line: MakeLine) -> None:
    """Queue, routing, body bytes, headers, properties and ids are those of a direct send."""
    check(make_line(kind))


@pytest.mark.parametrize("kind", ON_RABBITMQ.values(), ids=ON_RABBITMQ)
@pytest.mark.long
@on_rabbitmq
def test_what_is_relayed_is_what_celery_sends_to_rabbitmq(kind: Kind, make_line: MakeLine) -> None:
    """Exchanges and queues that only RabbitMQ has are the same too."""
    check(make_line(kind))


@pytest.mark.long
@on_rabbitmq
def test_the_relay_declares_a_queue_as_the_sender_would(make_line: MakeLine) -> None:
    """Arguments and bindings of the queue that a relay makes are those that were given."""
    line = make_line(CONFIGURED["detailed queue"])
    check(line)
    with line.app.connection_for_write() as connection:
        # RabbitMQ refuses other arguments than those it has.
        DETAILED(connection.default_channel).queue_declare()
        for bound in DETAILED.bindings:
            producer = connection.Producer()
            producer.publish({}, exchange=bound.exchange.name, routing_key="")
            assert len(line.take()) == 1
        with pytest.raises(PreconditionFailed):
            Queue("all", max_priority=3)(connection.default_channel).queue_declare()


def test_a_queue_that_the_app_does_not_know_is_refused(make_line: MakeLine) -> None:
    """A relay would have to guess how to declare it."""
    with pytest.raises(NotSerializable, match=r"the queue of task .* Queue all .* task_queues"):
        make_line(Kind(options={"queue": KNOWN})).keep()


@pytest.mark.parametrize("name", ["headers", "declaration", "protocol 1"])
def test_receivers_are_told_of_the_publication_by_the_relay(name: str, make_line: MakeLine) -> None:
    """after_task_publish is sent once for a message, when it is out, with Celery's values."""
    line = make_line((KINDS | CONFIGURED)[name])
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


@pytest.mark.parametrize("name", ["eta", "route with exchange"])
def test_the_event_of_the_send_is_published_by_the_relay(name: str, make_line: MakeLine) -> None:
    """There is one task-sent event if it is on, at the relay, with Celery's values."""
    line = make_line((KINDS | CONFIGURED)[name], task_send_sent_event=True)
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


def wait_until(moment: datetime) -> None:
    """Wait for a moment."""
    wait_for(lambda: datetime.now(UTC) > moment)


def moved(messages: list[Published], *names: str) -> list[Published]:
    """Return messages without what hangs on the moment of the send."""
    return [
        replace(one, headers=without(one.headers, names), properties=without(one.properties, names))
        for one in messages
    ]


#: Makes ``expires``, a minute from now, and the protocol of the message.
EXPIRES: dict[str, tuple[Callable[[], Any], int]] = {
    "seconds": (lambda: 60, 2),
    "naive moment": (lambda: datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=60), 1),
}


@pytest.mark.parametrize(("expires", "protocol"), EXPIRES.values(), ids=EXPIRES)
def test_the_time_to_live_is_what_is_left_at_the_relay(
    expires: Callable[[], Any], protocol: int, make_line: MakeLine
) -> None:
    """``expires`` stays that of the send; the broker gets the rest of the time."""
    line = make_line(task_protocol=protocol, timezone="Asia/Tokyo")
    line.kind = Kind(options={"expires": expires()})
    direct, _ = line.directly()
    line.prepare()
    line.keep()
    wait_until(datetime.now(UTC) + timedelta(seconds=0.1))
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


def test_what_expired_before_the_relay_is_sent_as_expired(make_line: MakeLine) -> None:
    """A time to live that is over becomes 0, never negative, and the message no failure."""
    line = make_line(Kind(options={"expires": 0.01}))
    line.keep()
    wait_until(datetime.now(UTC) + timedelta(seconds=0.05))
    assert line.relay() == 1
    assert line.take()[0].properties["expiration"] == "0"


@pytest.mark.long
@on_rabbitmq
def test_a_result_comes_through_rpc(make_line: MakeLine) -> None:
    """With the result backend rpc:// the result of an outbox send is in its sender's own queue."""
    line = make_line(result_backend="rpc://")
    with transaction.atomic(using=line.alias):
        result = add.apply_async((1, 2), outbox=True, using=line.alias)
    # An earlier test on this server may have left others.
    (message,) = [one for one in line.take() if one.properties["correlation_id"] == result.id]
    assert run_here(line.app, message) == 3
    # It is in the queue when the run has ended. How the sender reads it is Celery's own code.
    (reply,) = line.queues.take(message.properties["reply_to"])
    assert (reply.properties["correlation_id"], reply.body["result"]) == (result.id, 3)
