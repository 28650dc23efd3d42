"""Sends that are due later than their broker is patient: told once, with their place."""

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, chord, group, shared_task
from django.db import transaction

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.events import SENT_BEYOND_VISIBILITY
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.app.tasks import add, total
from tests.concurrency.mailbox import Mailbox, Message
from tests.conftest import UseBroker
from tests.sending.conftest import MakeApp, hearing, line_above, take_records
from tests.sending.published import Published
from tests.sending.relaying import count_calls
from tests.servers import RedisServer

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]
Warned = Callable[[], list[logging.LogRecord]]

#: Time that the broker waits for an acknowledgement, s; far from all delays in the tests.
PATIENCE = 600
LONG, SHORT = 1000, 300


@shared_task(base=SafeTask, send_on_commit=True)
def deferring(*args: object) -> None:
    """Wait for the commit with every send."""


@shared_task(base=SafeTask)
@single_instance(unique_until="end")
def unique(*args: object) -> None:
    """Be sent once at a time."""


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warned:
    """Take the warnings of sends that are due too late."""
    return partial(take_records, caplog, SENT_BEYOND_VISIBILITY)


@pytest.fixture
def patient(broker: Celery, use_broker: UseBroker) -> Celery:
    """The private Redis waits for PATIENCE."""
    return use_broker(visibility_timeout=PATIENCE)


def in_s(seconds: float, zone: Any = UTC) -> datetime:
    """Return the moment in so many seconds."""
    return datetime.now(zone) + timedelta(seconds=seconds)


#: Forms in which a send can be given a time, each for so many seconds from now.
FORMS: dict[str, Callable[[float], dict[str, Any]]] = {
    "countdown": lambda s: {"countdown": s},
    "countdown and eta": lambda s: {"countdown": s, "eta": in_s(2 * PATIENCE - s)},
    "countdown 0, and eta": lambda s: {"countdown": 0, "eta": in_s(s, ZoneInfo("Asia/Tokyo"))},
    "eta, naive": lambda s: {"eta": in_s(s).replace(tzinfo=None)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.usefixtures("patient")
def test_a_late_send_is_told(
    form: Callable[[float], dict[str, Any]], sent: Sent, warned: Warned
) -> None:
    """One WARNING has the task, both times and the place; it is sent as it is. Others have none."""
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        add.apply_async((1,), **form(SHORT))
        assert (warned(), told) == ([], [])
        result = add.apply_async((1,), **form(LONG))
        place = line_above()
    (record,) = warned()
    assert record.levelname == "WARNING"
    (one,) = told
    assert (one["task"], one["visibility_timeout"], one["place"]) == (add.name, PATIENCE, place)
    assert LONG - 60 < one["delay"] <= LONG + 1
    for value in (add.name, place, f" {one['delay']:.0f} s", f" {PATIENCE} s"):
        assert value in record.message
    assert sent()[1].id == result.id


@pytest.mark.usefixtures("patient")
def test_what_is_no_late_send(sent: Sent, warned: Warned) -> None:
    """Messages due now, at the last moment or in the past are not reported, nor late expiries."""
    for options in (
        {"countdown": None, "eta": None},
        {"countdown": PATIENCE},
        {"countdown": -LONG, "eta": in_s(LONG)},
        {"eta": in_s(-LONG)},
        {"expires": LONG},
    ):
        add.apply_async((1,), **options)
    assert (warned(), len(sent())) == ([], 5)


def test_a_redis_waits_for_an_hour(broker: Celery, warned: Warned) -> None:
    """Without a setting it is kombu's hour."""
    add.apply_async((1,), countdown=3600)
    assert warned() == []
    add.apply_async((1,), countdown=3601)
    assert len(warned()) == 1


#: Ways to send a task late.
SENDS: dict[str, Callable[[], Any]] = {
    "on commit, outbox": lambda: add.apply_async_on_commit((1,), countdown=LONG, outbox=True),
    "deferring": lambda: deferring.apply_async((1,), countdown=LONG),
    "signature": lambda: add.s(1).set(countdown=LONG).delay(),
    "group on commit": lambda: send_on_commit(group(add.s(1).set(countdown=LONG), add.s(2))),
    "chord": lambda: chord([add.s(1).set(countdown=LONG), add.s(2)], total.s()).delay(),
}


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
@pytest.mark.usefixtures("patient")
def test_each_way_to_send_is_told_once(send: Callable[[], Any], sent: Sent, warned: Warned) -> None:
    """At the call, with its line, and not again at the commit or by the outbox."""
    with transaction.atomic():
        send()
        (record,) = warned()
    path, _, line = vars(record)["safe_place"].removesuffix(" in <lambda>").rpartition(":")
    assert (path, int(line) in lines_of(send)) == (__file__, True)
    assert (warned(), len(sent()) > 0) == ([], True)


def test_a_relay_tells_nothing(patient: Celery, sent: Sent, warned: Warned) -> None:
    """An event from the call that wrote the row is not repeated by a relay."""
    with transaction.atomic():
        add.apply_async_on_commit((1,), countdown=LONG, outbox=True)
        transaction.get_connection().run_on_commit.clear()
    assert len(warned()) == 1
    OutboxMessage.objects.update(due_at=datetime(2026, 1, 1, tzinfo=UTC))
    Relay("default").drain()
    assert (len(sent()), warned()) == (1, [])


@pytest.mark.usefixtures("patient", "locks_in_memory")
def test_a_unique_send_is_told_once(sent: Sent, warned: Warned) -> None:
    """A send under a lock of its own is one send."""
    unique.apply_async((1,), countdown=LONG)
    place = line_above()
    assert [vars(record)["safe_place"] for record in warned()] == [place]
    assert len(sent()) == 1


# Retries.


def retrying_in_atomic(self: Any) -> None:
    """Ask for another run, inside a transaction."""
    with transaction.atomic():
        raise self.retry()


@pytest.fixture
def mailbox(redis_server: RedisServer, patient: Celery) -> Iterator[Mailbox]:
    """An app on the private Redis, which waits for PATIENCE; its messages are run by hand."""
    with closing(Mailbox(redis_server.database_url(1))) as mailbox:
        mailbox.app.conf.update(patient_options())
        yield mailbox


def patient_options() -> dict[str, Any]:
    """Return the configuration of an app whose broker waits for PATIENCE."""
    return {"broker_transport_options": {"visibility_timeout": PATIENCE}}


def test_a_late_retry_is_told(mailbox: Mailbox, sent: Sent, warned: Warned) -> None:
    """self.retry is told once, with the line in the task, and its message leaves the block."""
    options: Any = {"send_on_commit": True, "outbox": True, "default_retry_delay": LONG}
    task = mailbox.task(retrying_in_atomic, base=SafeTask, bind=True, **options)
    task.delay()
    (first,) = sent()
    args, kwargs, embed = first.body
    outcome = mailbox.deliver(Message(first.headers, args, kwargs, embed, {}))
    assert outcome.state == "RETRY"
    (again,) = sent()
    assert (again.id, again.headers["retries"]) == (first.id, 1)
    (record,) = warned()
    place = vars(record)["safe_place"].removesuffix(" in retrying_in_atomic")
    path, _, line = place.rpartition(":")
    assert (path, int(line) in lines_of(retrying_in_atomic)) == (__file__, True)


def lines_of(function: Callable[..., Any]) -> set[int]:
    """Return the numbers of a function's lines."""
    return {number for _, _, number in function.__code__.co_lines() if number}


# Sends that no line of the project makes.


@pytest.mark.usefixtures("patient")
def test_a_send_by_another_thread(sent: Sent, warned: Warned) -> None:
    """A thread that runs only the send has no place in the code: the log names Celery itself."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(add.apply_async, (1,), countdown=LONG).result()
    thread = Thread(target=add.apply_async, args=((1,),), kwargs={"countdown": LONG})
    thread.start()
    thread.join()
    assert [vars(record)["safe_place"] for record in warned()] == ["Celery itself"] * 2
    assert len(sent()) == 2


# Where there is nothing to tell.


def test_other_brokers_wait(make_app: MakeApp, warned: Warned) -> None:
    """Brokers that do not redeliver by time cause no event."""
    task = make_app(broker_url="memory://", **patient_options()).tasks[add.name]
    task.apply_async_on_commit((1,), countdown=LONG)
    assert warned() == []


def test_an_eager_run_does_not_wait(patient: Celery, warned: Warned) -> None:
    """In eager mode nothing is sent; .apply() sends nothing either."""
    assert add.apply((1, 2), countdown=LONG).get() == 3
    patient.conf.task_always_eager = True
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        assert add.apply_async((1, 2), countdown=LONG).get() == 3
        with transaction.atomic():
            result = add.apply_async_on_commit((1, 2), countdown=LONG)
        assert result.get() == 3
        send_on_commit(add.s(1, 2), countdown=LONG)
    assert (warned(), told) == ([], [])


def test_a_timeout_that_means_nothing(make_app: MakeApp, warned: Warned) -> None:
    """A visibility_timeout that is no number is left to the broker's transport."""
    for timeout in ("an hour", None, [600]):
        app = make_app(broker_transport_options={"visibility_timeout": timeout})
        with transaction.atomic():
            app.tasks[add.name].apply_async_on_commit((1,), countdown=10**6)
            transaction.set_rollback(True)
    assert warned() == []


def test_no_connection_is_opened(make_app: MakeApp, silent: socket.socket, warned: Warned) -> None:
    """The kind of a broker is known without asking it."""
    url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
    task = make_app(broker_url=url, **patient_options()).tasks[add.name]
    with transaction.atomic():
        task.apply_async_on_commit((1,), countdown=LONG)
        transaction.set_rollback(True)
    assert (len(warned()), count_calls(silent)) == (1, 0)
