"""A send on commit publishes the same messages as a plain send, under the announced ids."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, group, shared_task
from celery.canvas import Signature, StampingVisitor
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from django.utils import timezone
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.delivery.header import HEADER
from django_celery_safe.sending.publisher import DELAYED
from tests.app.celery import app
from tests.app.tasks import add, note, total
from tests.sending.conftest import MakeApp, hearing, rolled_back
from tests.sending.published import Sent, comparable, ids_in, without

pytestmark = pytest.mark.django_db(transaction=True)


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
    "chain": lambda: chain(add.s(1, 2), add.si(3), add.s(y=4), app.signature("elsewhere.index")),
    "group from a generator": lambda: group(add.s(number) for number in range(3)),
    "group of groups and chains": lambda: group(group(adds()), chain(adds()), add.s(5)),
    "empty group": lambda: group([]),
    "chord with an errback": lambda: chord(adds(), total.s().on_error(note.si("errors"))),
    "chord, then chain": lambda: chain(add.s(1), group(adds()), total.s(), add.s(2), group(adds())),
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

    assert comparable(on_commit, result) == comparable(plain, plain_result)
    assert {message.id for message in on_commit} <= ids_in(result)


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


def test_a_delay_of_a_quorum_queue_is_what_is_left_at_the_publication(make_app: MakeApp) -> None:
    """RabbitMQ's routing key is made anew from the ETA; if that has passed, for one second."""
    task = make_app(broker_url="memory://").tasks[add.name]
    with Connection("memory://") as connection:
        delayed = Exchange(DELAYED, type="topic")
        probe = Queue("probe", delayed, routing_key="#")(connection.default_channel)
        probe.declare()
        key = calculate_routing_key(90, "sure.tasks")
        options: dict[str, Any] = {"exchange": DELAYED, "routing_key": key}
        with transaction.atomic():
            for countdown in (60, -5):
                task.apply_async_on_commit((1,), countdown=countdown, **options)
        keys = [probe.get(no_ack=True).delivery_info["routing_key"] for _ in range(2)]
    delays = [int("".join(key.split(".")[:28]), 2) for key in keys]
    assert 0 < delays[0] <= 60
    assert delays[1] == 1
    assert {key.split(".", 28)[28] for key in keys} == {"sure.tasks"}


def test_one_signature_is_sent_twice(sent: Sent) -> None:
    """Sending a canvas on commit changes nothing of it: the second send has ids of its own."""
    signature = group(add.s(1), chain(add.s(2), add.s(3)))
    before = repr(dict(signature))
    with transaction.atomic():
        first, second = send_on_commit(signature), send_on_commit(signature)
    assert repr(dict(signature)) == before
    assert not ids_in(first) & ids_in(second)
    assert len({message.id for message in sent()}) == 4


# Signals and events of Celery come once for each message.

PUBLISHED: dict[str, tuple[Callable[[], Signature[Any]], int]] = {
    "chain": (lambda: chain(add.s(1), add.s(2)), 1),
    "chord": (lambda: chord([add.s(1), add.s(2)], total.s()), 2),
}


@shared_task(base=SafeTask)
@single_instance(key=["x"], unique_until="end")
def add_once(x: int, y: int = 0) -> int:
    """Return the sum, of one message at a time."""
    return x + y


@pytest.mark.parametrize(("make", "count"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_each_publication_is_signalled_once(
    make: Callable[[], Signature[Any]], count: int, sent: Sent
) -> None:
    """before_task_publish comes at the call, after_task_publish at the commit, if there is one."""
    with hearing(after_task_publish) as after, rolled_back():
        send_on_commit(make())
    assert (after, sent()) == ([], [])
    with hearing(before_task_publish) as before, hearing(after_task_publish) as after:
        with transaction.atomic():
            send_on_commit(make())
            assert len(before) == count
            assert after == []
        assert len(before) == len(after) == count
    ids = [message.id for message in sent()]
    assert [said["headers"]["id"] for said in before] == ids
    assert [said["headers"]["id"] for said in after] == ids


def test_a_unique_send_is_announced_like_any_other(locks_in_memory: None, sent: Sent) -> None:
    """Message and signals are those of a plain send; a duplicate has none of them."""
    options = {"queue": "slow", "priority": 3, "headers": {"ours": [1]}, "shadow": "other"}
    with hearing(after_task_publish) as after:
        for task in (add, add_once):
            task.apply_async((1,), {"y": 2}, task_id="an-id", **options)
        add_once.apply_async((1,), {"y": 2}, task_id="duplicate")
    assert [said["headers"]["id"] for said in after] == ["an-id", "an-id"]
    plain, once = (vars(message) for message in sent())
    for form in (plain, once):
        form["headers"] = without(form["headers"], (HEADER, "task", "stamps"))
    assert plain == once
