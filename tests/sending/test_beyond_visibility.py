"""Sends that are due later than their broker is patient: told once, with their place."""

import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, chain, chord, group, shared_task
from django.db import transaction

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.events import SENT_BEYOND_VISIBILITY
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.app.tasks import add, total
from tests.concurrency.mailbox import Mailbox, Message
from tests.conftest import UseBroker
from tests.processes import CeleryWorker, wait_for
from tests.sending.conftest import MakeApp, hearing, line_above, take_records
from tests.sending.published import Published
from tests.servers import RabbitMQServer, RedisServer

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]
Warned = Callable[[], list[logging.LogRecord]]

#: Time that the broker waits for an acknowledgement, s; far from all delays in the tests.
PATIENCE = 600
LONG, SHORT = 1000, 300


@shared_task(base=SafeTask, send_on_commit=True)
def deferring(*args: object) -> None:
    """Wait for the commit with every send."""


@shared_task(base=SafeTask, outbox=True, send_on_commit=True)
def kept(*args: object) -> None:
    """Go through the outbox."""


@shared_task(base=SafeTask)
@single_instance(unique_until="end")
def unique(*args: object) -> None:
    """Be sent once at a time."""


@shared_task
def plain(*args: object) -> None:
    """Have Celery's own base."""


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
    "countdown, float": lambda s: {"countdown": s + 0.5},
    "countdown and eta": lambda s: {"countdown": s, "eta": in_s(2 * PATIENCE - s)},
    "countdown 0, and eta": lambda s: {"countdown": 0, "eta": in_s(s)},
    "eta": lambda s: {"eta": in_s(s)},
    "eta, other zone": lambda s: {"eta": in_s(s, ZoneInfo("Asia/Tokyo"))},
    "eta, offset": lambda s: {"eta": in_s(s, timezone(timedelta(hours=-11)))},
    "eta, naive": lambda s: {"eta": in_s(s).replace(tzinfo=None)},
    "eta, with expires": lambda s: {"eta": in_s(s), "expires": 10**6},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.usefixtures("patient")
def test_a_late_send_is_told(
    form: Callable[[float], dict[str, Any]], sent: Sent, warned: Warned
) -> None:
    """One WARNING has the task, both times and the place; it is sent as it is."""
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        result = add.apply_async((1,), **form(LONG))
        place = line_above()
    (record,) = warned()
    assert record.levelname == "WARNING"
    assert f"Task {add.name} is sent by {place} to run in " in record.message
    assert f"but after a visibility_timeout of {PATIENCE} s the broker" in record.message
    assert "broker_transport_options" in record.message
    assert "RabbitMQ with a consumer_timeout above that" in record.message
    (one,) = told
    assert (one["task"], one["visibility_timeout"], one["place"]) == (add.name, PATIENCE, place)
    assert LONG - 60 < one["delay"] <= LONG + 1
    assert f" {one['delay']:.0f} s" in record.message
    fields = vars(record)
    assert (fields["safe_task"], fields["safe_place"]) == (add.name, place)
    assert (fields["safe_delay"], fields["safe_visibility_timeout"]) == (one["delay"], PATIENCE)
    (message,) = sent()
    assert message.id == result.id


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.usefixtures("patient")
def test_a_send_in_time_is_not_told(
    form: Callable[[float], dict[str, Any]], sent: Sent, warned: Warned
) -> None:
    """A message that is due before the broker redelivers it is not reported at all."""
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        add.apply_async((1,), **form(SHORT))
    assert (warned(), told, len(sent())) == ([], [], 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"countdown": None, "eta": None},
        {"countdown": PATIENCE},
        {"countdown": 0},
        {"countdown": -LONG},
        {"countdown": -LONG, "eta": in_s(LONG)},
        {"countdown": 0, "eta": in_s(-LONG)},
        {"eta": in_s(-LONG)},
        {"expires": LONG},
    ],
    ids="-".join,
)
@pytest.mark.usefixtures("patient")
def test_what_is_no_late_send(options: dict[str, Any], sent: Sent, warned: Warned) -> None:
    """Messages due now, at the last moment or in the past are not reported, nor late expiries."""
    add.apply_async((1,), **options)
    assert (warned(), len(sent())) == ([], 1)


@pytest.mark.parametrize(("countdown", "count"), [(3600, 0), (3601, 1)])
def test_a_redis_waits_for_an_hour(
    broker: Celery, warned: Warned, countdown: int, count: int
) -> None:
    """Without a setting it is kombu's hour."""
    add.apply_async((1,), countdown=countdown)
    assert len(warned()) == count


#: Ways to send tasks late, and of how many tasks each is told.
SENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "apply_async": (lambda: add.apply_async((1,), countdown=LONG), 1),
    "on commit": (lambda: add.apply_async_on_commit((1,), countdown=LONG), 1),
    "on commit, outbox": (
        lambda: add.apply_async_on_commit((1,), countdown=LONG, outbox=True),
        1,
    ),
    "outbox": (lambda: add.apply_async((1,), countdown=LONG, outbox=True), 1),
    "deferring": (lambda: deferring.apply_async((1,), countdown=LONG), 1),
    "kept": (lambda: kept.apply_async((1,), countdown=LONG), 1),
    "signature": (lambda: add.s(1).set(countdown=LONG).delay(), 1),
    "signature with a countdown": (lambda: add.s(1).apply_async(countdown=LONG), 1),
    "send_on_commit": (lambda: send_on_commit(add.s(1), countdown=LONG), 1),
    "group": (lambda: group(add.s(1), add.s(2)).apply_async(countdown=LONG), 2),
    "group on commit": (
        lambda: send_on_commit(group(add.s(1).set(countdown=LONG), add.s(2)), outbox=True),
        1,
    ),
    "chain": (lambda: chain(add.s(1), add.s(2)).apply_async(countdown=LONG), 1),
    "chord": (
        lambda: chord([add.s(1).set(countdown=LONG), add.s(2)], total.s()).delay(),
        1,
    ),
}


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(("send", "count"), SENDS.values(), ids=SENDS.keys())
@pytest.mark.usefixtures("patient")
def test_each_way_to_send_is_told_once(
    send: Callable[[], Any], count: int, atomic: bool, sent: Sent, warned: Warned
) -> None:
    """At the call, with its line, and not again at the commit or by the outbox."""
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        if atomic:
            with transaction.atomic():
                send()
                before = len(told)
            assert before == count
        else:
            send()
    places = [vars(record)["safe_place"] for record in warned()]
    assert len(places) == len(told) == count
    for place in places:
        path, _, line = place.removesuffix(" in <lambda>").rpartition(":")
        assert path == __file__
        assert int(line) in lines_of(send)
    assert sent()


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


@pytest.mark.usefixtures("patient")
def test_tasks_of_celery_are_left_alone(sent: Sent, warned: Warned) -> None:
    """Only a SafeTask tells."""
    plain.apply_async((1,), countdown=LONG)
    assert (warned(), len(sent())) == ([], 1)


@pytest.mark.usefixtures("patient")
def test_every_send_is_told(warned: Warned) -> None:
    """Two sends from one place are two."""
    for _ in range(2):
        add.apply_async((1,), countdown=LONG)
    assert len(warned()) == 2


# Retries.


def retrying(self: Any) -> None:
    """Ask for another run, later than the broker waits."""
    raise self.retry(countdown=LONG)


def retrying_soon(self: Any) -> None:
    """Ask for another run, in time."""
    raise self.retry(countdown=SHORT)


def retrying_at(self: Any) -> None:
    """Ask for another run at a moment."""
    raise self.retry(eta=in_s(LONG))


def retrying_some_time(self: Any) -> None:
    """Ask for another run after default_retry_delay."""
    raise self.retry()


def retrying_in_atomic(self: Any) -> None:
    """Ask for another run, inside a transaction."""
    with transaction.atomic():
        raise self.retry(countdown=LONG)


@pytest.fixture
def mailbox(redis_server: RedisServer, patient: Celery) -> Iterator[Mailbox]:
    """An app on the private Redis, which waits for PATIENCE; its messages are run by hand."""
    with closing(Mailbox(redis_server.database_url(1))) as mailbox:
        mailbox.app.conf.update(patient_options())
        yield mailbox


def patient_options() -> dict[str, Any]:
    """Return the configuration of an app whose broker waits for PATIENCE."""
    return {"broker_transport_options": {"visibility_timeout": PATIENCE}}


@pytest.mark.parametrize(
    ("function", "options", "count"),
    [
        (retrying, {}, 1),
        (retrying_soon, {}, 0),
        (retrying_at, {}, 1),
        (retrying_some_time, {"default_retry_delay": LONG}, 1),
        (retrying_some_time, {"default_retry_delay": SHORT}, 0),
        (retrying_in_atomic, {}, 1),
        (retrying_in_atomic, {"send_on_commit": True}, 1),
        (retrying_in_atomic, {"send_on_commit": True, "outbox": True}, 1),
    ],
)
def test_a_late_retry_is_told(
    function: Callable[..., Any],
    options: dict[str, Any],
    count: int,
    mailbox: Mailbox,
    sent: Sent,
    warned: Warned,
) -> None:
    """self.retry in a run is told once, with the line in the task, and the message comes again."""
    task = mailbox.task(function, base=SafeTask, bind=True, max_retries=3, **options)
    task.delay()
    (first,) = sent()
    args, kwargs, embed = first.body
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        outcome = mailbox.deliver(Message(first.headers, args, kwargs, embed, {}))
    assert outcome.state == "RETRY"
    (again,) = sent()
    assert (again.id, again.headers["retries"]) == (first.id, 1)
    assert len(warned()) == len(told) == count
    for one in told:
        path, _, line = one["place"].removesuffix(f" in {function.__name__}").rpartition(":")
        assert path == __file__
        assert int(line) in lines_of(function)


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


LATE_TASKS = """
from celery import shared_task
from django_celery_safe import SafeTask


@shared_task(base=SafeTask, autoretry_for=(OSError,), default_retry_delay=1000)
def retried():
    raise OSError


@shared_task(base=SafeTask, bind=True, autoretry_for=(OSError,))
def retrying(self):
    raise self.retry(countdown=1000)


@shared_task(base=SafeTask)
def first(): ...


@shared_task(base=SafeTask)
def second(): ...


@shared_task(base=SafeTask)
def sender():
    second.apply_async(countdown=1000)


@shared_task(base=SafeTask)
def of_beat(): ...
"""


@pytest.mark.parametrize(
    ("program", "pool"),
    [
        ("python -m celery", "prefork"),
        pytest.param("celery", "prefork", marks=pytest.mark.long),
        pytest.param("celery", "solo", marks=pytest.mark.long),
    ],
)
def test_the_place_on_a_worker(
    program: str, pool: str, use_broker: UseBroker, settings: "Settings", tmp_path: Path
) -> None:
    """On a worker it is the task's line; of a retry, a chain's next task and beat Celery itself."""
    app = use_broker(visibility_timeout=PATIENCE)
    settings.CELERY_BEAT_SCHEDULE = {
        "late": {"task": "late_tasks.of_beat", "schedule": 1, "options": {"countdown": LONG}}
    }
    module = tmp_path / "late_tasks.py"
    module.write_text(LATE_TASKS)
    worker = CeleryWorker(
        "tests.app",
        pool=pool,
        concurrency=1,
        arguments=["--include", "late_tasks", "--beat", "--schedule", str(tmp_path / "schedule")],
        env={"PYTHONPATH": str(tmp_path)},
    )
    if program == "celery":
        worker.command[:3] = [str(Path(sys.executable).with_name("celery"))]
    next_one = app.signature("late_tasks.second", immutable=True, countdown=LONG)

    def places(task: str) -> set[str]:
        said = rf"Task late_tasks\.{task} is sent by (.+) to run in \d+ s"
        return set(re.findall(said, worker.log))

    with worker:
        for name in ("retried", "retrying", "sender"):
            app.send_task(f"late_tasks.{name}")
        (app.signature("late_tasks.first", immutable=True) | next_one).apply_async()
        lines = LATE_TASKS.splitlines()
        of_sender = 1 + lines.index("    second.apply_async(countdown=1000)")
        of_retrying = 1 + lines.index("    raise self.retry(countdown=1000)")
        expected = {
            "retried": {"Celery itself"},
            "retrying": {f"{module}:{of_retrying} in retrying"},
            "second": {f"{module}:{of_sender} in sender", "Celery itself"},
            "of_beat": {"Celery itself"},
        }
        wait_for(
            lambda: all(len(places(name)) >= len(found) for name, found in expected.items()), 30
        )
        assert {name: places(name) for name in expected} == expected


# Where there is nothing to tell.


def reindex() -> None:
    """Be sent."""


def make_patient_task(make_app: MakeApp, **conf: Any) -> Any:
    """Make a task of an app whose broker would be too impatient if it were a Redis."""
    app = make_app(**patient_options(), **conf)
    return make_task(app)


def make_task(app: Any) -> Any:
    """Give an app one task."""
    return app.task(reindex, name="shop.tasks.reindex", base=SafeTask, shared=False)


@pytest.mark.long
def test_a_rabbitmq_waits(
    make_app: MakeApp, rabbitmq_server: RabbitMQServer, warned: Warned
) -> None:
    """It gives nothing again while its connection lives, so nothing is told; it is sent."""
    task = make_patient_task(make_app, broker_url=rabbitmq_server.url)
    with hearing(SENT_BEYOND_VISIBILITY) as told:
        task.apply_async(countdown=LONG)
        with transaction.atomic():
            task.apply_async_on_commit(countdown=LONG)
    with task.app.connection_for_read() as connection:
        queue = connection.SimpleQueue("celery")
        for _ in range(2):
            queue.get(timeout=20).ack()  # both are there
        queue.close()
    assert (warned(), told) == ([], [])


@pytest.mark.parametrize("url", ["memory://", "filesystem://"])
def test_other_brokers_wait(make_app: MakeApp, warned: Warned, url: str) -> None:
    """Brokers that do not redeliver by time cause no event."""
    task = make_patient_task(make_app, broker_url=url)
    with transaction.atomic():
        task.apply_async_on_commit(countdown=LONG)
        transaction.set_rollback(True)
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


@pytest.mark.parametrize("timeout", ["an hour", None, [600]])
def test_a_timeout_that_means_nothing(make_app: MakeApp, warned: Warned, timeout: Any) -> None:
    """A visibility_timeout that is no number is left to the broker's transport."""
    app = make_app(broker_transport_options={"visibility_timeout": timeout})
    task = make_task(app)
    with transaction.atomic():
        task.apply_async_on_commit(countdown=10**6)
        transaction.set_rollback(True)
    assert warned() == []


class CountingCelery(Celery):
    """Counts the connections that are made, open or not."""

    made = 0

    def connection_for_write(self, *args: Any, **kwargs: Any) -> Any:
        """Make one, as Celery's."""
        self.made += 1
        return super().connection_for_write(*args, **kwargs)


def test_no_connection_is_opened() -> None:
    """A send that is in time asks for no connection, and a late one opens none."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(CountingCelery("counting", set_as_current=False)) as app,
    ):
        listener.setblocking(False)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        # A client that asks it all the same waits for an answer, but not for long.
        soon = {"socket_timeout": 2, "visibility_timeout": PATIENCE}
        app.conf.update(broker_url=url, broker_transport_options=soon)
        task: Any = make_task(app)
        with transaction.atomic(), hearing(SENT_BEYOND_VISIBILITY) as told:
            task.apply_async_on_commit()  # Celery's own are made once
            before = app.made
            task.apply_async_on_commit()
            task.apply_async_on_commit(countdown=SHORT)
            task.apply_async_on_commit(eta=in_s(SHORT))
            assert (app.made, told) == (before, [])
            task.apply_async_on_commit(countdown=LONG)
            assert (app.made, len(told)) == (before + 1, 1)
            transaction.set_rollback(True)
        with pytest.raises(BlockingIOError):
            listener.accept()
