"""Messages of idempotent tasks, without a worker."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

import pytest
from celery import Task
from celery.exceptions import Retry, SoftTimeLimitExceeded
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext
from pydantic import BaseModel
from pytest_django import Settings

from django_celery_safe import (
    AlreadyClaimed,
    IdempotencyConflict,
    IdempotencyError,
    ResultNotStored,
    SafeTask,
    WrongTransaction,
    current_claim,
    idempotent,
    iter_locks,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.delivery import copies
from django_celery_safe.events import TASK_OWN_COPY
from django_celery_safe.idempotency.record_table import read_claim, record_table
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.models import DatabaseLock, IdempotencyRecord
from django_celery_safe.testing import locks_in_memory as in_memory
from tests.app.models import Person
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox, Message
from tests.concurrency.test_without_message import by_apply, by_run, directly, eagerly
from tests.conftest import MakeDatabase
from tests.idempotency.test_flags_race import end_sessions
from tests.sending.conftest import hearing
from tests.servers import PostgresServer
from tests.versions import IS_CELERY_57

__all__ = ["mailbox"]

NAME: Final = "tests.ordering"
#: Time left of the lease of the other process that does the work, s.
LEASE: Final = 20
#: The token of that process.
TOKEN: Final = "0123456789abcdef" * 2


class Ordering:
    """An idempotent task of the mailbox, and what became of it."""

    def __init__(
        self,
        mailbox: Mailbox,
        using: str | None = None,
        body: Callable[..., Any] | None = None,
        base: Any = SafeTask,
        **options: Any,
    ) -> None:
        self.mailbox = mailbox
        self.alias = using or "default"
        #: The retries of each run.
        self.runs: list[int] = []

        def ordering(task: Any, number: int, currency: str = "EUR") -> Any:
            self.runs.append(task.request.retries)
            return f"{number} {currency}" if body is None else body(task)

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
        holder = Holder("elsewhere", 4711, time.time(), True, NAME, task_id)
        self.records.create(
            key=f"{NAME}:7",
            state=IdempotencyRecord.State.RUNNING,
            token=TOKEN,
            holder=encode_holder(f"{NAME}:7", holder),
            claimed_at=Now(),
            ends_at=Now() + timedelta(seconds=seconds),
        )

    def ends_elsewhere(self) -> None:
        """Let the other process finish it."""
        table, keep = record_table(self.alias), timedelta(days=1)
        assert table.finish(f"{NAME}:7", TOKEN, '"by the other"', keep, "")


@pytest.fixture
def ordering(mailbox: Mailbox, db: None) -> Ordering:
    """A task whose records are in the default database."""
    return Ordering(mailbox)


def notes(alias: str = "default") -> list[str]:
    """Return the names of the notes about copies."""
    return sorted(lock.key for lock in DatabaseLock.objects.using(alias))


# Done before.


@pytest.mark.parametrize("base", [Task, SafeTask])
def test_a_repeat_takes_one_query(base: Any, mailbox: Mailbox, db: None) -> None:
    """A message that is delivered again gets the stored result by a single look."""
    ordering = Ordering(mailbox, base=base)
    message = ordering.message()
    assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    with CaptureQueriesContext(connections["default"]) as queries:
        assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    assert len(queries) == 1
    assert mailbox.deliver(ordering.message(7, "EUR")) == ("SUCCESS", "7 EUR")
    assert ordering.runs == [0]


def test_a_call_and_a_message_are_one(ordering: Ordering) -> None:
    """Called directly, with .run(), .apply() or by message: it is done once."""
    message = ordering.message()
    ways = [directly, by_run, by_apply]
    assert [way(ordering.task, 7) for way in ways] == ["7 EUR"] * 3
    assert ordering.mailbox.deliver(message).value == "7 EUR"
    assert eagerly(ordering.task, 7) == "7 EUR"
    assert len(ordering.runs) == 1


def test_the_message_is_named(ordering: Ordering) -> None:
    """The record says which task did it, and the key begins with the task's name."""
    message = ordering.message()
    ordering.mailbox.deliver(message)
    record = ordering.records.get()
    assert record.key == f"{NAME}:7"
    assert message.id in record.holder


def test_a_conflict_fails_the_task(ordering: Ordering) -> None:
    """The same key with other arguments ends in a failure, and no copy is sent."""
    mailbox = ordering.mailbox
    mailbox.deliver(ordering.message())
    state, error = mailbox.deliver(ordering.message(7, "USD"))
    assert state == "FAILURE"
    assert isinstance(error, IdempotencyConflict)
    assert mailbox.take() == []


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


def test_a_result_that_can_not_be_kept_fails_the_task(mailbox: Mailbox, db: None) -> None:
    """The task fails, says why, and is not done again."""
    ordering = Ordering(mailbox, body=lambda task: "x" * 70_000)
    message = ordering.message()
    for _ in range(2):
        state, error = mailbox.deliver(message)
        assert state == "FAILURE"
        assert isinstance(error, ResultNotStored)
    assert ordering.runs == [0]


# Done just now by somebody else.


@pytest.mark.parametrize("autoretry", [{}, {"autoretry_for": (Exception,)}])
@pytest.mark.parametrize("task_id", ["other", None])
def test_a_message_comes_back_after_the_lease(
    task_id: str | None, autoretry: dict[str, Any], mailbox: Mailbox, db: None
) -> None:
    """While somebody else does it, one copy with the same id and retries is sent for later."""
    ordering = Ordering(mailbox, **autoretry)
    message = ordering.message(retries=2)
    ordering.is_done_elsewhere(task_id)
    with hearing(TASK_OWN_COPY) as told:
        assert mailbox.deliver(message).state == "IGNORED"
    assert [event["task_id"] for event in told] == [message.id]
    copy = mailbox.take_one()
    assert (copy.id, copy.headers["retries"]) == (message.id, 2)
    assert (copy.args, copy.kwargs) == (message.args, message.kwargs)
    assert LEASE - 5 < copy.delay <= LEASE
    ordering.ends_elsewhere()
    assert mailbox.deliver(copy) == ("SUCCESS", "by the other")
    assert ordering.runs == []
    assert mailbox.take() == []
    assert notes() == []


def test_one_copy_is_on_its_way(ordering: Ordering) -> None:
    """However often it is delivered meanwhile, one copy of a message lives at a time."""
    mailbox, message = ordering.mailbox, ordering.message()
    ordering.is_done_elsewhere()
    mailbox.deliver(message)
    copy = mailbox.take_one()
    for _ in range(3):
        assert mailbox.deliver(message).state == "IGNORED"
    assert mailbox.take() == []
    # It comes, meets the same again, and is followed by its own copy.
    assert mailbox.deliver(copy).state == "IGNORED"
    second = mailbox.take_one()
    assert second.id == message.id
    # Other messages have copies of their own.
    other = ordering.message()
    mailbox.deliver(other)
    assert mailbox.take_one().id == other.id
    ordering.ends_elsewhere()
    assert mailbox.deliver(second).value == "by the other"


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
    assert notes() == []


def test_a_copy_comes_before_the_broker_delivers_again(ordering: Ordering) -> None:
    """It waits for half the visibility timeout at most: beyond the whole it would multiply."""
    mailbox, message = ordering.mailbox, ordering.message()
    mailbox.app.conf.broker_transport_options = {"visibility_timeout": 6}
    ordering.is_done_elsewhere()
    mailbox.deliver(message)
    assert mailbox.take_one().delay <= 3


@pytest.mark.parametrize("way", [directly, by_run, by_apply, eagerly])
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
    assert mailbox.deliver(message).state == "IGNORED"
    assert mailbox.take() == []
    elsewhere.ends_elsewhere()
    assert mailbox.deliver(copy) == ("SUCCESS", "by the other")
    assert steps == ["before"] * 3 + ["inside"]
    assert notes() == []


# Under a lock as well.


class Alone:
    """
    A single-instance task whose body has an idempotent block, for number 7.

    Args:
        waits: In which run the body waits, before its block, to be let go.
    """

    def __init__(self, mailbox: Mailbox, alias: str, waits: int) -> None:
        self.mailbox = mailbox
        self.ordering = Ordering(mailbox, using=alias)
        self.steps: list[str] = []
        self.inside, self.gate = threading.Event(), threading.Event()

        def work(number: int) -> None:
            self.steps.append("before")
            if len(self.steps) == waits:
                self.inside.set()
                assert self.gate.wait(60)
            with idempotent(f"{NAME}:{number}", using=alias) as claim:
                assert claim
                self.steps.append("inside")

        self.task = mailbox.task(
            single_instance(work), name="tests.alone", base=SafeTask, acks_late=True
        )
        self.task.delay(7)
        self.message = mailbox.take_one()

    def deliver_to_another(self) -> str:
        """Run the message, as a second process does that got it too; return its state."""
        try:
            return self.mailbox.deliver(self.message).state
        finally:
            connections[self.ordering.alias].close()

    def deliver_all(self, messages: list[Message]) -> None:
        """Run messages, and what is sent meanwhile, after those who were in the way are gone."""
        self.ordering.records.update(ends_at=Now() - timedelta(seconds=1))
        while messages:
            self.mailbox.deliver(messages.pop(0))
            messages += self.mailbox.take()


@pytest.fixture(params=["beside the records", "elsewhere"])
def alias_and_locks(
    request: pytest.FixtureRequest, make_database: MakeDatabase, settings: Settings
) -> Iterator[str]:
    """The alias of the records, with the locks in the same database and in another store."""
    alias = make_database("sqlite-immediate")
    with ExitStack() as stack:
        if request.param == "elsewhere":
            stack.enter_context(in_memory())
        else:
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        yield alias


def test_a_copy_that_met_the_lock_is_not_that_of_the_claim(
    alias_and_locks: str, mailbox: Mailbox
) -> None:
    """The run that was met meets a claim, and is not done: its message's copy runs later."""
    alone = Alone(mailbox, alias_and_locks, waits=1)
    alone.ordering.is_done_elsewhere(seconds=600)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(alone.deliver_to_another)
        try:
            assert alone.inside.wait(30)
            assert mailbox.deliver(alone.message).state == "IGNORED"
            copies = mailbox.take()
            assert [copy.id for copy in copies] == [alone.message.id]
        finally:
            alone.gate.set()
        assert first.result() == "IGNORED"
    copies += mailbox.take()
    # One waits for the lock, one for the claim.
    assert [sorted({"copy", "claim_copy"} & set(copy.ours)) for copy in copies] == [
        ["copy"], ["claim_copy"],
    ]  # fmt: skip
    alone.deliver_all(copies)
    assert alone.steps.count("inside") == 1
    assert notes(alias_and_locks) == []


def test_a_copy_of_a_claim_that_meets_the_lock_is_not_lost(
    alias_and_locks: str, mailbox: Mailbox
) -> None:
    """It waits for a run of its message, which waits for it: one of them does the work."""
    alone = Alone(mailbox, alias_and_locks, waits=2)
    alone.ordering.is_done_elsewhere(seconds=600)
    assert mailbox.deliver(alone.message).state == "IGNORED"
    (of_claim,) = mailbox.take()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(alone.deliver_to_another)
        try:
            assert alone.inside.wait(30)
            assert mailbox.deliver(of_claim).state == "IGNORED"
            copies = mailbox.take()
            assert [copy.id for copy in copies] == [alone.message.id]
        finally:
            alone.gate.set()
        assert again.result() == "IGNORED"
    copies += mailbox.take()
    # The same once more, while the other still works.
    assert mailbox.deliver(copies.pop(0)).state == "IGNORED"
    copies += mailbox.take()
    assert len(copies) == 1
    alone.deliver_all(copies)
    assert alone.steps.count("inside") == 1
    assert notes(alias_and_locks) == []


def test_a_retry_of_a_copy_is_no_copy(mailbox: Mailbox, db: None, locks_in_memory: None) -> None:
    """Messages that the run of a copy sends do not carry the copy's token."""

    def work(task: Any, number: int) -> str:
        with idempotent(f"{NAME}:{number}"):
            if task.request.retries == 0:
                raise task.retry(countdown=0)
            return "done"

    ordering = Ordering(mailbox)
    ordering.is_done_elsewhere()
    task = mailbox.task(
        single_instance(work), name="tests.alone", base=SafeTask, bind=True, acks_late=True
    )
    task.delay(7)
    assert mailbox.deliver(mailbox.take_one()).state == "IGNORED"
    copy = mailbox.take_one()
    assert "claim_copy" in copy.ours
    ordering.records.update(ends_at=Now() - timedelta(seconds=1))
    assert mailbox.deliver(copy).state == "RETRY"
    retry = mailbox.take_one()
    assert retry.ours == {}
    assert mailbox.deliver(retry) == ("SUCCESS", "done")
    assert notes() == []


# Failures and retries.


@pytest.mark.parametrize("way", ["decorated", "block"])
def test_a_time_limit_before_a_copy_runs_leaves_the_work_to_others(
    way: str, mailbox: Mailbox, db: None
) -> None:
    """When it hits while the copy's note is struck, the claim ends, and none is left behind."""
    ordering = Ordering(mailbox)
    task = ordering.task
    if way == "block":

        def work(number: int) -> None:
            with idempotent(f"{NAME}:{number}"):
                pytest.fail("the block ran")

        task = mailbox.task(work, name="tests.block", acks_late=True)
    ordering.is_done_elsewhere()
    task.delay(7)
    mailbox.deliver(mailbox.take_one())
    copy = mailbox.take_one()
    ordering.records.update(ends_at=Now() - timedelta(seconds=1))
    hits: list[str] = []

    def hit(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        # The first: what else it asks on its way out is answered.
        if DatabaseLock._meta.db_table in sql and not hits:
            hits.append(sql)
            raise SoftTimeLimitExceeded
        return run(sql, params, many, context)

    with connections["default"].execute_wrapper(hit):
        state, error = mailbox.deliver(copy)
    assert len(hits) == 1
    assert (state, type(error)) == ("FAILURE", SoftTimeLimitExceeded)
    assert ordering.records.get().state == IdempotencyRecord.State.FAILED
    with pytest.raises(IdempotencyError, match="No claim is being worked on"):
        current_claim()
    assert ordering.runs == []


def test_a_retry_after_a_connection_broke_does_it_at_once(
    mailbox: Mailbox, postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """The failure is noted by a new connection, so the retry has no lease to wait for."""

    def work(task: Any) -> str:
        if task.request.retries == 0:
            end_sessions(postgres_server, postgres_alias)
            connections[postgres_alias].cursor().execute("SELECT 1")
            pytest.fail("the connection lives")
        return "done"

    ordering = Ordering(
        mailbox, using=postgres_alias, body=work,
        autoretry_for=(OperationalError,), retry_backoff=False, default_retry_delay=0,
    )  # fmt: skip
    assert mailbox.deliver(ordering.message()).state == "RETRY"
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", "done")
    assert mailbox.take() == []
    assert ordering.runs == [0, 1]


def test_a_retry_does_it(mailbox: Mailbox, db: None) -> None:
    """The message of self.retry() finds the work not done, and does it."""

    def retry_twice(task: Any) -> str:
        if task.request.retries < 2:
            raise task.retry(countdown=0)
        return "done"

    ordering = Ordering(mailbox, body=retry_twice)
    message = ordering.message()
    for _ in range(2):
        state, error = mailbox.deliver(message)
        assert state == "RETRY"
        assert isinstance(error, Retry)
        message = mailbox.take_one()
    assert mailbox.deliver(message) == ("SUCCESS", "done")
    assert mailbox.deliver(message) == ("SUCCESS", "done")
    assert ordering.runs == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"base": Task}, {"base": SafeTask}, {"base": SafeTask, "trail": False}],
    ids=["Task", "SafeTask", "trail=False"],
)
@pytest.mark.parametrize("kind", ["function", "block"])
def test_a_retry_that_is_not_raised_does_it(
    mailbox: Mailbox, db: None, kind: str, options: dict[str, Any]
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
    task = mailbox.task(function, name=NAME, bind=True, **options)
    task.delay(7)
    mailbox.deliver(mailbox.take_one())
    assert IdempotencyRecord.objects.get().state != IdempotencyRecord.State.DONE
    again = mailbox.take_one()
    assert [mailbox.deliver(again).state for _ in range(2)] == ["SUCCESS", "SUCCESS"]
    assert done == [7]


@pytest.mark.parametrize("left", ["atomic()", "autocommit off"])
def test_work_that_leaves_a_transaction_open_is_not_done(
    mailbox: Mailbox, make_database: MakeDatabase, left: str
) -> None:
    """It is rolled back, so the work has failed, and its next call does it."""
    alias = make_database("sqlite-immediate")

    def work(task: Any) -> str:
        if task.request.retries == 0:
            if left == "atomic()":
                transaction.atomic(using=alias).__enter__()
            else:
                transaction.set_autocommit(False, using=alias)
            Person.everyone.using(alias).create(pk=1)
        return "done"

    ordering = Ordering(mailbox, using=alias, body=work)
    message = ordering.message()
    state, error = mailbox.deliver(message)
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    assert not Person.everyone.using(alias).exists()
    assert mailbox.deliver(message.with_headers(retries=1)) == ("SUCCESS", "done")


def test_autoretry_does_it(mailbox: Mailbox, db: None) -> None:
    """A message of autoretry_for does the work too; after a last failure another call may."""

    def fail(task: Any) -> str:
        raise ValueError("no")

    ordering = Ordering(mailbox, body=fail, autoretry_for=(ValueError,), max_retries=1)
    message = ordering.message()
    assert mailbox.deliver(message).state == "RETRY"
    again = mailbox.take_one()
    assert mailbox.deliver(again).state == "FAILURE"
    assert mailbox.deliver(message).state == "RETRY"
    assert ordering.runs == [0, 1, 0]
    assert ordering.records.get().error == "ValueError: no"


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

    def end() -> None:
        ordering.records.all().fail(TOKEN, "Retry", timedelta(days=1))
        connections[alias].close()

    ending = threading.Timer(0.1, end)
    ending.start()
    assert mailbox.deliver(message) == ("SUCCESS", "7 EUR")
    ending.join()
    assert mailbox.take() == []


def test_a_message_that_meets_its_own_run_for_long_comes_back(
    mailbox: Mailbox, make_database: MakeDatabase
) -> None:
    """Delivered again while it runs, a message holds no slot until its run has ended."""
    ordering = Ordering(mailbox, using=make_database("sqlite"))
    message = ordering.message()
    ordering.is_done_elsewhere(message.id)
    assert mailbox.deliver(message).state == "IGNORED"
    assert mailbox.take_one().id == message.id
    assert ordering.runs == []


# Keys, and kinds of tasks.


def import_feed(feed_url: str, limit: Any = 10) -> Any:
    """Return the locks and the records that there are."""
    locks = [lock.name for lock in iter_locks()]
    records = IdempotencyRecord.objects.annotate(asked_at=Now())
    return [locks, [read_claim(record).name for record in records]]


def by_limit(feed_url: str, limit: Any = 10) -> list[Any]:
    """Return a key that is hashed."""
    return [feed_url, limit]


@pytest.mark.parametrize("args", [("u",), ("u", 10), ("u", (1, 2)), ("u", {"a": [None, 1.5]})])
@pytest.mark.parametrize(
    "options", [{}, {"key": "{feed_url}:{limit}"}, {"key": ["limit", "feed_url"]},
                {"key": by_limit}],
)  # fmt: skip
def test_its_keys_are_those_of_single_instance(
    options: Any, args: tuple[Any, ...], mailbox: Mailbox, db: None, locks_in_memory: None
) -> None:  # fmt: skip
    """The same rule gives the same key."""
    alone, once = single_instance(**options), idempotent(**options)
    task = mailbox.task(alone(once(import_feed)), name="tests.import_feed")
    task.apply_async(args)
    message = mailbox.take_one()
    state, (locks, records) = mailbox.deliver(message)
    assert state == "SUCCESS"
    assert locks == records
    assert records[0].startswith("tests.import_feed:")
    assert mailbox.deliver(message) == ("SUCCESS", [locks, records])
    assert list(iter_locks()) == []


class Feed(BaseModel):
    """The argument of a pydantic task."""

    url: str
    limit: int = 10


def test_a_pydantic_task_is_done_once(mailbox: Mailbox, db: None) -> None:
    """The key is made of what is sent, by message and by a direct call alike."""
    runs: list[Feed] = []

    @idempotent
    def importing(feed: Feed) -> str:
        runs.append(feed)
        return feed.url

    task = mailbox.task(importing, name="tests.pydantic", pydantic=True)
    task.delay({"url": "u", "limit": 10})
    message = mailbox.take_one()
    assert mailbox.deliver(message).value == "u"
    assert mailbox.deliver(message).value == "u"
    if IS_CELERY_57:
        assert task(Feed(url="u", limit=10)) == "u"
    assert len(runs) == 1
    assert isinstance(runs[0], Feed)


def test_a_task_class_is_done_once(mailbox: Mailbox, db: None) -> None:
    """On the run method of a task class the task itself is no part of the key."""
    runs: list[int] = []

    class Importing(SafeTask):
        name = "tests.class"

        @idempotent
        def run(self, number: int) -> int:
            runs.append(number)
            return number

    task = mailbox.app.register_task(Importing())
    task.delay(7)
    message = mailbox.take_one()
    assert [mailbox.deliver(message).value for _ in range(2)] == [7, 7]
    assert task(7) == 7
    assert runs == [7]


@pytest.mark.parametrize("again", [directly, by_run])
def test_a_task_may_call_itself_with_another_key(
    again: Callable[..., Any], mailbox: Mailbox, db: None
) -> None:
    """Inside its own message a direct call has the key of its own arguments."""
    runs: list[int] = []

    @idempotent("{number}")
    def down(number: int) -> int:
        runs.append(number)
        return number + (int(again(task, number - 1)) if number else 0)

    task = mailbox.task(down, name="tests.countdown")
    task.delay(2)
    message = mailbox.take_one()
    assert mailbox.deliver(message) == ("SUCCESS", 3)
    assert mailbox.deliver(message) == ("SUCCESS", 3)
    assert again(task, 1) == 1
    assert runs == [2, 1, 0]


@pytest.mark.parametrize("again", [directly, by_run, by_apply])
def test_a_task_that_calls_itself_with_the_same_key_is_told(
    again: Callable[..., Any], mailbox: Mailbox, db: None
) -> None:
    """A call inside the run that has the claim raises, and its message stays where it is."""

    @idempotent
    def itself(number: int) -> str:
        with pytest.raises(IdempotencyError, match="would wait for itself"):
            again(task, number)
        return "done"

    task = mailbox.task(itself, name="tests.itself")
    task.delay(7)
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", "done")
    assert mailbox.take() == []
