"""The lock of a message, when its send or the end of its run goes another way than usual."""

import asyncio
import gc
import logging
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery.app.task import Context
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.signals import before_task_publish, task_received, task_revoked
from django.db import transaction
from kombu import Connection
from pytest_django import Settings

from django_celery_safe import (
    HeldLock,
    LockBackendError,
    SafeTask,
    conf,
    find_lock,
    iter_locks,
    release_lock,
    single_instance,
)
from django_celery_safe.concurrency.sent import SentLock
from django_celery_safe.delivery import copies
from django_celery_safe.leases.holder import HOST
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks import CacheLock
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.local import LocalStore
from tests.background import settle
from tests.clock import HeldClock
from tests.concurrency.mailbox import Mailbox, Message, end_child
from tests.concurrency.test_options import held_names
from tests.interruption import Interruption
from tests.listening import receiving
from tests.locks.renewals import get_lock, get_remaining, held_by
from tests.locks.test_interrupted import InterruptedStore, store
from tests.processes import FunctionFailed, dead_port, start_in_process, tell, wait_for
from tests.statements import raising
from tests.versions import IS_CELERY_57

__all__ = ["store"]

#: Locks live in memory, unless a test says otherwise.
pytestmark = pytest.mark.usefixtures("locks_in_memory")

NAME = "tests.once"
#: The lock of a message for the number 7.
SENT = f"sent:{NAME}:7"
#: Larger than any process id (Linux: PID_MAX_LIMIT).
NO_PROCESS = 2**22 + 1
#: A lease of runs, s.
LEASE = 30
#: The lease of a message that waits, s.
WAITING = conf.DEFAULTS["SENT_TIMEOUT"]


def unique(
    mailbox: Mailbox, function: Callable[..., Any], lock: dict[str, Any], **options: Any
) -> Any:
    """Return a bound task of this function, which is sent once for each number."""
    decorate = single_instance(key="{number}", **{"unique_until": "end", **lock})
    return mailbox.task(decorate(function), base=SafeTask, bind=True, name=NAME, **options)


def work(self: Any, number: int, how: str = "") -> str:
    """Return, or end as told."""
    match how:
        case "reject":
            raise Reject(how, requeue=False)
        case "requeue":
            raise Reject(how, requeue=True)
        case "retry by hand":
            raise Retry(how, when=5)
    return "done"


def nobody_listens() -> Connection:
    """Return a connection to a broker that is not there."""
    once = {"max_retries": 1, "interval_start": 0}
    return Connection(f"redis://127.0.0.1:{dead_port()}", transport_options=once)


# A soft time limit at the end of a run.


#: The last functions of a run: they release its lock, and then the message's.
ENDS = {CacheLock.__exit__.__code__, SentLock.end_run.__code__}


@pytest.mark.parametrize("conflict", [False, True])
def test_a_soft_time_limit_at_the_end_of_a_run_leaves_no_lock(
    conflict: bool, mailbox: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    """
    At whichever call it hits, the message's lock is free at once.

    The run's is free within one lease, since nobody renews it any more.
    """
    # Records would keep the tracebacks, and these the locks. So would pytest those of errors in
    # __del__() of what earlier tests have left, if it was collected inside a run.
    caplog.set_level(logging.CRITICAL + 1, "celery.app.trace")
    gc.collect()
    lock = {"timeout": 1, "on_conflict": "raise" if conflict else "skip"}
    task = unique(mailbox, work, lock)
    places = []
    for number in range(1, 1000):
        message = mailbox.send(task, number)
        interruption = Interruption(number, ENDS)
        with ExitStack() as stack:
            if conflict:
                stack.enter_context(held_by(f"{NAME}:{number}", "other"))
            stack.enter_context(suppress(SoftTimeLimitExceeded))
            stack.enter_context(interruption.watching())
            mailbox.deliver(message)
        assert find_lock(f"sent:{NAME}:{number}") is None, interruption.place
        if not interruption.place:
            break
        places.append(interruption.place)
    # Decided and done there, not only begun.
    done = {"SentLock.after"} if conflict else {"SentLock.after", "LocalStore.release"}
    assert {place.split(":")[0] for place in places} >= done

    def are_all_free() -> bool:
        # Again and again: the thread that renews may look at a lock at that very moment.
        gc.collect()
        return held_names() == []

    wait_for(are_all_free, 30, "a lock is left")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_release_frees_both(
    when: str, mailbox: Mailbox, store: type[InterruptedStore]
) -> None:
    """The next send is not a duplicate and runs, with or without the request in the store."""
    task = unique(mailbox, work, {})
    message = mailbox.send(task, 7)
    faults = getattr(store, when)
    faults["release"] = SoftTimeLimitExceeded()
    state, error = mailbox.deliver(message)
    assert (state, type(error)) == ("FAILURE", SoftTimeLimitExceeded)
    assert faults == {}
    assert held_names() == []
    assert task.delay(7).is_duplicate is False
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", "done")


def test_a_send_whose_answer_was_lost_keeps_no_later_send_out(
    mailbox: Mailbox, store: type[InterruptedStore]
) -> None:
    """The store has taken the lock for a message that no one will get, and it is given back."""
    task = unique(mailbox, work, {})
    store.after["acquire"] = LockBackendError("the store", "acquire", "the answer got lost")
    with pytest.raises(LockBackendError, match="the answer got lost"):
        task.delay(7)
    assert task.delay(7).is_duplicate is False


def test_a_lost_answer_at_the_start_of_a_run_ends_no_lock(
    mailbox: Mailbox, store: type[InterruptedStore]
) -> None:
    """The store has shortened the message's lease, so the lease has to be renewed."""

    def stay(self: Any, number: int) -> None:
        assert get_remaining(SENT) <= LEASE
        leases = [lease for lane in renewer.lanes.values() for lease in lane.leases]
        assert [lease.along.name for lease in leases if lease.along] == [SENT]

    task = unique(mailbox, stay, {"timeout": LEASE})
    task.delay(7)
    store.after["extend"] = LockBackendError("the store", "extend", "the answer got lost")
    assert mailbox.deliver(mailbox.take_one()).state == "SUCCESS"
    assert store.after == {}
    assert held_names() == []


@pytest.mark.parametrize("store_name", ["django-redis", "cluster", "database"])
def test_a_long_run_renews_both_locks(
    store_name: str, mailbox: Mailbox, use_store: Callable[[str], None], clock: HeldClock
) -> None:
    """The lock of the send lasts as long as the run, in one request with the run's, or alone."""
    use_store(store_name)

    def go_on(self: Any, number: int) -> list[float | None]:
        soon = [(lock.name, lock.token, 5.0) for lock in iter_locks()]
        assert get_store().extend(soon) == [True, True]
        clock.advance(LEASE / 2)
        return [lock.remaining for lock in iter_locks()]

    state, left = mailbox.deliver(mailbox.send(unique(mailbox, go_on, {"timeout": LEASE}), 7))
    assert (state, len(left)) == ("SUCCESS", 2)
    assert min(left) > LEASE / 2


@pytest.mark.parametrize("forged", [None, "text", {"header": {}}])
def test_what_is_known_of_a_message_is_no_header_and_no_part_of_a_copy(
    forged: object, mailbox: Mailbox
) -> None:
    """A header of its name is not believed, and the request of a run can be pickled and copied."""

    def copy(self: Any, number: int) -> list[str]:
        copies = pickle.loads(pickle.dumps(self.request)), deepcopy(self.request)
        assert all(one.id == self.request.id for one in copies)
        return held_names()

    unique(mailbox, copy, {}).apply_async((7,), headers={"safe_kept": forged} if forged else {})
    state, held = mailbox.deliver(mailbox.take_one())
    assert (state, sorted(held)) == ("SUCCESS", [SENT, f"{NAME}:7"])
    assert held_names() == []


@pytest.mark.parametrize("store_name", ["local", "django-redis", "cluster"])
def test_a_limit_while_the_end_is_marked_keeps_the_lock_of_the_retry(
    store_name: str,
    mailbox: Mailbox,
    use_store: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit ends the run, and Celery retries the task, so the message keeps its lock."""
    use_store(store_name)
    retried = {"acks_late": True, "autoretry_for": (SoftTimeLimitExceeded,)}
    task = unique(mailbox, work, {}, **retried)
    monkeypatch.setattr(copies, "mark_end", raising(SoftTimeLimitExceeded()))
    message = mailbox.send(task, 7)
    assert mailbox.deliver(message).state == "RETRY"
    retry = mailbox.take_one()
    assert retry.id == message.id
    assert get_lock(SENT).token == retry.ours["sent"]


# A death between the end of one lock and the other.


def run_and_die(where: str) -> None:
    """Run a task that was sent once, and be killed at this point; in a process of its own."""
    owner, _, name = where.partition(".")
    of: Any = {"SentLock": SentLock, "CacheLock": CacheLock}[owner]

    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    box = Mailbox()
    box.app.set_current()
    message = box.send(unique(box, work, {"timeout": LEASE}, acks_late=True), 7)
    tell(message)
    setattr(of, name, die)
    box.deliver(message)


@pytest.mark.parametrize(
    ("where", "store_name"),
    [
        ("CacheLock.acquire", "django-redis"),
        pytest.param("SentLock._begin_run", "database", marks=pytest.mark.sql),
        pytest.param("CacheLock.__exit__", "database", marks=pytest.mark.sql),
        pytest.param("SentLock.move", "database", marks=pytest.mark.sql),
    ],
)
def test_a_death_between_the_two_locks_leaves_nothing_for_long(
    where: str, store_name: str, mailbox: Mailbox, use_store: Callable[[str], None]
) -> None:
    """Its message, delivered again, runs; after the run had begun the same can be sent anyway."""
    use_store(store_name)
    with start_in_process(run_and_die, where) as process:
        message = process.receive()
        with pytest.raises(FunctionFailed):
            process.result()
    sent = get_lock(SENT)
    if where in ("CacheLock.__exit__", "SentLock.move") and sent.remaining is not None:
        assert sent.remaining <= LEASE
    task = unique(mailbox, work, {"timeout": LEASE}, acks_late=True)
    if (left := find_lock(f"{NAME}:7")) is not None:
        assert get_remaining(left.name) <= LEASE
        release_lock(left)  # as the end of its lease does
    assert mailbox.deliver(message) == ("SUCCESS", "done")
    assert held_names() == []
    assert task.delay(7).is_duplicate is False


@pytest.mark.parametrize(("pid", "left"), [(NO_PROCESS, []), (4711, [f"{NAME}:7"])])
def test_of_two_deliveries_the_death_of_one_frees_nothing_of_the_other(
    pid: int, left: list[str], mailbox: Mailbox
) -> None:
    """The run's lock is freed only if the dead process held it; the message's lock is kept."""
    message = mailbox.send(unique(mailbox, work, {}), 7)
    killed, other = mailbox.receive(message), mailbox.receive(message)
    for request in (killed, other):
        task_received.send(request=request, sender=None)
    killed.worker_pid = NO_PROCESS
    with held_by(f"{NAME}:7", message.id, host=HOST, pid=pid):
        end_child(killed, WorkerLostError("signal 9"))
        settle()
        assert sorted(held_names()) == [SENT, *left]


# Rejected, and retried by hand.


@pytest.mark.parametrize(
    ("how", "acks_late"), [("reject", True), ("requeue", True), ("requeue", False)]
)
def test_a_rejected_run_keeps_its_lock_only_if_it_comes_again(
    how: str, acks_late: bool, mailbox: Mailbox
) -> None:
    """A message that was acknowledged early is never requeued, whatever the Reject says."""
    task = unique(mailbox, work, {}, acks_late=acks_late)
    first = task.delay(7, how)
    assert mailbox.deliver(mailbox.take_one()).state == "REJECTED"
    kept = how == "requeue" and acks_late
    assert held_names() == ([SENT] if kept else [])
    second = task.delay(7)
    assert second.is_duplicate is kept
    assert (second.id == first.id) is kept
    if kept:
        assert WAITING - 10 < get_remaining(SENT) <= WAITING


@pytest.mark.parametrize("autoretry", [(), (Exception,)])
def test_a_retry_raised_by_hand_frees_the_lock(
    autoretry: tuple[type[Exception], ...], mailbox: Mailbox
) -> None:
    """The run frees the lock, because no message was sent that would free it later."""
    options = {"autoretry_for": autoretry} if autoretry else {}
    task = unique(mailbox, work, {}, **options)
    assert mailbox.deliver(mailbox.send(task, 7, "retry by hand")).state == "RETRY"
    assert mailbox.take() == []
    assert held_names() == []
    assert task.delay(7).is_duplicate is False


@pytest.mark.parametrize("why", ["retry", "autoretry", "conflict"])
def test_a_lock_goes_with_a_message_before_its_next_run_can_begin(
    why: str, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run frees its own lock last, so it undoes nothing that the next run does with this one."""

    def fail(self: Any, number: int) -> None:
        raise self.retry(countdown=0) if why == "retry" else KeyError

    left = []
    release = LocalStore.release

    def look(**kwargs: Any) -> None:
        left.append(get_remaining(SENT))

    def release_and_look(store: LocalStore, name: str, *args: Any) -> bool:
        released = release(store, name, *args)
        if name == f"{NAME}:7":
            look()
        return released

    lock = {"timeout": 5, "on_conflict": "retry", "retry_delay": 0.01}
    autoretry = {"autoretry_for": (KeyError,), "default_retry_delay": 0}
    task = unique(mailbox, fail, lock, **(autoretry if why == "autoretry" else {}))
    message = mailbox.send(task, 7)
    if why != "retry" and not IS_CELERY_57:
        pytest.skip("Celery before 5.7 may overlook a receiver that connects later")
    with ExitStack() as stack:
        if why == "retry":
            monkeypatch.setattr(LocalStore, "release", release_and_look)
        else:  # a run that is over has no lock any more when its message is published
            stack.enter_context(receiving(before_task_publish, look))
        if why == "conflict":
            stack.enter_context(held_by(f"{NAME}:7", "other"))
        state = mailbox.deliver(message).state
    assert state == "RETRY"
    assert left == [pytest.approx(WAITING, abs=1)]
    again = mailbox.take_one()
    assert again.id == message.id
    assert get_lock(SENT).token == message.ours["sent"]


def test_a_forked_child_that_leaves_the_run_frees_no_lock_of_its_parent(
    mailbox: Mailbox, use_store: Callable[[str], None]
) -> None:
    """A bare os.fork() in a task: the child unwinds the whole run, and then the parent goes on."""
    use_store("django-redis")
    held, parent = [], os.getpid()

    def fork(self: Any, number: int) -> None:
        if (child := os.fork()) == 0:
            raise KeyError(number)
        assert os.waitpid(child, 0)[1] == 0
        held.extend(held_names())

    message = mailbox.send(unique(mailbox, fork, {"timeout": 30}), 7)
    try:
        state = mailbox.deliver(message).state
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert state == "SUCCESS"
    assert sorted(held) == [SENT, f"{NAME}:7"]
    assert held_names() == []


def retry_in_a_transaction(task: Any, alias: str) -> None:
    """Ask for another run; the transaction is rolled back."""
    with transaction.atomic(using=alias):
        raise task.retry(countdown=50)


def retry_in_an_event_loop(task: Any, alias: str) -> None:
    """Ask for another run where no database can be asked."""

    async def retry() -> None:
        raise task.retry(countdown=50)

    asyncio.run(retry())


@pytest.mark.parametrize(
    "retry", [pytest.param(retry_in_a_transaction, marks=pytest.mark.sql), retry_in_an_event_loop]
)
def test_a_retry_takes_its_lock_along(
    retry: Callable[[Any, str], None], mailbox: Mailbox, db_alias: str, settings: Settings
) -> None:
    """Also where the lock is in the database of a transaction, or can't be asked for just then."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}  # type: ignore[arg-type]

    def fail(self: Any, number: int) -> None:
        retry(self, db_alias)

    task = unique(mailbox, fail, {"timeout": 5})
    assert mailbox.deliver(mailbox.send(task, 7)).state == "RETRY"
    assert get_remaining(SENT) == pytest.approx(WAITING + 50, abs=5)
    assert task.delay(7).is_duplicate is True


def test_a_run_that_goes_on_without_its_retry_keeps_its_lock(mailbox: Mailbox) -> None:
    """The retry could not be sent: until the run ends the lease is that of a run, and renewed."""
    left = []

    def go_on(self: Any, number: int) -> None:
        with nobody_listens() as nowhere, suppress(Reject):
            self.retry(countdown=50, connection=nowhere)
        left.append(get_remaining(SENT))

    task = unique(mailbox, go_on, {"timeout": 5})
    assert mailbox.deliver(mailbox.send(task, 7)).state == "SUCCESS"
    assert left == [pytest.approx(5, abs=2)]
    assert held_names() == []


@pytest.mark.parametrize("by", ["retry", "autoretry"])
def test_a_retry_that_can_not_be_sent_frees_the_lock(by: str, mailbox: Mailbox) -> None:
    """Celery rejects the message then, and no other will come."""
    nowhere = nobody_listens()

    def fail(self: Any, number: int) -> None:
        raise self.retry(countdown=0, connection=nowhere) if by == "retry" else KeyError

    options: Any = {"autoretry_for": (KeyError,)} if by == "autoretry" else {}
    task = unique(mailbox, fail, {}, retry_kwargs={"connection": nowhere}, **options)
    task.delay(7)
    with nowhere:
        assert mailbox.deliver(mailbox.take_one()).state == "REJECTED"
    assert held_names() == []


# Owners of the lock.


@pytest.mark.parametrize(
    ("expires", "name"), [(-1, "local"), (0.0005, "django-redis"), (0.0005, "memcached")]
)
def test_a_message_that_expires_at_once_is_published(
    expires: float, name: str, mailbox: Mailbox, use_store: Callable[[str], None]
) -> None:
    """With no time for a lock it is sent as it is, and Celery says what became of it."""
    use_store(name)
    task = unique(mailbox, work, {})
    result = task.apply_async((7,), expires=expires)
    assert result.is_duplicate is False
    assert mailbox.take_one().id == result.id


def test_a_lock_that_nobody_holds_any_more_drops_no_message(
    mailbox: Mailbox, store: type[InterruptedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In such a race with a database the message goes out, is not a duplicate, and runs."""
    task = unique(mailbox, work, {})
    with monkeypatch.context() as patch:
        # It is held, and no longer said by whom: it was freed in between.
        patch.setattr(store, "take", lambda own, request: HeldLock(request.name))
        result = task.apply_async((7,), link=task.si(8))
        assert result.is_duplicate is False
        message = mailbox.take_one()
    assert message.id == result.id
    assert "duplicate" not in message.ours
    assert mailbox.deliver(message) == ("SUCCESS", "done")


def revoke(task: Any, message: Message) -> None:
    """Discard a message that was revoked before its run, as a worker's main process does."""
    request = Context({**message.headers, "headers": message.headers})
    task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=False)


def test_a_second_delivery_that_is_revoked_leaves_the_lock_of_a_live_run(mailbox: Mailbox) -> None:
    """The same stays a duplicate while the first delivery runs."""
    task = unique(mailbox, work, {})
    first = task.delay(7)
    with held_by(f"{NAME}:7", first.id):
        revoke(task, mailbox.take_one())
        settle()
        assert task.delay(7).id == first.id


def test_a_revoked_message_frees_a_lock_that_the_worker_knows_nothing_of(mailbox: Mailbox) -> None:
    """In a worker of an older release, which has the task without its decorator, too."""
    message = mailbox.send(unique(mailbox, work, {}), 7)
    assert held_names() == [SENT]
    plain = mailbox.app.task(name="tests.plain", base=SafeTask)(work)
    revoke(plain, message)
    wait_for(lambda: held_names() == [], 20)
