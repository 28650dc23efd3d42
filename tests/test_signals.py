"""Every signal is sent, with the fields that are declared, and its record says the same."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, connections, transaction
from django.dispatch import Signal

from django_celery_safe import SafeTask, events, idempotent, signals, single_instance
from django_celery_safe.databases import Now
from django_celery_safe.emitting import Event, emit_in_background
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.leases.lease import Lease
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.app.models import Person
from tests.app.tasks import add
from tests.commands import run_python
from tests.concurrency.mailbox import Mailbox
from tests.docs.reference import declared
from tests.listening import handling, receiving
from tests.locks.renewals import acquired, free, held_by
from tests.processes import dead_port, wait_for
from tests.sending.carrying import Carried
from tests.sending.conftest import ONE_TRY, MakeApp, dying_sender, hearing, make_app
from tests.stages.test_messages import Staged
from tests.statements import raising

__all__ = ["make_app"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("in_redis")]

#: Gets a fixture by its name.
Get = Callable[[str], Any]
#: Makes an event happen.
Provoke = Callable[[Get], None]

SIGNALS: Final = {name: found for name, found in vars(signals).items() if type(found) is Signal}
NAMES: Final = {found: name for name, found in SIGNALS.items()}
DECLARED: Final = declared()
#: A lease that no test outlasts, s.
LEASE: Final = 30.0
#: Somebody else.
OTHER: Final = Holder("elsewhere", 4711, 1.0, True, "tests.other", "other")
TOKEN: Final = "0123456789abcdef" * 2


# Events.


class Listener(logging.Handler):
    """Hears all signals, and all records that are of events."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.records: list[logging.LogRecord] = []

    def hear(self, signal: Signal, sender: Any, **fields: Any) -> None:
        """Keep a signal."""
        self.heard.append((NAMES[signal], fields))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if record.name.rpartition(".")[2] in DECLARED:
            self.records.append(record)

    def emitted(self) -> list[tuple[Event, dict[str, Any], str]]:
        """Return each event, its fields and its text; its signal has the same fields."""
        found = []
        for record in self.records:
            name = record.name.rpartition(".")[2]
            (event,) = (
                way
                for way in DECLARED[name]
                if (way.level, way.text) == (record.levelno, record.msg)
            )
            extra = {key: value for key, value in vars(record).items() if key[:5] == "safe_"}
            fields = {key.removeprefix("safe_"): value for key, value in extra.items()}
            found.append((event, fields, record.getMessage()))
        assert self.heard == [
            (event.name, fields) for event, fields, _ in found if event.signal is not None
        ]
        return found


def background_is_idle() -> None:
    """Wait until all events of other threads are emitted."""
    told = threading.Event()
    emit_in_background(told.set)
    wait_for(told.is_set)


@contextmanager
def listening() -> Iterator[Listener]:
    """Listen to all signals, and to the package's log at DEBUG."""
    listener = Listener()
    with ExitStack() as stack:
        for signal in SIGNALS.values():
            stack.enter_context(receiving(signal, listener.hear))
        stack.enter_context(handling(listener))
        yield listener


@pytest.fixture
def get(request: pytest.FixtureRequest) -> Get:
    """A function that gets a fixture by its name, so that each test has those that it needs."""
    return request.getfixturevalue


# Locks.


def renew_at_once(name: str) -> Lease[Any]:
    """Let the time come at which a held lock is renewed."""
    leases = [lease for lane in list(renewer.lanes.values()) for lease in lane.leases]
    (lease,) = (lease for lease in leases if lease.name == name)
    lease.renew_at = 0.0
    renewer.add(lease)
    return lease


def lose_lock(name: str = "feed:42") -> None:
    """Lose a lock to who has it now."""
    lock = acquired(name)
    free(name)
    with held_by(name, "other"):
        assert not lock.release()


def play_locks(get: Get) -> None:
    """Lose a lock."""
    lose_lock()


# Single instances.


def play_single_instances(get: Get) -> None:
    """Send a task again before it ends, also for a canvas, and run it while another runs."""

    @single_instance(key="{number}", unique_until="end")
    def importing(number: int) -> None:
        pass

    mailbox: Mailbox = get("mailbox")
    task = mailbox.task(importing, name="tests.importing", base=SafeTask)
    task.delay(7)
    assert task.delay(7).is_duplicate
    task.apply_async((7,), link=task.si(8))
    message, _ = mailbox.take()
    with held_by("tests.importing:7", "other"):
        assert mailbox.deliver(message).value is None


# Sending.


def play_without_a_broker(get: Get) -> None:
    """Lose a message, and keep another in the outbox."""
    url = f"redis://127.0.0.1:{dead_port()}/0"
    make: MakeApp = get("make_app")
    task = make(broker_url=url, task_publish_retry_policy=ONE_TRY).tasks[add.name]
    with transaction.atomic():
        task.delay_on_commit(1)
        task.apply_async_on_commit((1,), outbox=True)


def leave_in_the_outbox(get: Get) -> None:
    """Die right after a commit."""
    get("broker")
    with dying_sender("default", due=True):
        add.apply_async_on_commit((1,), outbox=True)


def play_outbox(get: Get) -> None:
    """Send at the commit, relay, and fail to relay what nobody can read."""
    get("broker")
    with transaction.atomic():
        add.delay_on_commit(1)
    leave_in_the_outbox(get)
    Relay().drain()
    leave_in_the_outbox(get)
    OutboxMessage.objects.update(properties="no JSON")
    Relay(attempts=2).drain()
    OutboxMessage.objects.update(due_at=Now())
    Relay(attempts=1).drain()


#: Fails.
refuse = raising(ValueError("no"))


def play_carried(get: Get) -> None:
    """Let carried tasks end, well and in an error, be lost, come late and kill."""

    def lose(task: Any) -> None:
        OutboxMessage.objects.update(token=TOKEN, holder=encode_holder("task", OTHER))

    tasks = Carried(get("mailbox"), "default", max_deaths=1)
    for body in (lambda task: None, refuse, lose):
        tasks.body = body
        tasks.mailbox.deliver(tasks.send())
        OutboxMessage.objects.all()._raw_delete("default")
    message = tasks.send()
    tasks.make_due()
    assert len(tasks.relay()) == 1
    OutboxMessage.objects.update(deaths=1, last_death=encode_holder("task", OTHER))
    tasks.mailbox.deliver(message)


def play_flags(get: Get) -> None:
    """Fail to do by a flag what can't be done again."""
    person = Person.everyone.create()
    with (
        suppress(ValueError),
        Person.do_once(person.pk, "is_badge_printed", guarantee="at_most_once"),
    ):
        raise ValueError("no")


# Runs of stages.


def play_runs(get: Get) -> None:
    """Start a run, whose second stage fails."""
    runs = Staged(get("mailbox"), "default")
    runs.bodies = {"b": refuse}
    runs.start("a", "b")
    runs.deliver_all()


#: All that is signalled, in plays that each begin without rows.
PLAYS: Final[list[Provoke]] = [
    play_locks,
    play_single_instances,
    play_outbox,
    play_carried,
    play_flags,
    play_runs,
    play_without_a_broker,
]


def test_each_signal_is_as_declared(get: Get) -> None:
    """It has the declared fields; its record has them too, and the level and text."""
    heard = set()
    for play in PLAYS:
        with listening() as listener:
            play(get)
        for event, fields, text in listener.emitted():
            assert sorted(fields) == sorted(event.fields)
            assert "%(" not in text
            assert fields.get("relayed", False) is (event is events.TASK_RELAYED)
        heard |= {name for name, _ in listener.heard}
        get("mailbox").take()
        OutboxMessage.objects.all().delete()
    assert heard == set(SIGNALS)


# Receivers that raise or send.


class Exploding(logging.Handler):
    """A receiver and a handler that fail, whatever comes."""

    def hear(self, **event: Any) -> None:
        """Fail."""
        raise RuntimeError("a receiver")

    def emit(self, record: logging.LogRecord) -> None:
        """Fail."""
        raise RuntimeError("a handler")


@pytest.mark.parametrize("act", [play_locks, play_outbox, play_carried, play_runs])
def test_listeners_that_fail_harm_nothing(
    act: Provoke, get: Get, capsys: pytest.CaptureFixture[str]
) -> None:
    """Receivers and handlers raise; the work is done, and others hear of it."""
    exploding = Exploding()
    with ExitStack() as stack:
        for signal in SIGNALS.values():
            stack.enter_context(receiving(signal, exploding.hear))
        listener = stack.enter_context(listening())
        stack.enter_context(handling(exploding))
        act(get)
    assert listener.emitted()
    assert "RuntimeError: a handler" in capsys.readouterr().err


def interrupt(**event: Any) -> None:
    """Be interrupted by the task's time limit."""
    raise SoftTimeLimitExceeded


def interrupt_query(**event: Any) -> None:
    """Be interrupted inside a transaction, which ends in another error."""
    try:
        interrupt()
    finally:
        raise OperationalError("the connection is closed")


@pytest.mark.parametrize("receive", [interrupt, interrupt_query])
def test_a_time_limit_reaches_its_task(receive: Callable[..., Any]) -> None:
    """A soft time limit that hits in a receiver ends the task, and not the receiver alone."""
    reaches = pytest.raises(SoftTimeLimitExceeded)
    with listening() as listener, receiving(signals.lock_lost, receive), reaches:
        lose_lock()
    assert [name for name, _ in listener.heard] == ["lock_lost"]


def test_a_time_limit_that_is_handled_stays_handled() -> None:
    """A receiver that fails brings back no time limit that the task deals with already."""
    with receiving(signals.lock_lost, Exploding().hear):
        try:
            raise SoftTimeLimitExceeded
        except SoftTimeLimitExceeded:
            lose_lock()


def test_a_receiver_may_use_the_app() -> None:
    """It takes locks and writes rows; an event that it causes itself does not come back to it."""

    def receive(name: str, **event: Any) -> None:
        lose_lock(f"{name}+")
        Person.everyone.create()

    with listening() as listener, receiving(signals.lock_lost, receive):
        lose_lock()
    assert Person.everyone.count() == 1
    assert [fields["name"] for _, fields in listener.heard] == ["feed:42"]
    lost = [record for record in listener.records if record.name.endswith(".lock_lost")]
    assert len(lost) == 2  # both are logged


def test_a_slow_receiver_costs_no_lock() -> None:
    """While somebody takes long over a lost lock, the others are renewed."""
    begun, over = threading.Event(), threading.Event()

    def receive(**event: Any) -> None:
        begun.set()
        over.wait(60)

    acquired("lost", timeout=LEASE)
    kept = acquired("kept", timeout=LEASE)
    try:
        with receiving(signals.lock_lost, receive):
            free("lost")
            renew_at_once("lost")
            assert begun.wait(20)
            lease = renew_at_once("kept")
            before = lease.asked_at
            wait_for(lambda: lease.asked_at > before, 20, "it was not renewed")
            assert not over.is_set()
            over.set()
            background_is_idle()
    finally:
        over.set()
    assert kept.release()


HANGING: Final = """
import threading
from django_celery_safe import emitting

begun = threading.Event()
emitting.emit_in_background(lambda: (begun.set(), threading.Event().wait(500)))
begun.wait()
"""
TOLD: Final = "from django_celery_safe import emitting; emitting.emit_in_background(print, 1)"


def test_the_end_of_a_process() -> None:
    """It tells of what was found right before, and waits for no receiver that hangs."""
    for code, printed in ((TOLD, "1\n"), (HANGING, "")):
        assert run_python("-c", code) == printed


def test_who_writes_aside_leaves_no_connection(postgres_alias: str) -> None:
    """The thread that tells of losses closes what a receiver opened."""
    used: list[Any] = []

    def receive() -> None:
        Person.everyone.using(postgres_alias).exists()
        used.append(connections[postgres_alias].connection)

    emit_in_background(receive)
    background_is_idle()
    (opened,) = used
    assert opened.closed


# When it is told.


@pytest.mark.sql
def test_each_row_that_is_decided_about_is_told(db_alias: str) -> None:
    """Of those that were changed, and no other; of a hashed record with its whole key."""
    rows = OutboxMessage.objects.using(db_alias)
    for number in range(4):
        values = {"task": "tests.task", "task_id": str(number), "body": b"", "properties": "{}"}
        rows.create(**values, created_at=Now(), due_at=Now(), attempts=number % 2)
    chosen = rows.annotate(asked_at=Now()).order_by("-pk").exclude(task_id="0")
    with hearing(events.MESSAGE_RETRIED) as retried, hearing(events.MESSAGE_DISCARDED) as discarded:
        assert (chosen.revive(), chosen.discard(), chosen.discard()) == (2, 3, 0)
    assert sorted(one["task_id"] for one in retried) == ["1", "3"]
    assert sorted(one["task_id"] for one in discarded) == ["1", "2", "3"]
    assert [row.task_id for row in rows.all()] == ["0"]
    key = "order " + "x" * 300
    with idempotent(key, using=db_alias) as ours:
        assert ours
    with hearing(events.RECORD_FORGOTTEN) as forgotten:
        assert IdempotencyRecord.objects.using(db_alias).annotate(asked_at=Now()).forget() == 1
    assert [(one["key"], one["state"]) for one in forgotten] == [(key, "done")]
