"""Celery's own signals and events come once for each message sent on commit."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import chain, chord, shared_task
from celery.canvas import Signature
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.delivery.header import HEADER
from tests.app.tasks import add, total
from tests.processes import wait_for
from tests.sending.conftest import MakeApp, hearing
from tests.sending.published import Published
from tests.servers import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]

CANVASES: dict[str, tuple[Callable[[], Signature[Any]], int]] = {
    "chain": (lambda: chain(add.s(1), add.s(2)), 1),
    "chord": (lambda: chord([add.s(1), add.s(2)], total.s()), 2),
}


@shared_task(base=SafeTask)
@single_instance(key=["x"], unique_until="end")
def add_once(x: int, y: int = 0) -> int:
    """Return the sum, of one message at a time."""
    return x + y


@pytest.mark.parametrize(("make", "count"), CANVASES.values(), ids=CANVASES.keys())
def test_each_publication_is_signalled_once(
    make: Callable[[], Signature[Any]], count: int, sent: Sent
) -> None:
    """before_task_publish comes at the call, after_task_publish at the commit, if there is one."""
    with hearing(after_task_publish) as after, transaction.atomic():
        send_on_commit(make())
        transaction.set_rollback(True)
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


def test_the_signals_say_what_those_of_a_plain_send_say(broker: object) -> None:
    """Sender, body, headers, exchange and routing key are the same."""
    said = []
    for on_commit in (True, False):
        with hearing(before_task_publish, after_task_publish) as heard, transaction.atomic():
            signature = add.s(1, y=2).set(task_id="an-id", queue="slow", headers={"ours": [1]})
            send_on_commit(signature) if on_commit else signature.delay()
        for one in heard:
            del one["signal"]
            one["body"] = json.dumps(one["body"])
        said.append(heard)
    assert said[0] == said[1]
    assert len(said[0]) == 2


@contextmanager
def task_sent_events(server: RedisServer) -> Iterator[Callable[[], dict[str, Any]]]:
    """Listen to Celery's events; gives a function that waits for the next one."""
    with server.client(db=1) as client, client.pubsub() as events:
        events.psubscribe("/1.celeryev*")  # of this database: workers on others speak, too
        wait_for(lambda: events.get_message(timeout=0.1))

        def read() -> dict[str, Any]:
            row = wait_for(lambda: events.get_message(timeout=0.1))
            event = json.loads(base64.b64decode(json.loads(row["data"])["body"]))
            return {name: event[name] for name in event if name not in ("timestamp", "clock")}

        yield read


def test_the_event_is_that_of_a_plain_send(make_app: MakeApp, redis_server: RedisServer) -> None:
    """With ``task_send_sent_event`` one event goes out after the commit, with the same fields."""
    task = make_app(task_send_sent_event=True).tasks[add.name]
    options = {"exchange": "shop", "routing_key": "here", "task_id": "an-id"}
    with task_sent_events(redis_server) as read:
        task.apply_async((1,), {"y": 2}, **options)
        plain = read()
        for is_committed in (False, True):
            with transaction.atomic():
                task.apply_async_on_commit((1,), {"y": 2}, **options)
                transaction.set_rollback(not is_committed)
        on_commit = read()
        task.apply_async((1,), task_id="last")
        assert read()["uuid"] == "last"
    assert plain["type"] == "task-sent"
    assert on_commit == plain


def test_a_unique_send_is_announced_like_any_other(
    locks_in_memory: None, make_app: MakeApp, redis_server: RedisServer, sent: Sent
) -> None:
    """Message, signals and event are those of a plain send; a duplicate has none of them."""
    app = make_app(task_send_sent_event=True)
    options = {"queue": "slow", "priority": 3, "headers": {"ours": [1]}, "shadow": "other"}
    with task_sent_events(redis_server) as read, hearing(after_task_publish) as after:
        app.tasks[add.name].apply_async((1,), {"y": 2}, task_id="an-id", **options)
        plain = read()
        app.tasks[add_once.name].apply_async((1,), {"y": 2}, task_id="an-id", **options)
        once = read()
        app.tasks[add_once.name].apply_async((1,), {"y": 2}, task_id="duplicate")
        app.tasks[add.name].apply_async((1,), task_id="last")
        assert read()["uuid"] == "last"
    assert once == {**plain, "name": add_once.name}
    assert [said["headers"]["id"] for said in after] == ["an-id", "an-id", "last"]
    last, *forms = (message.comparable() for message in sent())
    for form in forms:
        form["headers"] = {
            name: value
            for name, value in form["headers"].items()
            if name not in (HEADER, "task", "stamps")
        }
    assert last["headers"]["id"] == "last"
    assert forms[0] == forms[1]
