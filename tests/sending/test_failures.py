"""A send that fails after the commit harms nothing else; nothing is contacted before."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group
from django.db import transaction
from kombu.exceptions import OperationalError

from django_celery_safe import send_on_commit
from django_celery_safe.signals import task_send_failed, task_sent
from tests.app.models import Person
from tests.app.tasks import add
from tests.sending.conftest import ONE_TRY, MakeApp, count_calls, hearing, rolled_back
from tests.sending.published import Sent, ids_in
from tests.servers import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)

SENDS: dict[str, Callable[[Any], Any]] = {
    "task": lambda task: task.delay_on_commit(1, 2),
    "group": lambda task: send_on_commit(group(task.s(1), task.s(2))),
    "chord over a chain that ends in a group": lambda task: send_on_commit(
        chord([chain(task.s(1), group(task.s(2), task.s(3))), task.s(4)], task.s())
    ),
}


@pytest.mark.parametrize("name", ["task", "group"])
@pytest.mark.parametrize("backend", ["redis", "rpc"])
def test_nothing_is_contacted_before_the_commit(
    name: str, backend: str, make_app: MakeApp, silent: socket.socket
) -> None:
    """A send inside the transaction connects neither to the broker nor to the result backend."""
    url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    app = make_app(broker_url=url, result_backend={"redis": url, "rpc": "rpc://"}[backend])
    with rolled_back():
        SENDS[name](app.tasks[add.name])
        assert count_calls(silent) == 0
    assert count_calls(silent) == 0


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS.keys())
def test_a_failed_send_is_told_and_harms_nothing(
    send: Callable[[Any], Any], without_broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is kept, logged and signalled; the row is there and other callbacks run."""
    ran: list[str] = []
    with hearing(task_send_failed) as failures, transaction.atomic():
        Person.everyone.create()
        transaction.on_commit(lambda: ran.append("before"))
        result = send(without_broker.tasks[add.name])
        assert result.send_error is None
        transaction.on_commit(lambda: ran.append("after"))

    assert Person.everyone.count() == 1
    assert ran == ["before", "after"]
    assert isinstance(result.send_error, OperationalError)
    assert {failure["task_id"] for failure in failures} <= {*ids_in(result), result.id}
    assert {failure["error"] for failure in failures} == {result.send_error}
    records = [record for record in caplog.records if record.name.endswith("task_send_failed")]
    assert [vars(record)["safe_task_id"] for record in records] == [
        failure["task_id"] for failure in failures
    ]
    assert {record.exc_info[1] for record in records if record.exc_info} == {result.send_error}


def test_the_others_go_out_when_the_broker_refuses_one_message(
    sent: Sent, redis_server: RedisServer
) -> None:
    """A broker that refuses one member of a group, but is there, gets the other members."""
    with redis_server.client(db=1) as client:
        client.set("broken", "no list, so nothing can be pushed")
        with hearing(task_send_failed) as failed, hearing(task_sent) as told, transaction.atomic():
            members = [add.s(1), add.s(2).set(queue="broken"), add.s(3)]
            result = send_on_commit(group(members), retry_policy=ONE_TRY)
            chained = send_on_commit(chain(add.s(4), add.s(5)))
        client.delete("broken")
    kept = [result[0].id, result[2].id, chained.parent.id]
    assert [one["task_id"] for one in failed] == [result[1].id]
    assert [one["task_id"] for one in told] == kept
    assert [message.id for message in sent()] == kept
    assert "WRONGTYPE" in str(result.send_error)
    assert chained.send_error is None


def test_a_chord_is_known_at_the_call(make_app: MakeApp, redis_server: RedisServer) -> None:
    """Its result backend counts before its first task can end."""
    task = make_app().tasks[add.name]
    with transaction.atomic(), redis_server.client(db=2) as results:
        send_on_commit(chord([task.s(1), task.s(2)], task.s()), outbox=True)
        assert list(map(results.get, results.keys("*.s"))) == [b"2"]


@pytest.mark.parametrize("url", [None, "redis://127.0.0.1:1/0"], ids=["none", "gone"])
def test_only_a_chord_needs_it(url: str | None, make_app: MakeApp, sent: Sent) -> None:
    """Others go out without; a chord that could never complete is an error at the call."""
    task = make_app(result_backend=url).tasks[add.name]
    with transaction.atomic():
        with pytest.raises((redis.ConnectionError, NotImplementedError)) as refused:
            send_on_commit(chord([task.s(1), task.s(2)], task.s()))
        assert refused.value.__notes__[0].startswith("Nothing was sent. Check the result backend")
        alone = task.delay_on_commit(3)
    assert [message.id for message in sent()] == [alone.id]


def test_a_chord_of_a_backend_that_does_not_count_is_watched(
    make_app: MakeApp, sent: Sent, tmp_path: Path
) -> None:
    """The task that asks whether the chord is complete waits for the commit, as its members do."""
    app = make_app(result_backend=f"file://{tmp_path}")
    task = app.tasks[add.name]
    numbers = [1]
    with transaction.atomic():
        send_on_commit(chord([task.s(1), task.s(2)], task.s(numbers)))
        numbers.append(2)
        assert sent() == []
    messages = sorted(sent(), key=lambda message: message.task)
    assert [message.task for message in messages] == ["celery.chord_unlock", add.name, add.name]
    assert messages[0].body[0][1]["args"] == [[1]]
