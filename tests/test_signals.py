"""Every event that is declared happens, and its signal and its record say the same of it."""

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
from celery import Celery
from celery.exceptions import Retry, SoftTimeLimitExceeded
from django.db import ConnectionHandler, OperationalError, connection, connections, transaction
from django.dispatch import Signal
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import OperationalError as KombuError
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
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.docs.events import declared
from tests.kinds import KINDS
from tests.listening import handling, receiving
from tests.locks.conftest import fragile_redis
from tests.locks.renewals import wait_for_renewal
from tests.processes import dead_port, wait_for
from tests.routing import routed_by
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
#: A lease whose renewal a test can wait for, s.
SHORT: Final = 0.6
#: Somebody else.
OTHER: Final = Holder("elsewhere", 4711, 1.0, True, "tests.other", "other")
TOKEN: Final = "0123456789abcdef" * 2


# Events.


class Emitted(NamedTuple):
    """An event that happened: the way in which it did, its fields, and its record."""

    event: LoggedEvent
    fields: dict[str, Any]
    record: logging.LogRecord


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

    def emitted(self) -> list[Emitted]:
        """Return what was emitted; each record that has a signal has the same fields as that."""
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
            found.append(Emitted(event, fields, record))
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
    listener, logger = Listener(), logging.getLogger("django_celery_safe")
    before = logger.level
    with ExitStack() as stack:
        for signal in SIGNALS.values():
            signal.connect(listener.hear)
            stack.callback(signal.disconnect, listener.hear)
        logger.addHandler(listener)
        stack.callback(logger.removeHandler, listener)
        logger.setLevel(logging.DEBUG)
        stack.callback(logger.setLevel, before)
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


def acquire_and_release(get: Get) -> None:
    """Hold a lock."""
    with cache_lock("feed:42") as lock:
        assert lock


def contend(get: Get) -> None:
    """Want a lock that another has."""
    with held_by("feed:42", "other"):
        assert not cache_lock("feed:42").acquire()


def free(name: str) -> None:
    """Free a lock, as an operator."""
    lock = find_lock(name)
    assert lock is not None
    assert release_lock(lock)


def free_one(get: Get) -> None:
    """Free somebody else's lock."""
    with held_by("feed:42", "other"):
        free("feed:42")


def lose_to_another(get: Get) -> None:
    """Lose a lock to who has it now."""
    lock = cache_lock("feed:42")
    assert lock.acquire()
    free("feed:42")
    with held_by("feed:42", "other"):
        assert not lock.release()


def lose(get: Get) -> None:
    """Lose a lock to nobody."""
    lock = cache_lock("feed:42")
    assert lock.acquire()
    free("feed:42")
    assert not lock.release()


def release_without_a_server(get: Get) -> None:
    """End a block whose lock's server is gone."""
    server: RedisServer = get("fragile_redis")
    with cache_lock("feed:42", renew=False) as lock:
        assert lock
        server.stop()


def free_a_message_without_a_server(get: Get) -> None:
    """Be done with a message whose lock's server is gone."""
    server: RedisServer = get("fragile_redis")
    server.stop()
    SentLock("sent:tests.task:1", TOKEN, 5.0, UNSET).move(0)


def renew_without_a_server(get: Get) -> None:
    """Renew a lock whose server is gone."""
    listener, server = get("listener"), get("fragile_redis")
    lock = cache_lock("feed:42", timeout=SHORT)
    assert lock.acquire()
    server.stop()
    wait_for(lambda: listener.has("lock_backend_failed"))
    with suppress(LockBackendError):
        lock.release()
    background_is_idle()


class Broken(LeaseStore):
    """A store with a mistake in it."""

    where = "nowhere"

    def extend(self, renewals: Any, within: float | None = None) -> list[bool]:
        """Fail."""
        raise ZeroDivisionError("a mistake")

    def peek(self, name: str) -> HeldLock | None:
        """Know of nobody."""
        return None


def renew_by_mistake(get: Get) -> None:
    """Renew a lock in a store that fails as nobody foresaw."""
    listener = get("listener")
    lease = Lease(Broken(), "feed:42", TOKEN, SHORT, boottime(), lambda *lost: None)
    renewer.add(lease)
    wait_for(lambda: listener.has("lock_backend_failed"))
    renewer.remove(lease)
    background_is_idle()


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

    def deliver_elsewhere(self, message: Message) -> None:
        """Run a message as another process does, while this one runs it."""

        def deliver() -> None:
            self.mailbox.app.set_current()
            self.mailbox.deliver(message)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(deliver).result()


def meet_another(get: Get) -> None:
    """Run while another does."""
    importing = Importing(get)
    with held_by("tests.importing:7", "other"):
        assert importing.mailbox.deliver(importing.send()).value is None


def meet_another_directly(get: Get) -> None:
    """Call a task while another runs."""
    importing = Importing(get)
    with held_by("tests.importing:7", "other"):
        assert importing.task(7) is None


def deliver_again(times: int, get: Get) -> None:
    """Deliver a message again while it runs."""

    def body() -> None:
        importing.meant = ""
        for _ in range(times):
            importing.deliver_elsewhere(message)

    importing = Importing(get, body)
    message = importing.send()
    importing.mailbox.deliver(message)


def deliver_a_copy(get: Get) -> None:
    """Deliver the copy of a message when the run that it met has ended."""
    deliver_again(1, get)
    box: Mailbox = get("mailbox")
    box.deliver(box.take_one())


def send_twice(get: Get) -> None:
    """Send a task again before it ends."""
    importing = Importing(get, unique_until="end")
    importing.task.delay(7)
    assert importing.task.delay(7).is_duplicate


def send_twice_in_a_canvas(get: Get) -> Message:
    """Send a task again, for a canvas."""
    importing = Importing(get, unique_until="end")
    importing.task.delay(7)
    importing.mailbox.take()
    importing.task.apply_async((7,), link=importing.task.si(8))
    return importing.mailbox.take_one()


def run_a_duplicate(get: Get) -> None:
    """Deliver what a canvas waits for."""
    message = send_twice_in_a_canvas(get)
    get("mailbox").deliver(message)


def lose_a_message_s_lock(get: Get) -> None:
    """Lose the lock of a message while its task runs."""
    listener = get("listener")

    def body() -> None:
        free("sent:tests.importing:7")
        wait_for(lambda: listener.has("sent_lock_lost"))

    importing = Importing(get, body, unique_until="end", timeout=SHORT)
    importing.mailbox.deliver(importing.send())


# Sending.


def send_on_commit(get: Get) -> None:
    """Send when a transaction commits."""
    get("broker")
    with transaction.atomic():
        add.delay_on_commit(1)


def without_a_broker(get: Get) -> Any:
    """Return a task whose broker is gone."""
    url = f"redis://127.0.0.1:{dead_port()}/0"
    make: MakeApp = get("make_app")
    return make(broker_url=url, task_publish_retry_policy=ONE_TRY).tasks[add.name]


def send_without_a_broker(get: Get) -> None:
    """Lose a message."""
    task = without_a_broker(get)
    with transaction.atomic():
        task.delay_on_commit(1)


def keep_without_a_broker(get: Get) -> None:
    """Keep a message in the outbox."""
    task = without_a_broker(get)
    with transaction.atomic():
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
    with ExitStack() as stack:
        found = Relay(**options)
        stack.callback(found.close)
        found.drain()


def relay_what_is_damaged(get: Get, attempts: int) -> None:
    """Fail to send what nobody can read."""
    leave_in_the_outbox(get)
    OutboxMessage.objects.update(properties="no JSON")
    drain(attempts=attempts)


def retry_message(get: Get) -> None:
    """Let a dead message be sent again."""
    relay_what_is_damaged(get, 1)
    assert OutboxMessage.objects.dead().revive() == 1


def discard_message(get: Get) -> None:
    """Throw a message away."""
    leave_in_the_outbox(get)
    assert OutboxMessage.objects.all().discard() == 1


def carried(get: Get, body: Callable[..., Any], **options: Any) -> Carried:
    """Return a carried task in a mailbox."""
    box: Mailbox = get("mailbox")
    box.app.tasks.pop("tests.carried", None)  # of the act before
    found = Carried(box, "default", **options)
    found.body = body
    return found


def end_carried(get: Get) -> None:
    """Let a carried task end well."""
    tasks = carried(get, lambda task: None)
    tasks.mailbox.deliver(tasks.send())


def fail_carried(get: Get) -> None:
    """Let a carried task end in an error."""

    def refuse(task: Any) -> None:
        raise ValueError("no")

    tasks = carried(get, refuse)
    tasks.mailbox.deliver(tasks.send())


def poison(get: Get) -> None:
    """Run a task in which a process has died already."""
    tasks = carried(get, lambda task: None, max_deaths=1)
    message = tasks.send()
    OutboxMessage.objects.update(deaths=1, last_death=encode_holder("task", OTHER))
    tasks.mailbox.deliver(message)


def deliver_what_is_done(get: Get) -> None:
    """Deliver the message of a carried task twice."""
    tasks = carried(get, lambda task: None)
    message = tasks.send()
    for _ in range(2):
        tasks.mailbox.deliver(message)


def bring_back(get: Get) -> None:
    """Send again what no worker began."""
    tasks = carried(get, lambda task: None)
    tasks.send()
    tasks.make_due()
    assert len(tasks.relay()) == 1


def lose_carried(get: Get) -> None:
    """Lose a carried task to nobody."""
    tasks = carried(get, lambda task: OutboxMessage.objects.all().erase())
    tasks.mailbox.deliver(tasks.send())


def lose_carried_to_another(get: Get) -> None:
    """Lose a carried task to who runs it now."""

    def lose(task: Any) -> None:
        OutboxMessage.objects.update(token=TOKEN, holder=encode_holder("task", OTHER))

    tasks = carried(get, lose)
    tasks.mailbox.deliver(tasks.send())


def send_in_atomic(get: Get) -> None:
    """Send before the commit."""
    get("settings").DJANGO_CELERY_SAFE = {"WARN_IN_ATOMIC": True}
    get("broker")
    with transaction.atomic():
        add.delay(1)


def send_too_late(get: Get) -> None:
    """Send for a moment at which the broker has lost its patience."""
    get("broker")
    add.apply_async((1,), countdown=7200)


# Once.


def do_once(get: Get, **options: Any) -> None:
    """Do something."""
    person = Person.everyone.create()
    with Person.do_once(person.pk, "is_badge_printed", **options) as row:
        assert row


def do_twice(get: Get) -> None:
    """Do something again."""
    do_once(get)
    person = Person.everyone.get()
    with Person.do_once(person.pk, "is_badge_printed") as row:
        assert row is None


def fail_once(get: Get) -> None:
    """Fail when it can't be done again."""
    person = Person.everyone.create()
    with (
        pytest.raises(ValueError, match="no"),
        Person.do_once(person.pk, "is_badge_printed", guarantee="at_most_once"),
    ):
        raise ValueError("no")


def claim(get: Get) -> None:
    """Do what a key stands for."""
    with idempotent("order:42") as ours:
        assert ours


def claim_twice(get: Get) -> None:
    """Do it again."""
    claim(get)
    with idempotent("order:42") as ours:
        assert not ours


def claim_and(error: Exception, get: Get) -> None:
    """Fail to do it."""
    with suppress(type(error)), idempotent("order:42"):
        raise error


def lose_claim(get: Get) -> None:
    """Lose a claim to nobody."""
    with pytest.raises(ClaimLost), idempotent("order:42") as ours:
        IdempotencyRecord.objects.all().erase()
        ours.ensure()


def lose_claim_to_another(get: Get) -> None:
    """Lose a claim to who has it now."""
    with pytest.raises(ClaimLost), idempotent("order:42") as ours:
        IdempotencyRecord.objects.update(token=TOKEN, holder=encode_holder("order:42", OTHER))
        ours.ensure()


def forget(get: Get) -> None:
    """Forget what was done."""
    claim(get)
    assert IdempotencyRecord.objects.done().forget() == 1


# Runs of stages.


def staged(get: Get, **bodies: Callable[[Any], Any]) -> Staged:
    """Return runs in a mailbox."""
    box: Mailbox = get("mailbox")
    box.app.tasks.pop(NAME, None)  # of the act before
    found = Staged(box, "default")
    found.bodies = bodies
    return found


def succeed(get: Get) -> None:
    """Run to the end."""
    runs = staged(get)
    runs.start("a", "b")
    runs.deliver_all()


def fail(get: Get) -> StageRun:
    """Fail in a step."""
    runs = staged(get, a=refuse)
    run = runs.start("ab", "c")
    runs.deliver_all()
    run.refresh_from_db()
    return run


def fail_between(get: Get) -> None:
    """Fail for what a stage returned."""
    runs = staged(get, a=lambda task: {"a": "x" * 40_000}, b=lambda task: {"b": "x" * 40_000})
    runs.start("ab", "c")
    runs.deliver_all()


def resume(get: Get) -> None:
    """Go on after a failure."""
    fail(get).resume()


def begin_run(get: Get) -> None:
    """Start, and do no more."""
    staged(get).start("a")


def abort(get: Get) -> None:
    """Stop."""
    begin_run(get)
    StageRun.objects.get().abort()


def deliver_step_twice(get: Get) -> None:
    """Deliver a message whose step has ended."""
    runs = staged(get)
    runs.start("a")
    message = runs.take_one()
    runs.deliver(message)
    runs.deliver(message)


def deliver_what_is_gone(get: Get) -> None:
    """Deliver a message whose run was deleted."""
    runs = staged(get)
    run = runs.start("a")
    message = runs.take_one()
    run.delete()
    runs.deliver(message)


def lose_step(get: Get) -> None:
    """Lose a step to nobody."""

    def body(task: Any) -> None:
        StageStep.objects.all()._raw_delete("default")

    runs = staged(get, a=body)
    runs.start("a")
    runs.deliver(runs.take_one())


def lose_step_to_another(get: Get) -> None:
    """Lose a step to who runs it now."""

    def body(task: Any) -> None:
        StageStep.objects.update(token=TOKEN, holder=encode_holder("step", OTHER))

    runs = staged(get, a=body)
    runs.start("a")
    runs.deliver(runs.take_one())


def repair_step(get: Get) -> None:
    """Send again what nobody began."""
    staged(get).start("a")
    long_ago = Now() - timedelta(days=1)
    StageRun.objects.update(stage_at=long_ago)
    OutboxMessage.objects.all().erase()
    assert len(sweep(step_table())) == 1


def repair_run(get: Get) -> None:
    """Let a run go on whose stage is complete."""
    staged(get).start("a", "b")
    StageStep.objects.filter(stage=1).update(status="succeeded")
    assert len(sweep(step_table())) == 1


#: The functions that make each declared event happen.
PROVOKED: Final[dict[LoggedEvent, list[Provoke]]] = {
    events.SENT_WITHOUT_APP: [],  # test_mistakes.py: Celery's default app
    events.LOCK_ACQUIRED: [acquire_and_release],
    events.LOCK_CONTENDED: [contend],
    events.LOCK_RELEASED: [acquire_and_release],
    events.LOCK_LOST: [lose_to_another, lose],
    events.LOCK_NOT_RELEASED: [release_without_a_server],
    events.SENT_LOCK_NOT_MOVED: [free_a_message_without_a_server],
    events.LEASES_NOT_RENEWED: [renew_without_a_server],
    events.LEASES_NOT_RENEWED_BY_A_BUG: [renew_by_mistake],
    events.LOCK_FREED: [free_one],
    events.SENT_LOCK_LOST: [lose_a_message_s_lock],
    events.TASK_CONFLICT: [meet_another, meet_another_directly],
    events.TASK_OWN_COPY: [partial(deliver_again, 1)],
    events.TASK_OWN_COPY_DROPPED: [partial(deliver_again, 2)],
    events.TASK_OWN_COPY_OR_SECOND_SEND: [],  # worker/test_copies.py: a broker that marks
    events.COPY_DROPPED: [deliver_a_copy],
    events.TASK_DUPLICATE: [send_twice],
    events.TASK_DUPLICATE_PUBLISHED: [send_twice_in_a_canvas],
    events.DUPLICATE_SKIPPED: [run_a_duplicate],
    events.TASK_SENT: [send_on_commit],
    events.TASK_RELAYED: [relay],
    events.TASK_LOST: [send_without_a_broker],
    events.TASK_KEPT: [keep_without_a_broker],
    events.TASK_NOT_RELAYED: [partial(relay_what_is_damaged, attempts=2)],
    events.MESSAGE_DEAD: [partial(relay_what_is_damaged, attempts=1)],
    events.MESSAGE_DONE: [end_carried],
    events.MESSAGE_FAILED: [fail_carried],
    events.TASK_POISONED: [poison],
    events.MESSAGE_NOT_RUN: [deliver_what_is_done],
    events.MESSAGE_BROUGHT_BACK: [bring_back],
    events.MESSAGE_LOST: [lose_carried, lose_carried_to_another],
    events.MESSAGE_RETRIED: [retry_message],
    events.MESSAGE_DISCARDED: [discard_message],
    events.SENT_IN_ATOMIC: [send_in_atomic],
    events.SENT_BEYOND_VISIBILITY: [send_too_late],
    events.DONE_ONCE: [do_once],
    events.ALREADY_DONE: [do_twice],
    events.ONCE_FAILED: [fail_once],
    events.CLAIM_FINISHED: [claim],
    events.CLAIM_REPEATED: [claim_twice],
    events.CLAIM_FAILED: [partial(claim_and, ValueError("no"))],
    events.CLAIM_PUT_BACK: [partial(claim_and, Retry())],
    events.CLAIM_LOST: [lose_claim_to_another, lose_claim],
    events.RECORD_FORGOTTEN: [forget],
    events.RUN_STARTED: [succeed],
    events.RUN_RESUMED: [resume],
    events.STAGE_STARTED: [succeed],
    events.STEP_SUCCEEDED: [succeed],
    events.STEP_FAILED: [fail],
    events.STEP_SKIPPED: [deliver_step_twice],
    events.STEP_GONE: [deliver_what_is_gone],
    events.STEP_LOST: [lose_step_to_another, lose_step],
    events.STEP_REPAIRED: [repair_step],
    events.RUN_REPAIRED: [repair_run],
    events.RUN_ENDED: [succeed, abort],
    events.RUN_FAILED: [fail, fail_between],
}


def test_every_event_is_provoked() -> None:
    """Each way of each event that is declared is made to happen here, or where it says."""
    assert set(PROVOKED) == {way for ways in DECLARED.values() for way in ways}


@pytest.mark.quarantine("2026-11-26", "0.6 s lease")
@pytest.mark.parametrize(
    ("wanted", "act"),
    [
        pytest.param(wanted, act, id=f"{wanted.name}-{number}")
        for wanted, acts in PROVOKED.items()
        for number, act in enumerate(acts)
    ],
)
def test_an_event_is_as_declared(
    wanted: LoggedEvent, act: Provoke, listener: Listener, get: Get
) -> None:
    """Its record has the level, text and fields that are declared, and its signal the fields."""
    act(get)
    emitted = listener.emitted()
    for event, fields, record in emitted:  # also those that come along
        assert sorted(fields) == sorted(event.fields)
        assert "%(" not in record.getMessage()
    assert wanted in [event for event, _, _ in emitted]


def test_what_a_relay_sent_is_marked(get: Get, listener: Listener) -> None:
    """A counter sees how much went out late."""
    send_on_commit(get)
    relay(get)
    sent = [fields["relayed"] for name, fields in listener.heard if name == "task_sent"]
    assert sent == [False, True]


# The cost of receivers.


def run_alone(get: Get) -> None:
    """Run a single-instance task."""
    importing = Importing(get)
    assert importing.mailbox.deliver(importing.send()).state == "SUCCESS"


def keep_and_send(get: Get) -> None:
    """Send through the outbox."""
    get("broker")
    with transaction.atomic():
        add.apply_async_on_commit((1,), outbox=True)
    assert not OutboxMessage.objects.exists()


def work(get: Get) -> None:
    """Do what a key stands for, once and again."""
    claim_twice(get)
    IdempotencyRecord.objects.all().erase()


def run_steps(get: Get) -> None:
    """Run two stages, of two steps and one."""
    runs = staged(get)
    run = runs.start("ab", "c")
    runs.deliver_all()
    run.refresh_from_db()
    assert run.status == "succeeded"
    run.delete()


#: Things that are done all the time.
HOT: Final[dict[str, Provoke]] = {
    "lock": acquire_and_release,
    "contended lock": contend,
    "single instance": run_alone,
    "on commit": send_on_commit,
    "outbox": keep_and_send,
    "relay": relay,
    "do_once": do_once,
    "idempotent": work,
    "stages": run_steps,
}

hot = pytest.mark.parametrize("act", HOT.values(), ids=HOT.keys())


def commands_sent(server: RedisServer) -> dict[str, int]:
    """Return how often each command was sent to a Redis since the last time."""
    with server.client() as client:
        stats = client.info("commandstats")
        client.config_resetstat()
    ours = {"cmdstat_info", "cmdstat_config|resetstat", "cmdstat_hello", "cmdstat_client|setinfo"}
    # And what comes now and then: a script forgets locks that ended long ago, and results of
    # other tests go.
    ours |= {"cmdstat_zremrangebyscore", "cmdstat_unsubscribe"}
    return {name: stat["calls"] for name, stat in stats.items() if name not in ours}


def cost(act: Callable[[], None], server: RedisServer) -> tuple[dict[str, int], int]:
    """Return the commands and the number of queries that it takes."""
    gc.collect()  # results of other tests unsubscribe when they go
    commands_sent(server)
    with CaptureQueriesContext(connection) as queries:
        act()
    return commands_sent(server), len(queries)


@hot
def test_listening_costs_no_round_trip(act: Provoke, redis_server: RedisServer, get: Get) -> None:
    """Receivers and logs of all events cost no command and no query more."""
    do = partial(act, get)
    do()  # what comes once: connections, scripts, queues
    alone = cost(do, redis_server)
    with listening() as listener:
        observed = cost(do, redis_server)
    assert listener.emitted()
    assert alone[0] or alone[1]
    assert observed == alone


# Receivers that raise or send.


class Exploding(logging.Handler):
    """A receiver and a handler that fail, whatever comes."""

    def hear(self, **event: Any) -> None:
        """Fail."""
        raise RuntimeError("a receiver")

    def emit(self, record: logging.LogRecord) -> None:
        """Fail."""
        raise RuntimeError("a handler")


@hot
def test_listeners_that_fail_harm_nothing(
    act: Provoke, get: Get, capsys: pytest.CaptureFixture[str]
) -> None:
    """Receivers, those without a name too, and handlers raise; the work is done, others hear."""
    exploding = Exploding()
    with ExitStack() as stack:
        for signal in SIGNALS.values():
            stack.enter_context(receiving(signal, exploding.hear))
        listener = stack.enter_context(listening())
        stack.enter_context(handling(exploding))
        act(get)
    assert listener.emitted()
    assert "RuntimeError: a handler" in capsys.readouterr().err


def test_a_receiver_without_a_name_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Django has no name to log for a partial; its error is printed, and the lock is held."""
    exploding = partial(Exploding().hear)
    with receiving(signals.lock_acquired, exploding), cache_lock("feed:42") as lock:
        assert lock
    assert "RuntimeError: a receiver" in capsys.readouterr().err


def test_the_error_of_a_receiver_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Once, by Django, with its traceback."""
    with receiving(signals.lock_acquired, Exploding().hear):
        acquire_and_release(lambda name: None)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("django.dispatch", "ERROR")
    assert "Exploding.hear" in record.getMessage()
    assert record.exc_info is not None


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
@pytest.mark.parametrize("signal", [signals.lock_acquired, signals.lock_released])
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
    assert find_lock("feed:42") is None


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

    with receiving(signals.lock_acquired, receive), cache_lock("feed:42") as lock:
        assert lock
        assert find_lock("feed:42+") is None
    assert received == ["feed:42"]
    assert Person.everyone.count() == 1
    told = [(name, fields["name"]) for name, fields in listener.heard]
    assert told == [
        ("lock_acquired", "feed:42"), ("lock_released", "feed:42+"), ("lock_released", "feed:42"),
    ]  # fmt: skip
    logged = [record.__dict__["safe_name"] for record in listener.records]
    assert logged == ["feed:42", "feed:42+", "feed:42+", "feed:42"]


@pytest.mark.quarantine("2026-11-26", "two renewals of 3 s leases")
def test_a_slow_receiver_costs_no_lock() -> None:
    """While somebody takes long over a lost lock, the others are renewed."""
    begun, over = threading.Event(), threading.Event()

    def receive(**event: Any) -> None:
        begun.set()
        over.wait(30)

    lost, kept = cache_lock("lost", timeout=3), cache_lock("kept", timeout=3)
    assert lost.acquire()
    assert kept.acquire()
    try:
        with receiving(signals.lock_lost, receive):
            free("lost")
            wait_for(begun.is_set)
            wait_for_renewal("kept")
            wait_for_renewal("kept")
            kept.ensure()
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
        emitted = threading.Event()
        emit_in_background(emitted.set)
        wait_for(emitted.is_set, 30)
    assert tried


def test_a_receiver_that_hangs_keeps_no_process() -> None:
    """A process ends soon after its last event, whatever a receiver still does."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGING], timeout=60, check=True)
    assert done.returncode == 0
    assert time.monotonic() - began < 30  # the receiver takes 50 s


HANGING: Final = """
import threading
from django_celery_safe import emitting

begun = threading.Event()
emitting.emit_in_background(lambda: (begun.set(), threading.Event().wait(50)))
begun.wait()
"""


def test_what_is_told_last_is_told() -> None:
    """A process that ends at once tells of what was found just before."""
    ask = [
        sys.executable,
        "-c",
        "from django_celery_safe import emitting; emitting.emit_in_background(print, 1)",
    ]
    assert subprocess.run(ask, timeout=60, check=True, capture_output=True).stdout == b"1\n"


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


def test_a_duplicate_is_told_when_it_is_published(get: Get, listener: Listener) -> None:
    """Without a broker nothing was published all the same."""
    url = f"redis://127.0.0.1:{dead_port()}/0"
    app: Celery = get("make_app")(broker_url=url, task_publish_retry_policy=ONE_TRY)

    def work(number: int) -> None:
        """Do nothing."""

    work = single_instance(key="{number}", unique_until="end")(work)
    task: Any = app.task(work, name="tests.unique", base=SafeTask, shared=False)
    with held_by("sent:tests.unique:1", "other"), pytest.raises(KombuError):
        task.apply_async((1,), link=task.si(2))
    assert listener.heard == []


DECISIONS: Final[dict[str, tuple[Provoke, Callable[[], Any], str]]] = {
    "retry": (
        partial(relay_what_is_damaged, attempts=2),
        lambda: OutboxMessage.objects.all().revive(),
        "message_retried",
    ),
    "discard": (
        leave_in_the_outbox, lambda: OutboxMessage.objects.all().discard(), "message_discarded"
    ),
    "forget": (claim, lambda: IdempotencyRecord.objects.all().forget(), "record_forgotten"),
    "resume": (fail, lambda: StageRun.objects.get().resume(), "run_resumed"),
    "abort": (begin_run, lambda: StageRun.objects.get().abort(), "run_ended"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "decide", "name"), DECISIONS.values(), ids=DECISIONS.keys())
def test_a_decision_is_told_when_it_is_committed(
    before: Provoke, decide: Callable[[], Any], name: str, get: Get
) -> None:
    """Not inside the transaction of whoever decides, nor after its rollback; then once."""
    before(get)
    with listening() as listener:
        for rolls_back in (True, False):
            with transaction.atomic():
                decide()
                transaction.set_rollback(rolls_back)
                assert not listener.has(name)
    assert [one for one, _ in listener.heard].count(name) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_message_that_is_decided_about_is_told(
    kind: Any, make_database: MakeDatabase, listener: Listener
) -> None:
    """Of those that were changed, and no other; whatever else is asked of the rows."""
    rows = OutboxMessage.objects.using(make_database(kind))
    for number in range(4):
        new = OutboxMessage(
            task="tests.task", task_id=str(number), body=b"", properties="{}", created_at=Now(),
            due_at=Now(), attempts=number % 2,
        )  # fmt: skip
        new.save(using=rows.db, force_insert=True)
    chosen = rows.annotate(asked_at=Now()).order_by("-pk").exclude(task_id="0")
    assert chosen.revive() == 2
    assert chosen.discard() == 3
    assert chosen.discard() == 0
    told = sorted((name, fields["task_id"]) for name, fields in listener.heard)
    assert told == [
        *[("message_discarded", one) for one in "123"], *[("message_retried", one) for one in "13"],
    ]  # fmt: skip
    assert [row.task_id for row in rows.all()] == ["0"]


class Split:
    """A database router: rows are read from a replica, and written elsewhere."""

    def __init__(self, replica: str, alias: str) -> None:
        self.db_for_read = lambda model, **hints: replica
        self.db_for_write = lambda model, **hints: alias


def test_a_decision_is_taken_where_rows_are_written(
    make_database: MakeDatabase, listener: Listener
) -> None:
    """Not in the replica that they are read from, also if none are meant."""
    alias = make_database("sqlite-immediate")
    replica = make_database("sqlite-immediate", "replica")
    leave = {"body": b"", "properties": "{}", "created_at": Now(), "due_at": Now(), "attempts": 1}
    OutboxMessage(task="tests.task", task_id="1", **leave).save(using=alias, force_insert=True)
    with idempotent("order:1", using=alias) as ours:
        assert ours
    with routed_by(Split(replica, alias)):
        messages, records = OutboxMessage.objects, IdempotencyRecord.objects
        assert messages.none().revive() == messages.filter(pk__in=[]).discard() == 0
        assert records.none().forget() == 0
        assert messages.all().revive() == messages.all().discard() == records.all().forget() == 1
    told = {name for name, _ in listener.heard}
    assert told >= {"message_retried", "message_discarded", "record_forgotten"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_record_has_its_whole_key(
    kind: Any, make_database: MakeDatabase, listener: Listener
) -> None:
    """Also where the table has a hash of it."""
    alias, key = make_database(kind), "order " + "x" * 300
    with idempotent(key, using=alias) as ours:
        assert ours
    listener.heard.clear()
    assert IdempotencyRecord.objects.using(alias).annotate(asked_at=Now()).forget() == 1
    assert listener.heard == [("record_forgotten", {"key": key, "state": "done"})]


def test_a_stage_that_can_not_be_begun_is_not_told(get: Get, listener: Listener) -> None:
    """The run ends, and says why."""
    runs = staged(get)
    runs.start("a", "b")
    StageStep.objects.filter(stage=2).update(arguments_text='{"nobody": "takes this"}')
    runs.deliver_all()
    told = [(name, fields) for name, fields in listener.heard if name.startswith("run_")]
    begun = [fields["stage"] for name, fields in listener.heard if name == "stage_started"]
    assert begun == [1]
    name, fields = told[-1]
    assert (name, fields["status"]) == ("run_ended", "failed")
    assert fields["error"].startswith("Stage 2 can't be begun: ")
