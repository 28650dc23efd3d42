"""Every event that is declared happens, and its signal and its record say the same of it."""

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import pytest
from celery.exceptions import Retry, SoftTimeLimitExceeded
from django.db import ConnectionHandler, OperationalError, connection, connections, transaction
from django.dispatch import Signal
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe import (
    ClaimLost,
    LockBackendError,
    SafeTask,
    cache_lock,
    events,
    find_lock,
    idempotent,
    release_lock,
    signals,
    single_instance,
)
from django_celery_safe.concurrency.sent import SentLock
from django_celery_safe.conf import UNSET
from django_celery_safe.databases import Now
from django_celery_safe.emitting import Event, LoggedEvent, emit_in_background
from django_celery_safe.leases.clock import boottime
from django_celery_safe.leases.holder import HeldLock, Holder, encode_holder
from django_celery_safe.leases.lease import Lease
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.leases.store import LeaseStore
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep
from django_celery_safe.sending.relay import Relay
from django_celery_safe.stages.repairs import sweep
from django_celery_safe.stages.step_table import step_table
from tests.app.models import Person
from tests.app.tasks import add
from tests.concurrency.conftest import mailbox
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox, Message
from tests.conftest import MakeRedisCache
from tests.docs.events import declared
from tests.listening import handling, receiving
from tests.locks.conftest import fragile_redis
from tests.processes import dead_port, wait_for
from tests.sending.carrying import Carried
from tests.sending.conftest import ONE_TRY, MakeApp, make_app
from tests.servers import RedisServer
from tests.stages.test_messages import NAME, Staged, refuse

__all__ = ["fragile_redis", "mailbox", "make_app"]

pytestmark = pytest.mark.django_db(transaction=True)

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

    def emitted(self) -> list[tuple[LoggedEvent, dict[str, Any], str]]:
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
            (event.name, fields) for event, fields, _ in found if isinstance(event, Event)
        ]
        return found

    def has(self, name: str) -> bool:
        """Return whether an event was emitted."""
        return any(record.name.endswith(f".{name}") for record in self.records)


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
def listener() -> Iterator[Listener]:
    """A listener."""
    with listening() as listener:
        yield listener


@pytest.fixture
def get(request: pytest.FixtureRequest) -> Get:
    """A function that gets a fixture by its name, so that each test has those that it needs."""
    return request.getfixturevalue


@pytest.fixture(autouse=True)
def locks_in_redis(redis_cache_settings: MakeRedisCache, settings: Settings) -> None:
    """Keep locks in the private Redis."""
    settings.CACHES = redis_cache_settings("django-redis")


# Locks.


def renew_at_once(name: str) -> Lease[Any]:
    """Let the time come at which a held lock is renewed."""
    leases = [lease for lane in list(renewer.lanes.values()) for lease in lane._leases]
    (lease,) = (lease for lease in leases if lease.name == name)
    lease.renew_at = 0.0
    renewer.add(lease)
    return lease


def renew_until(event: LoggedEvent, name: str) -> None:
    """Let a renewal come due, and wait until all that it tells is told."""
    with listening() as listener:
        renew_at_once(name)
        wait_for(lambda: listener.has(event.name))
        background_is_idle()


def acquire_and_release(get: Get) -> None:
    """Hold a lock."""
    with cache_lock("feed:42") as lock:
        assert lock


def free(name: str) -> None:
    """Free a lock, as an operator."""
    lock = find_lock(name)
    assert lock is not None
    assert release_lock(lock)


def play_locks(get: Get) -> None:
    """Hold a lock, want one that another has, and lose one to who has it now."""
    acquire_and_release(get)
    with held_by("feed:42", "other"):
        assert not cache_lock("feed:42").acquire()
        free("feed:42")
    lock = cache_lock("feed:42")
    assert lock.acquire()
    free("feed:42")
    with held_by("feed:42", "other"):
        assert not lock.release()


def play_without_a_server(get: Get) -> None:
    """End, renew and give up locks whose server is gone."""
    server: RedisServer = get("fragile_redis")
    kept = cache_lock("kept", timeout=LEASE)
    assert kept.acquire()
    with cache_lock("feed:42", renew=False) as lock:
        assert lock
        server.stop()
    renew_until(events.LEASES_NOT_RENEWED, "kept")
    with suppress(LockBackendError):
        kept.release()
    SentLock("sent:tests.task:1", TOKEN, 5.0, UNSET).move(0)


class Broken(LeaseStore):
    """A store with a mistake in it."""

    where = "nowhere"

    def extend(self, renewals: Any, within: float | None = None) -> list[bool]:
        """Fail."""
        raise ZeroDivisionError("a mistake")

    def peek(self, name: str) -> HeldLock | None:
        """Know of nobody."""
        return None


def play_a_mistake(get: Get) -> None:
    """Renew a lock in a store that fails as nobody foresaw."""
    lease = Lease(Broken(), "feed:42", TOKEN, LEASE, boottime(), lambda *lost: None)
    renewer.add(lease)
    renew_until(events.LEASES_NOT_RENEWED_BY_A_BUG, "feed:42")
    renewer.remove(lease)


# Single instances.


class Importing:
    """A single-instance task of a mailbox."""

    def __init__(self, get: Get, body: Callable[[], None] = lambda: None, **options: Any) -> None:
        self.mailbox: Mailbox = get("mailbox")

        def importing(task: Any, number: int) -> None:
            if task.request.id == self.meant:
                body()

        self.meant = ""
        self.mailbox.app.tasks.pop("tests.importing", None)  # of the act before
        self.task = self.mailbox.task(
            single_instance(key="{number}", **options)(importing),
            name="tests.importing", base=SafeTask, bind=True, acks_late=True,
        )  # fmt: skip

    def send(self, **options: Any) -> Message:
        """Send one that runs the body."""
        self.task.apply_async((7,), **options)
        message = self.mailbox.take_one()
        self.meant = message.id
        return message


def play_conflicts(get: Get) -> None:
    """Run while another does, and have a message delivered again while it runs."""
    importing = Importing(get)
    with held_by("tests.importing:7", "other"):
        assert importing.mailbox.deliver(importing.send()).value is None

    def body() -> None:
        importing.meant = ""
        importing.mailbox.deliver_elsewhere(message, "default")

    importing = Importing(get, body)
    importing.mailbox.app.conf.broker_transport_options = {"visibility_timeout": 0.01}
    message = importing.send()
    importing.mailbox.deliver(message)
    importing.mailbox.deliver(importing.mailbox.take_one())


def play_duplicates(get: Get) -> None:
    """Send a task again before it ends, also for a canvas, and lose the lock of a message."""

    def body() -> None:
        free("sent:tests.importing:7")
        renew_until(events.SENT_LOCK_LOST, "sent:tests.importing:7")

    importing = Importing(get, body, unique_until="end", timeout=LEASE)
    message = importing.send()
    assert importing.task.delay(7).is_duplicate
    importing.task.apply_async((7,), link=importing.task.si(8))
    importing.mailbox.deliver(importing.mailbox.take_one())
    importing.mailbox.deliver(message)


# Sending.


def send_on_commit(get: Get) -> None:
    """Send when a transaction commits."""
    get("broker")
    with transaction.atomic():
        add.delay_on_commit(1)


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
    with transaction.atomic():
        add.apply_async_on_commit((1,), outbox=True)
        connection.run_on_commit.clear()
    OutboxMessage.objects.update(due_at=Now())


def relay(get: Get) -> None:
    """Send what was left."""
    leave_in_the_outbox(get)
    drain()


def drain(**options: Any) -> None:
    """Send what is due."""
    with closing(Relay(**options)) as found:
        found.drain()


def relay_what_is_damaged(get: Get, attempts: int) -> None:
    """Fail to send what nobody can read."""
    leave_in_the_outbox(get)
    OutboxMessage.objects.update(properties="no JSON")
    drain(attempts=attempts)


def play_outbox(get: Get) -> None:
    """Relay, fail to, decide about messages, and send too early, or for too late a moment."""
    send_on_commit(get)
    relay(get)
    relay_what_is_damaged(get, 2)
    OutboxMessage.objects.update(due_at=Now())
    drain(attempts=1)
    assert OutboxMessage.objects.dead().revive() == 1
    assert OutboxMessage.objects.all().discard() == 1
    add.apply_async((1,), countdown=7200)
    get("settings").DJANGO_CELERY_SAFE = {"WARN_IN_ATOMIC": True}
    with transaction.atomic():
        add.delay(1)


def play_carried(get: Get) -> None:
    """Let carried tasks end, well and in an error, come twice, come late, kill and be lost."""

    def refuse(task: Any) -> None:
        raise ValueError("no")

    def lose(task: Any) -> None:
        OutboxMessage.objects.update(token=TOKEN, holder=encode_holder("task", OTHER))

    tasks = Carried(get("mailbox"), "default", max_deaths=1)
    for body in (lambda task: None, refuse, lose):
        tasks.body = body
        message = tasks.send()
        for _ in range(2):
            tasks.mailbox.deliver(message)
        OutboxMessage.objects.all()._raw_delete("default")
    message = tasks.send()
    tasks.make_due()
    assert len(tasks.relay()) == 1
    OutboxMessage.objects.update(deaths=1, last_death=encode_holder("task", OTHER))
    tasks.mailbox.deliver(message)


# Once.


def do_once(get: Get, **options: Any) -> None:
    """Do something."""
    person = Person.everyone.create()
    with Person.do_once(person.pk, "is_badge_printed", **options) as row:
        assert row


def play_flags(get: Get) -> None:
    """Do something by a flag, do it again, and fail when it can't be done again."""
    do_once(get)
    with Person.do_once(Person.everyone.get().pk, "is_badge_printed") as row:
        assert row is None
    with (
        suppress(ValueError),
        Person.do_once(Person.everyone.create().pk, "is_badge_printed", guarantee="at_most_once"),
    ):
        raise ValueError("no")


def play_claims(get: Get) -> None:
    """Do what a key stands for, again, forget it, fail, put it back, and lose it."""
    for is_first in (True, False):
        with idempotent("order:42") as ours:
            assert bool(ours) is is_first
    assert IdempotencyRecord.objects.done().forget() == 1
    for error in (ValueError("no"), Retry()):
        with suppress(type(error)), idempotent("order:42"):
            raise error
    with pytest.raises(ClaimLost), idempotent("order:42") as ours:
        IdempotencyRecord.objects.update(token=TOKEN, holder=encode_holder("order:42", OTHER))
        ours.ensure()


# Runs of stages.


def staged(get: Get, **bodies: Callable[[Any], Any]) -> Staged:
    """Return runs in a mailbox."""
    box: Mailbox = get("mailbox")
    box.app.tasks.pop(NAME, None)  # of the act before
    found = Staged(box, "default")
    found.bodies = bodies
    return found


def play_runs(get: Get) -> None:
    """Run to the end, fail, and go on."""
    runs = staged(get)
    runs.start("a", "b")
    runs.deliver_all()
    runs = staged(get, a=refuse)
    run = runs.start("ab", "c")
    runs.deliver_all()
    run.refresh_from_db()
    run.resume()


def play_messages_of_steps(get: Get) -> None:
    """Deliver what has ended, what was deleted, and what somebody else runs by then."""

    def lose(task: Any) -> None:
        StageStep.objects.update(token=TOKEN, holder=encode_holder("step", OTHER))

    runs = staged(get, b=lose)
    run = runs.start("a")
    message = runs.take_one()
    for _ in range(2):
        runs.deliver(message)
    run.delete()
    runs.deliver(message)
    runs.start("b")
    runs.deliver(runs.take_one())


def play_repairs(get: Get) -> None:
    """Send again what nobody began, and let a run go on whose stage is complete."""
    staged(get).start("a")
    StageRun.objects.update(stage_at=Now() - timedelta(days=1))
    OutboxMessage.objects.all().erase()
    assert len(sweep(step_table())) == 1
    staged(get).start("a", "b").steps.filter(stage=1).update(status="succeeded")
    assert len(sweep(step_table())) == 1


#: All that happens, in plays that each begin without rows; the first needs the broker as it is,
#: and the last takes the servers away.
PLAYS: Final[list[Provoke]] = [
    play_outbox,
    play_locks,
    play_a_mistake,
    play_conflicts,
    play_duplicates,
    play_carried,
    play_flags,
    play_claims,
    play_runs,
    play_messages_of_steps,
    play_repairs,
    play_without_a_broker,
    play_without_a_server,
]
#: Events that other tests make happen: by Celery's default app (test_mistakes.py), and by a broker
#: that does not mark what it redelivers (worker/test_copies.py).
ELSEWHERE: Final = {events.SENT_WITHOUT_APP}


def test_each_event_is_as_declared(get: Get) -> None:
    """Its record has the level, text and fields that are declared, and its signal the fields."""
    seen = set(ELSEWHERE)
    for play in PLAYS:
        with listening() as listener:
            play(get)
        for event, fields, text in listener.emitted():
            assert sorted(fields) == sorted(event.fields)
            assert "%(" not in text
            assert fields.get("relayed", False) is (event is events.TASK_RELAYED)
            seen.add(event)
        get("mailbox").take()
        for model in (OutboxMessage, IdempotencyRecord, Person, StageRun):
            model._base_manager.all().delete()
    missing = {way for ways in DECLARED.values() for way in ways} - seen
    assert [(event.name, event.text) for event in missing] == []


# Receivers that raise or send.


def cost(act: Callable[[], None], server: RedisServer) -> tuple[dict[str, int], int]:
    """Return the commands of Redis and the number of queries that it takes."""
    gc.collect()  # results of other tests unsubscribe when they go
    with server.client() as client:
        client.config_resetstat()
        with CaptureQueriesContext(connection) as queries:
            act()
        stats = client.info("commandstats")
    # What comes now and then: connections, a script that forgets old locks, results that go.
    by_chance = ("hello", "client|setinfo", "zremrangebyscore", "unsubscribe")
    sent = {name: stat["calls"] for name, stat in stats.items() if not name.endswith(by_chance)}
    return sent, len(queries)


@pytest.mark.parametrize("act", [acquire_and_release, relay, do_once])
def test_listening_costs_no_round_trip(act: Provoke, redis_server: RedisServer, get: Get) -> None:
    """Receivers and logs of all events cost no command and no query more."""
    act(get)  # what comes once: connections, scripts, queues
    alone = cost(lambda: act(get), redis_server)
    with listening() as listener:
        observed = cost(lambda: act(get), redis_server)
    assert listener.emitted()
    assert observed == alone


class Exploding(logging.Handler):
    """A receiver and a handler that fail, whatever comes."""

    def hear(self, **event: Any) -> None:
        """Fail."""
        raise RuntimeError("a receiver")

    def emit(self, record: logging.LogRecord) -> None:
        """Fail."""
        raise RuntimeError("a handler")


@pytest.mark.parametrize("act", [play_locks, play_outbox, play_claims, play_runs])
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


@pytest.mark.parametrize(
    ("signal", "receive"),
    [(signals.lock_acquired, interrupt_query), (signals.lock_released, interrupt)],
)
def test_a_time_limit_reaches_its_task(
    signal: Signal, receive: Callable[..., Any], listener: Listener
) -> None:
    """A soft time limit that hits in a receiver ends the task, and not the receiver alone."""
    with receiving(signal, receive), pytest.raises(SoftTimeLimitExceeded), cache_lock("feed:42"):
        pass
    assert find_lock("feed:42") is None
    assert listener.has(NAMES[signal])


def test_a_time_limit_that_is_handled_stays_handled() -> None:
    """A receiver that fails brings back no time limit that the task deals with already."""
    with receiving(signals.lock_acquired, Exploding().hear):
        try:
            raise SoftTimeLimitExceeded
        except SoftTimeLimitExceeded:
            with cache_lock("feed:42") as lock:
                assert lock


def test_a_time_limit_in_a_receiver_of_a_run_reaches_its_task(get: Get) -> None:
    """Also where the event comes after a commit: the step has succeeded, and the task ends."""
    runs = staged(get)
    run = runs.start("a")
    with receiving(signals.run_ended, interrupt):
        outcome = runs.deliver(runs.take_one())
    assert type(outcome.value) is SoftTimeLimitExceeded
    run.refresh_from_db()
    assert run.status == "succeeded"


def test_a_receiver_may_use_the_app(listener: Listener) -> None:
    """It takes locks and writes rows; the events that it causes itself do not come back to it."""
    received: list[str] = []

    def receive(name: str, **event: Any) -> None:
        received.append(name)
        with cache_lock(f"{name}+") as lock:
            assert lock
            Person.everyone.create()

    with receiving(signals.lock_acquired, receive):
        acquire_and_release(lambda name: None)
    assert received == ["feed:42"]
    assert Person.everyone.count() == 1
    told = [(name, fields["name"]) for name, fields in listener.heard]
    assert told == [
        ("lock_acquired", "feed:42"), ("lock_released", "feed:42+"), ("lock_released", "feed:42"),
    ]  # fmt: skip
    assert len(listener.records) == 4  # all are logged


def test_a_slow_receiver_costs_no_lock() -> None:
    """While somebody takes long over a lost lock, the others are renewed."""
    begun, over = threading.Event(), threading.Event()

    def receive(**event: Any) -> None:
        begun.set()
        over.wait(60)

    lost, kept = cache_lock("lost", timeout=LEASE), cache_lock("kept", timeout=LEASE)
    assert lost.acquire()
    assert kept.acquire()
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


def test_a_connection_that_can_not_be_closed_stops_no_later_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that emits in the background goes on, whatever a receiver left behind."""
    tried: list[None] = []

    def fail(handler: object) -> None:
        tried.append(None)
        raise OperationalError("the connection is broken")

    monkeypatch.setattr(ConnectionHandler, "close_all", fail)
    for _ in range(2):
        background_is_idle()
    assert tried


HANGING: Final = """
import threading
from django_celery_safe import emitting

begun = threading.Event()
emitting.emit_in_background(lambda: (begun.set(), threading.Event().wait(50)))
begun.wait()
"""
TOLD: Final = "from django_celery_safe import emitting; emitting.emit_in_background(print, 1)"


def test_the_end_of_a_process() -> None:
    """It tells of what was found right before, and waits for no receiver that hangs."""
    for code, printed in ((TOLD, b"1\n"), (HANGING, b"")):
        ask = [sys.executable, "-c", code]
        assert subprocess.run(ask, timeout=40, check=True, capture_output=True).stdout == printed


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


def test_what_was_rolled_back_was_not_done_once(listener: Listener) -> None:
    """With durable=False it is told at the outer commit, and after a rollback never."""
    person = Person.everyone.create()
    for rolls_back in (True, False):
        with transaction.atomic():
            with Person.do_once(person.pk, "is_badge_printed", durable=False) as row:
                assert row
            assert not listener.has("done_once")
            transaction.set_rollback(rolls_back)
    assert [name for name, _ in listener.heard] == ["done_once"]


@pytest.mark.sql
def test_each_row_that_is_decided_about_is_told(db_alias: str, listener: Listener) -> None:
    """Of those that were changed, and no other; of a hashed record with its whole key."""
    rows = OutboxMessage.objects.using(db_alias)
    for number in range(4):
        values = {"task": "tests.task", "task_id": str(number), "body": b"", "properties": "{}"}
        rows.create(**values, created_at=Now(), due_at=Now(), attempts=number % 2)
    chosen = rows.annotate(asked_at=Now()).order_by("-pk").exclude(task_id="0")
    assert (chosen.revive(), chosen.discard(), chosen.discard()) == (2, 3, 0)
    told = sorted((name[8:], fields["task_id"]) for name, fields in listener.heard)
    assert told == [*[("discarded", one) for one in "123"], ("retried", "1"), ("retried", "3")]
    assert [row.task_id for row in rows.all()] == ["0"]
    key = "order " + "x" * 300
    with idempotent(key, using=db_alias) as ours:
        assert ours
    listener.heard.clear()
    assert IdempotencyRecord.objects.using(db_alias).annotate(asked_at=Now()).forget() == 1
    assert listener.heard == [("record_forgotten", {"key": key, "state": "done"})]
