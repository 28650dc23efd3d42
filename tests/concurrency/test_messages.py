"""Messages of single-instance tasks that meet a lock, without a worker."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Task
from celery.exceptions import Reject, Retry
from django.db import connections
from django.utils import timezone
from kombu.exceptions import OperationalError
from pytest_django import Settings

from django_celery_safe import (
    AlreadyRunning,
    CacheLock,
    LockBackendError,
    LockLost,
    SafeTask,
    find_lock,
    iter_locks,
    release_lock,
    single_instance,
)
from django_celery_safe.delivery import copies
from django_celery_safe.delivery.header import HEADER
from django_celery_safe.events import TASK_CONFLICT, TASK_OWN_COPY
from django_celery_safe.leases.lease import boottime, clock
from django_celery_safe.locks.stores.base import LockRequest
from django_celery_safe.locks.stores.local import LocalStore
from tests.caches import cache_at
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.contract.conftest import params
from tests.locks.renewals import held_by
from tests.processes import dead_port, wait_for
from tests.sending.conftest import hearing

#: Locks live in memory, unless a test says otherwise.
pytestmark = pytest.mark.usefixtures("locks_in_memory")

NAME = "tests.importing"
LOCK = f"{NAME}:7"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for the own lock: here its holder never ends by itself."""
    monkeypatch.setattr(copies, "OWN_RUN_WAIT", 0.01)


@pytest.fixture(params=params("local", "django-redis", "memcached", "database"))
def store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> None:
    """Each kind of store in turn."""
    use_store(request.param)


class Importing:
    """A single-instance task of the mailbox, and what became of it."""

    def __init__(self, mailbox: Mailbox, base: Any = SafeTask, **options: Any) -> None:
        self.mailbox = mailbox
        #: The task id of each run.
        self.runs: list[str] = []

        def importing(task: Any, number: int) -> str:
            self.runs.append(task.request.id)
            return "imported"

        names = {"on_conflict", "retry_delay", "blocking_timeout", "timeout"} & options.keys()
        decorate = single_instance(key="{number}", **{name: options.pop(name) for name in names})
        options.setdefault("acks_late", True)
        self.task = mailbox.task(decorate(importing), name=NAME, base=base, bind=True, **options)

    def deliver_beside_another(self) -> Outcome:
        """Deliver a message for the lock of number 7 while another run holds it."""
        message = self.message()
        with held_by(LOCK, "other"):
            return self.mailbox.deliver(message)

    def message(self, **options: Any) -> Message:
        """Return a message for the lock of number 7."""
        return self.mailbox.send(self.task, 7, **options)


# Another run holds the lock.


@pytest.mark.parametrize("base", [Task, SafeTask])
def test_skip_succeeds_with_none(base: Any, mailbox: Mailbox) -> None:
    """The duplicate ends as a success without a result, and the body does not run."""
    importing = Importing(mailbox, base)
    assert importing.deliver_beside_another() == ("SUCCESS", None)
    assert importing.runs == []
    assert mailbox.take() == []


def test_a_lease_that_ends_before_the_body_begins(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task runs, because no one else holds its lock, and is not skipped."""
    importing = Importing(mailbox, timeout=30)
    message = importing.message()

    acquire = CacheLock.acquire

    def acquire_and_stall(lock: CacheLock, *args: Any) -> bool:
        acquired = acquire(lock, *args)
        monkeypatch.setattr(clock, "now", lambda: boottime() + 31)
        return acquired

    monkeypatch.setattr(CacheLock, "acquire", acquire_and_stall)
    for run in (lambda: mailbox.deliver(message).value, lambda: importing.task(7)):
        monkeypatch.setattr(clock, "now", boottime)
        assert run() == "imported"


def test_the_key_that_travels_decides(mailbox: Mailbox) -> None:
    """The sender's key is taken as it is, since only the sender had the arguments as given."""
    importing = Importing(mailbox)
    message = importing.message().with_headers(**{HEADER: {"task": NAME, "key": "of the sender"}})
    with held_by(f"{NAME}:of the sender", "other"):
        assert mailbox.deliver(message).value is None
    with held_by(LOCK, "other"):
        assert mailbox.deliver(message).value == "imported"


def test_wait_runs_when_the_other_has_ended(store: None, mailbox: Mailbox) -> None:
    """A run that waits says so, naming the holder, and runs as soon as the lock is free."""
    importing = Importing(mailbox, on_conflict="wait", blocking_timeout=20)
    message = importing.message()
    hears = hearing(TASK_CONFLICT, TASK_OWN_COPY)
    with held_by(LOCK, "other") as lock, ThreadPoolExecutor(1) as pool, hears as events:

        def end_once_waited_for() -> None:
            wait_for(lambda: events, message="nobody waits")
            release_lock(lock)
            connections.close_all()

        ending = pool.submit(end_once_waited_for)
        assert mailbox.deliver(message) == ("SUCCESS", "imported")
        ending.result()
    ((event),) = events
    assert event["on_conflict"] == "wait"
    assert "task other" in event["holder"]
    assert mailbox.take() == []


@pytest.mark.parametrize(
    "options", [{"on_conflict": "wait", "blocking_timeout": 0.2}, {"on_conflict": "raise"}]
)
def test_a_conflict_ends_in_already_running(options: dict[str, Any], mailbox: Mailbox) -> None:
    """The run fails, naming lock and holder, and for how long it waited in vain."""
    importing = Importing(mailbox, **options)
    state, error = importing.deliver_beside_another()
    assert state == "FAILURE"
    assert isinstance(error, AlreadyRunning)
    assert (error.name, error.task_id) == (LOCK, "other")
    assert ("0.2 s" in str(error)) is ("blocking_timeout" in options)
    assert importing.runs == []


@pytest.mark.parametrize(
    ("base", "autoretry"), [(Task, {"autoretry_for": (Exception,)}), (SafeTask, {})]
)
def test_reject_is_celerys_reject(base: Any, autoretry: dict[str, Any], mailbox: Mailbox) -> None:
    """The duplicate is rejected for good, naming lock and holder, and never retried."""
    importing = Importing(mailbox, base, on_conflict="reject", **autoretry)
    state, error = importing.deliver_beside_another()
    assert state == "REJECTED"
    assert isinstance(error, Reject)
    assert error.requeue is False
    assert f"'{LOCK}' is held by task other" in str(error.reason)
    assert mailbox.take() == []


@pytest.mark.parametrize(
    ("base", "autoretry"), [(Task, {"autoretry_for": (Exception,)}), (SafeTask, {})]
)
def test_retry_comes_back_as_the_same_message(
    base: Any, autoretry: dict[str, Any], mailbox: Mailbox
) -> None:
    """It is sent again after the delay: same id, arguments, chain and limits, retries untouched."""
    importing = Importing(
        mailbox, base, on_conflict="retry", retry_delay=60, max_retries=0, **autoretry
    )
    first = importing.message(
        time_limit=50,
        soft_time_limit=40,
        expires=3600,
        headers={"x-user": "me"},
        retries=3,
        link=importing.task.si(8),
    )
    began = timezone.now()
    with held_by(LOCK, "other"):
        state, error = mailbox.deliver(first)
    assert state == "RETRY"
    assert isinstance(error, Retry)
    assert importing.runs == []
    again = mailbox.take_one()
    assert began + timedelta(seconds=45) <= again.eta
    assert again.delay <= 75
    # Celery names the running task as the parent of all that it sends, retries too.
    unlike = {"eta", "origin", "parent_id"}
    assert again.headers | dict.fromkeys(unlike) == first.headers | dict.fromkeys(unlike)
    assert first.embed["callbacks"][0]["args"] == [8]
    assert (again.args, again.kwargs, again.embed) == (first.args, first.kwargs, first.embed)
    assert mailbox.deliver(again) == ("SUCCESS", "imported")
    assert importing.runs == [first.id]


def test_retries_that_come_back_are_spread(mailbox: Mailbox) -> None:
    """Many don't come back at the same moment, nor when the broker has redelivered them."""
    importing = Importing(mailbox, on_conflict="retry", retry_delay=60)
    delays = set()
    for _ in range(8):
        importing.deliver_beside_another()
        delays.add(round(mailbox.take_one().delay))
    mailbox.app.conf.broker_transport_options = {"visibility_timeout": 8}
    importing.deliver_beside_another()
    assert mailbox.take_one().delay <= 4
    assert len(delays) > 2


def test_a_lock_shows_what_celery_shows_of_the_call(mailbox: Mailbox, settings: Settings) -> None:
    """Redacted arguments stay so, after a conflict, too; with SHOW_ARGUMENTS off none is shown."""

    def look(number: int) -> list[Any]:
        return [lock.holder.arguments for lock in iter_locks()]

    decorate = single_instance(key="{number}", unique_until="end", on_conflict="retry")
    task = mailbox.task(decorate(look), base=SafeTask, name=NAME)
    assert mailbox.deliver(mailbox.send(task, 7)).value == ["(7,)", "(7,)"]
    task.apply_async((7,), argsrepr="('***',)", kwargsrepr="{}")
    with held_by(LOCK, "other"):
        mailbox.deliver(mailbox.take_one())
    assert mailbox.deliver(mailbox.take_one()).value == ["('***',)", "('***',)"]
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "SHOW_ARGUMENTS": False}
    assert mailbox.deliver(mailbox.send(task, 7)).value == [None, None]


# The lock of its own task id.


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (Task, {"on_conflict": "skip"}),
        (SafeTask, {"on_conflict": "reject"}),
        (SafeTask, {"on_conflict": "wait", "blocking_timeout": 60}),
    ],
)
def test_a_message_that_meets_its_own_lock_comes_back(
    base: Any, options: dict[str, Any], mailbox: Mailbox
) -> None:
    """One copy, or a copy of it, with the same id, retries and chain comes after the lease."""
    importing = Importing(mailbox, base, autoretry_for=(Exception,), **options)
    headers = {"x-user": "me", "x-death": [{"count": 1}]}
    first = importing.message(retries=2, headers=headers, link=importing.task.si(8))
    with held_by(LOCK, first.id, seconds=90):
        assert mailbox.deliver(first).state == "IGNORED"
        assert mailbox.deliver(mailbox.take_one()).state == "IGNORED"
    copy = mailbox.take_one()
    assert copy.id == first.id
    assert copy.headers["retries"] == 2
    assert copy.headers["x-user"] == "me"
    assert copy.embed == first.embed
    # With it RabbitMQ would see a cycle and drop the message.
    assert "x-death" not in copy.headers
    assert 60 < copy.delay <= 90
    assert importing.runs == []
    assert mailbox.deliver(copy) == ("SUCCESS", "imported")
    assert importing.runs == [first.id]


def run_and_deliver_again(mailbox: Mailbox) -> tuple[Message, list[str]]:
    """
    Deliver a message again while it runs; return its copy, and the runs so far and later.

    The copy is sent after ``OWN_RUN_WAIT``, later than half of the visibility timeout.
    """
    mailbox.app.conf.broker_transport_options = {"visibility_timeout": 0.01}
    runs: list[str] = []

    def running(task: Any, number: int) -> None:
        runs.append(task.request.id)
        if len(runs) == 1:
            assert mailbox.deliver_elsewhere(message).state == "IGNORED"

    decorate = single_instance(key="{number}")
    task = mailbox.task(decorate(running), name=NAME, base=SafeTask, bind=True, acks_late=True)
    message = mailbox.send(task, 7)
    assert mailbox.deliver(message).state == "SUCCESS"
    return mailbox.take_one(), runs


def test_what_comes_after_a_long_run_is_dropped(store: None, mailbox: Mailbox) -> None:
    """Neither a copy nor a late redelivery of its message follows a long run, on any store."""
    copy, runs = run_and_deliver_again(mailbox)
    late = replace(copy, delivery_info={**copy.delivery_info, "redelivered": True})
    for message in (copy, late.with_headers(**{HEADER: {"task": NAME}})):
        assert mailbox.deliver(message).state == "IGNORED"
    assert (runs, mailbox.take()) == ([copy.id], [])
    assert find_lock(LOCK) is None
    # A retry, or what a run puts in its own place, is another message with the same id.
    for other in ({"retries": 1}, {"replaced_task_nesting": 1}):
        assert mailbox.deliver(copy.with_headers(**other)).state == "SUCCESS"


@pytest.mark.parametrize("error", [Reject("later", requeue=True), LockLost("x")], ids=repr)
def test_a_long_run_that_gave_up_is_followed_by_another(error: Exception, mailbox: Mailbox) -> None:
    """A run that puts its message back, or lost its lock, leaves the work to the next delivery."""
    mailbox.app.conf.broker_transport_options = {"visibility_timeout": 0}
    body = Mock(side_effect=[error, None])

    @single_instance(key="{number}")
    def work(number: int) -> None:
        body()

    message = mailbox.send(mailbox.task(work, name=NAME, base=SafeTask, acks_late=True), 7)
    assert mailbox.deliver(message).state in {"REJECTED", "FAILURE"}
    late = replace(message, delivery_info={**message.delivery_info, "redelivered": True})
    assert (mailbox.deliver(late).state, body.call_count) == ("SUCCESS", 2)


def test_the_end_of_a_long_run_can_not_be_marked(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails then does not turn the work that is done into a failure."""
    take = LocalStore.take

    def refuse(store: LocalStore, request: LockRequest) -> Any:
        if ":ended:" in request.name:
            raise LockBackendError("nowhere", "acquire", "it is gone")
        return take(store, request)

    monkeypatch.setattr(LocalStore, "take", refuse)
    copy, runs = run_and_deliver_again(mailbox)
    assert mailbox.deliver(copy).state == "SUCCESS"
    assert runs == [copy.id, copy.id]


@pytest.mark.parametrize(
    ("lease", "visibility", "longest"), [(30, 8, 4), (4, 30, 4), (30, None, 30)]
)
def test_a_copy_comes_when_the_lease_is_over_or_earlier(
    lease: float, visibility: float | None, longest: float, mailbox: Mailbox
) -> None:
    """Its delay is what is left of the lease, at most half the broker's visibility timeout."""
    if visibility is not None:
        mailbox.app.conf.broker_transport_options = {"visibility_timeout": visibility}
    importing = Importing(mailbox)
    message, began = importing.message(), timezone.now()
    with held_by(LOCK, message.id, seconds=lease):
        mailbox.deliver(message)
    copy = mailbox.take_one()
    assert began + timedelta(seconds=longest - 1) <= copy.eta
    assert copy.delay <= longest


def test_a_lock_that_is_free_in_a_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox
) -> None:
    """A retry without delay, which overtakes the end of its own run, runs at once."""
    monkeypatch.setattr(copies, "OWN_RUN_WAIT", 10.0)
    importing = Importing(mailbox)
    message = importing.message()
    with held_by(LOCK, message.id) as lock:
        ending = threading.Timer(0.1, release_lock, [lock])
        ending.start()
        assert mailbox.deliver(message) == ("SUCCESS", "imported")
        ending.join()
    assert mailbox.take() == []


# Something does not answer.


@pytest.mark.parametrize(
    ("holder", "options", "expected"),
    [
        ("own", {"on_conflict": "skip"}, "REJECTED"),
        ("other", {"on_conflict": "retry", "autoretry_for": (Exception,)}, "REJECTED"),
        ("own", {"acks_late": False}, "FAILURE"),
    ],
)
def test_a_message_that_can_not_be_sent_again_stays_with_the_broker(
    holder: str, options: dict[str, Any], expected: str, mailbox: Mailbox
) -> None:
    """With acks_late the broker gets it back, and nothing is noted; else it fails, to be seen."""
    message = Importing(mailbox).message()
    with closing(Mailbox(broker_url=f"redis://127.0.0.1:{dead_port()}")) as dead:
        importing = Importing(dead, **options)
        with held_by(LOCK, message.id if holder == "own" else holder):
            state, error = dead.deliver(message)
    assert state == expected
    if state == "REJECTED":
        assert isinstance(error, Reject)
        assert error.requeue is True
        error = error.reason
    assert isinstance(error, OperationalError)
    assert importing.runs == []


def test_a_cache_that_does_not_answer_keeps_the_task_from_running(
    mailbox: Mailbox, settings: Settings
) -> None:
    """Whether the lock is free is not known then: LockBackendError, and the body does not run."""
    settings.CACHES = cache_at(f"redis://127.0.0.1:{dead_port()}", "django")
    settings.DJANGO_CELERY_SAFE = {}
    importing = Importing(mailbox)
    state, error = mailbox.deliver(importing.message())
    assert state == "FAILURE"
    assert isinstance(error, LockBackendError)
    assert importing.runs == []
