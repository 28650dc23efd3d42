"""The lock of a message, when its send or the end of its run goes another way than usual."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from celery.app.task import Context
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.signals import before_task_publish, task_revoked
from kombu import Connection
from kombu.exceptions import OperationalError

import django_celery_safe
from django_celery_safe import HeldLock, SafeTask, find_lock, single_instance
from django_celery_safe.concurrency.run_lock import RunLock
from django_celery_safe.locks.stores.base import Holder, Store
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox
from tests.concurrency.test_options import held_names
from tests.contract.conftest import SHARED_STORES
from tests.locks.test_interrupted import InterruptedStore, store
from tests.processes import free_port, wait_for

__all__ = ["store"]

NAME = "tests.once"
PACKAGE = str(Path(django_celery_safe.__file__).parent)


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
    return Connection(f"redis://127.0.0.1:{free_port()}", transport_options=once)


# A soft time limit at the end of a run.


class Interruption:
    """Raises at the n-th call that the package makes or returns from, inside given functions."""

    def __init__(self, number: int, inside: set[CodeType]) -> None:
        self.number, self.inside = number, inside
        #: Where it was; "": there are fewer calls.
        self.place = ""
        self._depth = self._calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt this block, where Python looks for signals: not between any two lines."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code in self.inside:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        if not self._depth or event not in ("call", "c_return"):
            return
        if code.co_filename.startswith(PACKAGE):
            self._calls += 1
            if self._calls == self.number:
                self.place = f"{code.co_qualname}:{frame.f_lineno}"
                raise SoftTimeLimitExceeded


ENDS = {RunLock.__exit__.__code__, RunLock._step_aside.__code__}


@pytest.mark.parametrize("renew", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("until", [pytest.param("start", marks=pytest.mark.long), "end"])
@pytest.mark.parametrize("conflict", [False, True])
def test_a_soft_time_limit_at_the_end_of_a_run_leaves_no_lock(
    conflict: bool,
    until: str,
    renew: bool,
    mailbox: Mailbox,
    locks_in_memory: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """
    At whichever call it hits, the message's lock is free at once.

    The run's is free within one lease, since nobody renews it any more.
    """
    # Records would keep the tracebacks, and these the locks.
    caplog.set_level(logging.CRITICAL + 1, "celery.app.trace")
    lock = {"unique_until": until, "renew": renew, "timeout": 1}
    if conflict:
        lock["on_conflict"] = "raise"
    task = unique(mailbox, work, lock)
    places = []
    for number in range(1, 1000):
        task.delay(number)
        message = mailbox.take_one()
        interruption = Interruption(number, ENDS)
        with suppress(SoftTimeLimitExceeded):
            if conflict:
                with held_by(f"{NAME}:{number}", "other"), interruption.watching():
                    mailbox.deliver(message)
            else:
                with interruption.watching():
                    mailbox.deliver(message)
        assert find_lock(f"sent:{NAME}:{number}") is None, interruption.place
        if not interruption.place:
            break
        places.append(interruption.place)
    # Decided and done there, not only begun.
    assert {place.split(":")[0] for place in places} >= (
        {"SentLock.after"} if conflict else {"RunLock.__exit__", "LocalStore.release"}
    )

    def are_all_free() -> bool:
        # Again and again: the thread that renews may look at a lock at that very moment.
        gc.collect()
        return held_names() == []

    wait_for(are_all_free, 30, "a lock is left")


def release_along(self: InterruptedStore, *args: Any, **options: Any) -> Any:
    """Release both, or be interrupted."""
    return self._interrupted("release_along", lambda: Store.release_along(self, *args, **options))


@pytest.mark.parametrize("request_name", ["release_along", "release"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("renew", [True, False])
def test_an_interrupted_release_frees_both(
    renew: bool,
    when: str,
    request_name: str,
    mailbox: Mailbox,
    store: type[InterruptedStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not the store got the request, the next send is no duplicate, and it runs."""
    monkeypatch.setattr(store, "release_along", release_along)
    task = unique(mailbox, work, {"renew": renew})
    task.delay(7)
    message = mailbox.take_one()
    faults = getattr(store, when)
    faults[request_name] = SoftTimeLimitExceeded()
    state, error = mailbox.deliver(message)
    assert (state, type(error)) == ("FAILURE", SoftTimeLimitExceeded)
    assert faults == {}
    assert held_names() == []
    assert task.delay(7).is_duplicate is False
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", "done")


# Rejected, and retried by hand.


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize("how", ["reject", "requeue"])
def test_a_rejected_run_keeps_its_lock_only_if_it_comes_again(
    how: str, acks_late: bool, mailbox: Mailbox, locks_in_memory: None
) -> None:
    """What was acknowledged early is never requeued, whatever the Reject says."""
    task = unique(mailbox, work, {"sent_timeout": 100}, acks_late=acks_late)
    first = task.delay(7, how)
    assert mailbox.deliver(mailbox.take_one()).state == "REJECTED"
    kept = how == "requeue" and acks_late
    assert held_names() == ([f"sent:{NAME}:7"] if kept else [])
    second = task.delay(7)
    assert second.is_duplicate is kept
    assert (second.id == first.id) is kept
    if kept:
        lock = find_lock(f"sent:{NAME}:7")
        assert lock is not None
        assert lock.remaining is not None
        assert 90 < lock.remaining <= 100


@pytest.mark.parametrize("renew", [True, False])
@pytest.mark.parametrize("autoretry", [(), (KeyError,), (Exception,)])
def test_a_retry_raised_by_hand_frees_the_lock(
    autoretry: tuple[type[Exception], ...], renew: bool, mailbox: Mailbox, locks_in_memory: None
) -> None:
    """Nothing was sent, and Celery's autoretry passes it on: nobody else would free it."""
    options = {"autoretry_for": autoretry} if autoretry else {}
    task = unique(mailbox, work, {"renew": renew}, **options)
    task.delay(7, "retry by hand")
    assert mailbox.deliver(mailbox.take_one()).state == "RETRY"
    assert mailbox.take() == []
    assert held_names() == []
    assert task.delay(7).is_duplicate is False


def test_a_lock_goes_with_an_autoretry_before_it_is_published(
    mailbox: Mailbox, locks_in_memory: None
) -> None:
    """The next run may begin right after: what it does with the lock must not be undone."""

    def fail(self: Any, number: int) -> None:
        raise KeyError

    left = []

    def look(sender: Any, **kwargs: Any) -> None:
        lock = find_lock(f"sent:{NAME}:7")
        left.append(None if lock is None else lock.remaining)

    lock = {"timeout": 5, "sent_timeout": 100}
    task = unique(mailbox, fail, lock, autoretry_for=(KeyError,), default_retry_delay=0)
    task.delay(7)
    message = mailbox.take_one()
    before_task_publish.connect(look, sender=NAME)
    try:
        assert mailbox.deliver(message).state == "RETRY"
    finally:
        before_task_publish.disconnect(look, sender=NAME)
    assert left == [pytest.approx(100, abs=1)]
    assert mailbox.take_one().id == message.id


@pytest.mark.parametrize("autoretry", [(), (KeyError,)])
def test_a_retry_that_can_not_be_sent_frees_the_lock(
    autoretry: tuple[type[Exception], ...], mailbox: Mailbox, locks_in_memory: None
) -> None:
    """Celery rejects the message then, and no other will come."""

    nowhere = nobody_listens()

    def fail(self: Any, number: int) -> None:
        if not autoretry:
            raise self.retry(countdown=0, connection=nowhere)
        raise KeyError

    options: dict[str, Any] = {"autoretry_for": autoretry} if autoretry else {}
    task = unique(mailbox, fail, {}, retry_kwargs={"connection": nowhere}, **options)
    task.delay(7)
    with nowhere:
        assert mailbox.deliver(mailbox.take_one()).state == "REJECTED"
    assert held_names() == []
    assert task.delay(7).is_duplicate is False


# Whose lock it is.


@pytest.mark.parametrize("name", [*SHARED_STORES, "local"])
@pytest.mark.parametrize("expires", [-1, 0.0005])
def test_a_message_that_expires_at_once_is_published(
    expires: float, name: str, mailbox: Mailbox, use_store: Callable[[str], None]
) -> None:
    """With no time for a lock it is no duplicate of nobody, and Celery says what became of it."""
    use_store(name)
    task = unique(mailbox, work, {})
    result = task.apply_async((7,), expires=expires)
    assert result.is_duplicate is False
    assert mailbox.take_one().id == result.id


def hold_by_nobody(self: Any, name: str, *args: Any, **options: Any) -> HeldLock:
    """Say that a lock is held, and no longer by whom: it was freed in between."""
    return HeldLock(name, token="", holder=Holder())


@pytest.mark.parametrize("link", [False, True])
def test_a_lock_that_nobody_holds_any_more_drops_no_message(
    link: bool,
    mailbox: Mailbox,
    store: type[InterruptedStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the database may see it in a race: the message goes out, as no duplicate, and runs."""
    task = unique(mailbox, work, {})
    with monkeypatch.context() as patch:
        patch.setattr(store, "acquire", hold_by_nobody)
        result = task.apply_async((7,), link=task.si(8) if link else None)
        assert result.is_duplicate is False
        message = mailbox.take_one()
    assert message.id == result.id
    assert "duplicate" not in message.ours
    assert mailbox.deliver(message) == ("SUCCESS", "done")


def test_a_second_publication_that_fails_leaves_the_firsts_lock(
    mailbox: Mailbox, locks_in_memory: None
) -> None:
    """
    The message that went out goes on to keep others from being sent, and frees the lock.

    The second is what follows on a task that was delivered twice: a canvas waits for it.
    """
    task = unique(mailbox, work, {})
    canvas = {"task_id": "the same", "link": mailbox.app.signature("tests.next")}
    task.apply_async((7,), **canvas)
    first = mailbox.take_one()
    with nobody_listens() as connection, pytest.raises(OperationalError):
        task.apply_async((7,), connection=connection, retry=False, **canvas)
    lock = find_lock(f"sent:{NAME}:7")
    assert lock is not None
    assert lock.token == first.ours["sent"]
    other = task.delay(7)
    assert (other.is_duplicate, other.id) == (True, first.id)
    assert mailbox.deliver(first).state == "SUCCESS"
    assert held_names() == []


def test_a_time_that_is_none_counts_for_nothing(mailbox: Mailbox, locks_in_memory: None) -> None:
    """An ETA that nobody can read goes out as with Celery, and the lock lasts its own time."""
    unique(mailbox, work, {"sent_timeout": 100}).apply_async((7,), eta="tomorrow")
    assert mailbox.take_one().headers["eta"] == "tomorrow"
    lock = find_lock(f"sent:{NAME}:7")
    assert lock is not None
    assert lock.remaining is not None
    assert 90 < lock.remaining <= 100


def test_a_revoked_message_frees_a_lock_that_the_worker_knows_nothing_of(
    mailbox: Mailbox, locks_in_memory: None
) -> None:
    """In a worker of an older release, which has the task without its decorator, too."""
    unique(mailbox, work, {}).delay(7)
    message = mailbox.take_one()
    assert held_names() == [f"sent:{NAME}:7"]
    plain = mailbox.app.task(name="tests.plain", base=SafeTask)(work)
    request = Context({**message.headers, "headers": message.headers})
    task_revoked.send(sender=plain, request=request, terminated=False, signum=None, expired=False)
    wait_for(lambda: held_names() == [], 5)
