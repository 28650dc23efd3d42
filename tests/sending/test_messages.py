"""A send on commit publishes the same messages as a plain send, under the announced ids."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature, StampingVisitor
from django.db import transaction
from django.utils import timezone
from kombu import Connection, Exchange, Queue
from kombu.serialization import register, unregister

from django_celery_safe import send_on_commit
from tests.app.celery import app
from tests.app.tasks import add, note, total
from tests.processes import wait_for
from tests.sending.conftest import MakeApp
from tests.sending.published import Published, ids_in, renumbered, take_published
from tests.servers import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]


class CustomerStamp(StampingVisitor):
    """Stamps every signature of a canvas."""

    def on_signature(self, sig: Signature[Any], **headers: Any) -> dict[str, Any]:
        """Add a header and name it as a stamp."""
        return {"customer": [7, "Ann"], "stamped_headers": ["customer"]}


def stamped(signature: Signature[Any]) -> Signature[Any]:
    """Return the signature, stamped."""
    signature.stamp(visitor=CustomerStamp())
    return signature


def adds(count: int = 2) -> list[Signature[Any]]:
    """Return some signatures."""
    return [add.s(number, y=number) for number in range(count)]


#: Makes a signature anew for each send.
CANVASES: dict[str, Callable[[], Signature[Any]]] = {
    "task with links": lambda: add.s(1).on_error(note.si("errors")) | note.s("journal"),
    "task by name": lambda: app.signature("elsewhere.index", (1,), {"tags": ["a", None]}),
    "chain": lambda: chain(add.s(1, 2), add.si(3), add.s(y=4), app.signature("elsewhere.index")),
    "chain of one": lambda: chain(add.s(1, 2)),
    "group from a generator": lambda: group(add.s(number) for number in range(3)),
    "group of groups and chains": lambda: group(group(adds()), chain(adds()), add.s(5)),
    "empty group": lambda: group([]),
    "chord with an errback": lambda: chord(adds(), total.s().on_error(note.si("errors"))),
    "chord of chords": lambda: chord(
        [chord(adds(), total.s()), chord(adds(3), total.s())], total.s()
    ),
    "chord of groups": lambda: chord([group(adds()), add.s(1)], total.s()),
    "chord, then chain": lambda: chain(add.s(1), group(adds()), total.s(), add.s(2), group(adds())),
    "chunks": lambda: add.chunks(zip(range(4), range(4), strict=True), 2),
    "stamped, group, then group, then task": lambda: stamped(
        chain(group(adds()), group(total.s(), total.s()), total.s())
    ),
}


@pytest.mark.parametrize("make", CANVASES.values(), ids=CANVASES.keys())
def test_a_canvas_goes_out_on_commit_as_it_does_plainly(
    make: Callable[[], Signature[Any]], sent: Sent
) -> None:
    """Nothing goes out before the commit; after it, the messages and ids of a plain send."""
    with transaction.atomic():
        result = send_on_commit(make())
        assert sent() == []
    on_commit = sent()
    plain_result = make().apply_async()
    plain = sent()

    assert renumbered(on_commit, result) == renumbered(plain, plain_result)
    assert {message.id for message in on_commit} <= ids_in(result)


OPTIONS: dict[str, dict[str, Any]] = {
    "route": {"task_id": "an-id-of-our-own", "queue": "slow", "priority": 6, "shadow": "another"},
    "body": {
        "link": note.s("journal"), "link_error": [note.si("errors"), add.si(1)],
        "serializer": "pickle", "compression": "zlib",
    },
    "headers": {
        "headers": {"trace": {"span": [1, 2]}}, "time_limit": 30, "soft_time_limit": 20,
        "ignore_result": True, "app_id": "shop",
    },
    "serializer": {"serializer": "reversing"},
    "not retried": {"retry": False, "retry_policy": {"max_retries": 1}},
}  # fmt: skip


@pytest.fixture
def reversing() -> Iterator[None]:
    """A serializer of the project's own, whose bytes are no text."""
    register(
        "reversing",
        lambda value: repr(value).encode()[::-1],
        lambda data: eval(data[::-1].decode()),
        content_type="application/x-reversing",
        content_encoding="binary",
    )
    yield
    unregister("reversing")


@pytest.mark.usefixtures("reversing")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_reach_the_message(options: dict[str, Any], sent: Sent) -> None:
    """Each option of apply_async ends up in the message as in a plain send."""
    with transaction.atomic():
        result = add.apply_async_on_commit((1,), {"y": 2}, **options)
        assert sent() == []
    on_commit = sent()
    plain_result = add.apply_async((1,), {"y": 2}, **options)

    assert len(on_commit) == 1
    assert on_commit[0].id == result.id
    assert renumbered(on_commit, result) == renumbered(sent(), plain_result)


@pytest.mark.parametrize(
    "conf",
    [
        {"task_routes": {add.name: {"queue": "adding", "priority": 9}}},
        {
            "task_queues": [Queue("all", Exchange("shop", type="topic"), routing_key="shop.#")],
            "task_routes": {add.name: {"queue": "all", "routing_key": "shop.add"}},
        },
        {
            "task_default_queue": "others",
            "task_compression": "zlib",
            "task_serializer": "pickle",
        },
        {"task_protocol": 1},
    ],
    ids=str,
)
def test_the_configuration_of_the_app_holds(
    conf: dict[str, Any], make_app: MakeApp, sent: Sent
) -> None:
    """Routes, queues, compression, serializer and protocol are those of the signature's app."""
    own = make_app(**conf)

    def make() -> Signature[Any]:
        return own.tasks[add.name].s(1, y=2).set(task_id="an-id")

    with transaction.atomic():
        send_on_commit(make())
        assert sent() == []
    on_commit = sent()
    make().apply_async()
    assert len(on_commit) == 1
    assert renumbered(on_commit, None) == renumbered(sent(), None)


def test_a_countdown_begins_at_the_call(sent: Sent) -> None:
    """The ETA is that of the call, as for a plain send, whenever the commit comes."""
    moment = datetime(2100, 1, 1, tzinfo=timezone.get_default_timezone())
    before = timezone.now()
    with transaction.atomic():
        add.apply_async_on_commit((1,), countdown=60)
        after = timezone.now()
        add.apply_async_on_commit((1,), eta=moment)
    first, second = (datetime.fromisoformat(message.headers["eta"]) for message in sent())
    assert before <= first - timedelta(seconds=60) <= after
    assert second == moment


def test_the_time_to_live_counts_from_the_publication(sent: Sent) -> None:
    """``expires`` is fixed at the call; the broker gets the time that is left at the commit."""
    with transaction.atomic():
        called = timezone.now()
        add.apply_async_on_commit((1,), expires=60)
        returned = timezone.now()
        # It is over at the commit: the time to live becomes 0, never negative.
        add.apply_async_on_commit((2,), expires=returned + timedelta(seconds=0.01))
        wait_for(lambda: timezone.now() > returned + timedelta(seconds=0.05))
        committed_at = timezone.now()
    published_at = timezone.now()
    message, over = sent()
    assert over.properties["expiration"] == "0"
    ends = datetime.fromisoformat(message.headers["expires"])
    assert called <= ends - timedelta(seconds=60) <= returned
    left = int(message.properties["expiration"]) / 1000
    rounding = 0.01
    assert (ends - published_at).total_seconds() - rounding <= left
    assert left <= (ends - committed_at).total_seconds() + rounding


def test_one_signature_is_sent_twice(sent: Sent) -> None:
    """Sending a canvas on commit changes nothing of it: the second send has ids of its own."""
    signature = group(add.s(1), chain(add.s(2), add.s(3)))
    before = repr(dict(signature))
    with transaction.atomic():
        first, second = send_on_commit(signature), send_on_commit(signature)
    assert repr(dict(signature)) == before
    assert not ids_in(first) & ids_in(second)
    assert len({message.id for message in sent()}) == 4


def test_the_broker_named_in_the_call_gets_the_message(
    broker: Celery, sent: Sent, redis_server: RedisServer
) -> None:
    """``connection`` and ``producer`` are kept for the publication."""
    with broker.connection_for_write(redis_server.database_url(3)) as connection:
        with transaction.atomic():
            by_connection = add.apply_async_on_commit((1,), connection=connection)
            producer = broker.amqp.Producer(connection, auto_declare=False)
            by_producer = add.apply_async_on_commit((2,), producer=producer)
            of_group = send_on_commit(group(adds()), connection=connection)
        elsewhere = {message.id for message in take_published(redis_server, database=3)}
    assert elsewhere == {by_connection.id, by_producer.id, *(part.id for part in of_group)}
    assert sent() == []


def test_two_connections_of_one_url_get_a_message_each(redis_server: RedisServer) -> None:
    """Their options differ, which the URL does not show; one commit sends through both."""
    url, prefixes = redis_server.database_url(3), ("blue:", "green:")
    with ExitStack() as stack, redis_server.client(db=3) as client:
        with transaction.atomic():
            for prefix in prefixes:
                connection = Connection(url, transport_options={"global_keyprefix": prefix})
                add.apply_async_on_commit((1,), connection=stack.enter_context(connection))
        assert [client.llen(f"{prefix}celery") for prefix in prefixes] == [1, 1]
        client.flushdb()
