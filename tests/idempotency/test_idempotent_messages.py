"""Messages of idempotent tasks, without a worker."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import pytest
from celery import Task
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import Settings

from django_celery_safe import (
    AlreadyClaimed,
    IdempotencyConflict,
    SafeTask,
    idempotent,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.delivery import copies
from django_celery_safe.events import TASK_OWN_COPY
from django_celery_safe.models import IdempotencyRecord
from tests.concurrency.mailbox import Mailbox, Message
from tests.concurrency.test_without_message import by_apply, by_run, directly, eagerly
from tests.conftest import MakeDatabase
from tests.idempotency.test_claims import FIRST, begin, end, finish
from tests.sending.conftest import hearing

NAME: Final = "tests.ordering"
#: Of number 7.
KEY: Final = f"{NAME}:7"
#: Time left of the lease of the other process that does the work, s.
LEASE: Final = 20


class Ordering:
    """An idempotent task of the mailbox, and what became of it."""

    def __init__(
        self, mailbox: Mailbox, using: str | None = None, base: Any = SafeTask, **options: Any
    ) -> None:
        self.mailbox = mailbox
        self.alias = using or "default"
        #: The retries of each run.
        self.runs: list[int] = []

        def ordering(task: Any, number: int, currency: str = "EUR") -> Any:
            self.runs.append(task.request.retries)
            return f"{number} {currency}"

        options.setdefault("acks_late", True)
        self.task = mailbox.task(
            idempotent("{number}", using=using)(ordering),
            name=NAME, base=base, bind=True, **options,
        )  # fmt: skip

    def message(self, *args: Any, **options: Any) -> Message:
        """Return a message for number 7."""
        self.task.apply_async(args or (7,), **options)
        return self.mailbox.take_one()

    @property
    def records(self) -> Any:
        """The records of this test."""
        return IdempotencyRecord.objects.using(self.alias)

    def is_done_elsewhere(self, task_id: str | None = "other", seconds: float = LEASE) -> None:
        """Let another process have number 7, as its record would say."""
        begin(self.alias, KEY, timedelta(seconds=seconds), task=NAME, task_id=task_id)


@pytest.fixture
def ordering(mailbox: Mailbox, db: None) -> Ordering:
    """A task whose records are in the default database."""
    return Ordering(mailbox)


# Done before.


def test_a_repeat_takes_one_query(mailbox: Mailbox, db: None) -> None:
    """A message that is delivered again gets the stored result by a single look."""
    ordering = Ordering(mailbox, base=Task)
    message = ordering.message()
    assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    with CaptureQueriesContext(connections["default"]) as queries:
        assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    assert len(queries) == 1
    assert mailbox.deliver(ordering.message(7, "EUR")) == ("SUCCESS", "7 EUR")
    assert ordering.runs == [0]
    record = ordering.records.get()
    assert record.key == KEY
    assert message.id in record.holder


def test_a_call_and_a_message_are_one(ordering: Ordering) -> None:
    """Called directly, with .run(), .apply() or by message: it is done once."""
    message = ordering.message()
    ways = [directly, by_run, by_apply]
    assert [way(ordering.task, 7) for way in ways] == ["7 EUR"] * 3
    assert ordering.mailbox.deliver(message).value == "7 EUR"
    assert eagerly(ordering.task, 7) == "7 EUR"
    assert len(ordering.runs) == 1


def test_arguments_of_any_number_count_in_a_message_too(mailbox: Mailbox, db: None) -> None:
    """What *args and **kwargs got is compared, for a message as for a direct call."""

    def work(number: int, *more: str, **options: str) -> str:
        return f"{number} {more} {options}"

    task = mailbox.task(idempotent("{number}")(work), base=SafeTask, name=NAME)

    def deliver(*args: Any, **kwargs: Any) -> Any:
        task.delay(*args, **kwargs)
        return mailbox.deliver(mailbox.take_one()).value

    done = deliver(7, "EUR", note="a")
    assert done == task(7, "EUR", note="a") == deliver(7, "EUR", note="a")
    for args, kwargs in [((7, "USD"), {"note": "a"}), ((7, "EUR"), {"note": "b"})]:
        assert isinstance(deliver(*args, **kwargs), IdempotencyConflict)
    assert mailbox.take() == []


# Done just now by somebody else.


@pytest.mark.parametrize(
    ("task_id", "autoretry"), [("other", {"autoretry_for": (Exception,)}), (None, {})]
)
def test_a_message_comes_back_after_the_lease(
    task_id: str | None, autoretry: dict[str, Any], mailbox: Mailbox, db: None
) -> None:
    """While somebody else does it, one copy with the same id and retries is sent for later."""
    ordering = Ordering(mailbox, **autoretry)
    message = ordering.message(retries=2)
    began = timezone.now()
    ordering.is_done_elsewhere(task_id)
    with hearing(TASK_OWN_COPY) as told:
        assert mailbox.deliver(message).state == "IGNORED"
    assert [event["task_id"] for event in told] == [message.id]
    copy = mailbox.take_one()
    assert (copy.id, copy.headers["retries"]) == (message.id, 2)
    assert (copy.args, copy.kwargs) == (message.args, message.kwargs)
    assert began + timedelta(seconds=LEASE - 1) <= copy.eta
    assert copy.delay <= LEASE
    finish(ordering.alias, KEY)
    assert mailbox.deliver(copy) == ("SUCCESS", "stored")
    assert ordering.runs == []
    assert mailbox.take() == []


def test_a_copy_does_it_when_the_other_is_gone(ordering: Ordering) -> None:
    """Where the holder died, the copy that comes after its lease does the work."""
    mailbox, message = ordering.mailbox, ordering.message()
    ordering.is_done_elsewhere()
    mailbox.deliver(message)
    copy = mailbox.take_one()
    ordering.records.update(ends_at=Now() - timedelta(seconds=1))
    assert mailbox.deliver(copy) == ("SUCCESS", "7 EUR")
    assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    assert ordering.runs == [0]
    assert ordering.records.get().claims == 2


@pytest.mark.parametrize("way", [directly, eagerly])
def test_without_a_message_it_is_an_error(way: Callable[..., Any], ordering: Ordering) -> None:
    """A direct call can't come back: AlreadyClaimed names the task that does it."""
    ordering.is_done_elsewhere()
    with pytest.raises(AlreadyClaimed) as caught:
        way(ordering.task, 7)
    assert caught.value.task_id == "other"
    assert ordering.mailbox.take() == []
    assert ordering.runs == []


def test_a_block_in_a_task_lets_the_message_come_back(mailbox: Mailbox, db: None) -> None:
    """The code before the block runs again; the block gets the other's result."""
    steps: list[str] = []

    def work(number: int) -> Any:
        steps.append("before")
        with idempotent(f"{NAME}:{number}") as claim:
            steps.append("inside")
            assert not claim
            return claim.result

    elsewhere = Ordering(mailbox)
    elsewhere.is_done_elsewhere()
    task = mailbox.task(work, name="tests.block", acks_late=True)
    task.delay(7)
    message = mailbox.take_one()
    assert mailbox.deliver(message).state == "IGNORED"
    copy = mailbox.take_one()
    assert copy.id == message.id
    finish(elsewhere.alias, KEY)
    assert mailbox.deliver(copy) == ("SUCCESS", "stored")
    assert steps == ["before"] * 2 + ["inside"]


# Under a lock as well.


def test_a_copy_of_a_claim_that_meets_the_lock_is_not_lost(
    sqlite_immediate_alias: str, mailbox: Mailbox, settings: Settings
) -> None:
    """It waits for a run of its message, which waits for it: one of them does the work."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": sqlite_immediate_alias}
    ordering, steps = Ordering(mailbox, using=sqlite_immediate_alias), list[str]()
    inside, gate = threading.Event(), threading.Event()

    def work(number: int) -> None:
        steps.append("before")
        if len(steps) == 2:
            inside.set()
            assert gate.wait(60)
        with idempotent(f"{NAME}:{number}", using=sqlite_immediate_alias) as claim:
            assert claim
            steps.append("inside")

    task = mailbox.task(single_instance(work), name="tests.alone", base=SafeTask, acks_late=True)
    task.delay(7)
    message = mailbox.take_one()
    ordering.is_done_elsewhere(seconds=600)
    assert mailbox.deliver(message).state == "IGNORED"
    (of_claim,) = mailbox.take()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(mailbox.deliver_elsewhere, message)
        try:
            assert inside.wait(30)
            assert mailbox.deliver(of_claim).state == "IGNORED"
            waiting = mailbox.take()
            assert [copy.id for copy in waiting] == [message.id]
        finally:
            gate.set()
        assert again.result().state == "IGNORED"
    waiting += mailbox.take()
    ordering.records.update(ends_at=Now() - timedelta(seconds=1))
    while waiting:
        mailbox.deliver(waiting.pop(0))
        waiting += mailbox.take()
    assert steps.count("inside") == 1


# Failures and retries.


@pytest.mark.parametrize(("kind", "base"), [("function", SafeTask), ("block", Task)])
def test_a_retry_that_is_not_raised_does_it(
    mailbox: Mailbox, db: None, kind: str, base: Any
) -> None:
    """The function returns after ``retry(throw=False)``, and the work is left to the retry."""
    done: list[int] = []

    def work(task: Any, number: int) -> Any:
        if task.request.retries == 0:
            task.retry(countdown=0, throw=False)
            return None
        done.append(number)
        return "done"

    def block(task: Any, number: int) -> Any:
        with idempotent(f"block:{number}") as claim:
            return work(task, number) if claim else claim.result

    function = block if kind == "block" else idempotent("{number}")(work)
    task = mailbox.task(function, name=NAME, bind=True, base=base)
    task.delay(7)
    mailbox.deliver(mailbox.take_one())
    assert IdempotencyRecord.objects.get().state != IdempotencyRecord.State.DONE
    again = mailbox.take_one()
    assert [mailbox.deliver(again).state for _ in range(2)] == ["SUCCESS", "SUCCESS"]
    assert done == [7]


def test_a_block_after_a_retry_that_was_not_raised_is_done(mailbox: Mailbox, db: None) -> None:
    """The retry was sent before the block began, and says nothing about it."""
    done: list[str] = []

    def work(task: Any) -> None:
        if task.request.retries == 0:
            task.retry(countdown=0, throw=False)
        with idempotent("after") as claim:
            if claim:
                done.append(task.request.id)

    mailbox.task(work, name=NAME, bind=True, base=SafeTask).delay()
    for _ in range(2):
        mailbox.deliver(mailbox.take_one())
    assert len(done) == 1


def test_a_retry_without_delay_waits_for_the_end_of_its_run(
    mailbox: Mailbox, make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that meets the claim of its own id looks again before it goes for a lease."""
    # Time enough on a busy machine.
    monkeypatch.setattr(copies, "OWN_RUN_WAIT", 20)
    alias = make_database("sqlite")
    ordering = Ordering(mailbox, using=alias)
    message = ordering.message()
    ordering.is_done_elsewhere(message.id)

    def fail() -> None:
        end(alias, KEY, FIRST, state="failed", result="", error="Retry", cursor="")
        connections[alias].close()

    ending = threading.Timer(0.1, fail)
    ending.start()
    assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    ending.join()
    assert mailbox.take() == []
