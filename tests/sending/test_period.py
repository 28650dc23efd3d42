"""Tasks sent once per period, ``unique_until=600``, whether or not the first one ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import shared_task
from celery.exceptions import Ignore, Reject
from django.db import transaction
from kombu.exceptions import OperationalError

from django_celery_safe import (
    ConfigurationError,
    HeldLock,
    SafeTask,
    find_lock,
    iter_locks,
    release_lock,
    single_instance,
)
from tests.app.celery import app
from tests.concurrency.holders import held_by, remaining
from tests.concurrency.mailbox import Mailbox
from tests.contract.conftest import use_store
from tests.processes import dead_port, meet, run_in_processes, wait_for
from tests.sending.carrying import Carried, leave_dead
from tests.sending.conftest import ONE_TRY, MakeApp
from tests.sending.published import Published, take_published
from tests.servers import RedisServer
from tests.worker.brokers import app_on_broker

__all__ = ["use_store"]

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[2]
NAME = "tests.periodic"
#: A period that no test outlives, s.
PERIOD = 600
#: Seconds that a test may take between a send and a look at its lock.
SLACK = 120

Sent = Callable[[], list[Published]]


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until=timedelta(seconds=PERIOD))
def hourly(number: int) -> int:
    """Be sent once per period for each number."""
    return number


def lock_of(number: int = 1, name: str = NAME) -> HeldLock:
    """Return the lock of the send for this number."""
    lock = find_lock(f"sent:{name}:{number}")
    assert lock is not None
    return lock


# Duplicates within a period.


@pytest.mark.parametrize("name", ["django-redis", "memcached", "portable", "local"])
def test_a_second_send_within_the_period_is_a_duplicate(
    name: str, sent: Sent, use_store: Callable[[str], None]
) -> None:
    """It gets the result of the first; an operator's release ends the period."""
    use_store(name)
    first, second, other = hourly.delay(1), hourly.delay(1), hourly.delay(2)
    assert [one.is_duplicate for one in (first, second, other)] == [False, True, False]
    assert second.id == first.id
    if name != "portable":  # which can't tell
        assert PERIOD - SLACK < remaining(lock_of(1, hourly.name)) <= PERIOD
    assert release_lock(lock_of(1, hourly.name))
    third = hourly.delay(1)
    assert third.is_duplicate is False
    assert {one.id for one in sent()} == {first.id, other.id, third.id}


def test_after_the_period_it_is_sent_again(use_store: Any, mailbox_anywhere: Mailbox) -> None:
    """The period is all that counts, even if the first was never run."""
    use_store("django-redis")
    mailbox = mailbox_anywhere
    task = mailbox.task(single_instance(unique_until=0.5)(plain), base=SafeTask, name=NAME)
    began = time.monotonic()
    first = task.delay(1)
    wait_for(lambda: not task.delay(1).is_duplicate, 60, "the period does not end")
    assert time.monotonic() - began > 0.49
    assert mailbox.take()[0].id == first.id


@pytest.fixture
def mailbox_anywhere() -> Iterator[Mailbox]:
    """A mailbox whose locks are where the test puts them."""
    with closing(Mailbox()) as mailbox:
        yield mailbox


def plain(number: int) -> str:
    """Do nothing."""
    return "done"


def end(self: Any, number: int, how: str) -> str:
    """End in this way at the first run."""
    if self.request.retries == 0:
        match how:
            case "fail":
                raise KeyError(how)
            case "retry":
                raise self.retry(countdown=0)
            case "ignore":
                raise Ignore
            case "requeue":
                raise Reject(how, requeue=True)
    return "done"


ENDS = {"fail": "FAILURE", "retry": "RETRY", "ignore": "IGNORED", "requeue": "REJECTED"}


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize("how", ENDS)
def test_no_end_of_a_run_ends_the_period(how: str, mailbox: Mailbox) -> None:
    """The lock is neither freed, nor moved, nor renewed; the first's own retry passes."""
    decorate = single_instance(key="{number}", unique_until=PERIOD, timeout=5)
    task = mailbox.task(decorate(end), base=SafeTask, bind=True, name=NAME)
    first = task.delay(1, how)
    before = lock_of()
    assert mailbox.deliver(mailbox.take_one()).state == ENDS[how]
    again = mailbox.take()
    assert len(again) == (how == "retry")
    for message in again:
        assert mailbox.deliver(message) == ("SUCCESS", "done")
    after = lock_of()
    assert (after.token, after.holder) == (before.token, before.holder)
    assert PERIOD - SLACK < remaining(after) <= remaining(before)
    assert not after.holder.renewed
    assert task.delay(1, how).id == first.id
    assert mailbox.take() == []


@pytest.mark.usefixtures("locks_in_memory")
def test_the_message_knows_no_token_of_the_lock(mailbox: Mailbox) -> None:
    """So neither a revoke nor a worker that does not know the task can free the lock."""
    task = mailbox.task(single_instance(unique_until=PERIOD)(plain), base=SafeTask, name=NAME)
    task.delay(1)
    assert "sent" not in mailbox.take_one().ours


@pytest.mark.usefixtures("locks_in_memory")
def test_a_message_that_waits_for_the_runs_lock_is_sent_again(mailbox: Mailbox) -> None:
    """Put back by on_conflict="retry", it is not a duplicate of itself, nor of a later send."""
    decorate = single_instance(key="{number}", unique_until=PERIOD, on_conflict="retry")
    task = mailbox.task(decorate(plain), base=SafeTask, name=NAME)
    first = task.delay(1)
    message = mailbox.take_one()
    assert release_lock(lock_of())
    second = task.delay(1)  # it has the lock of the next period
    assert second.is_duplicate is False
    mailbox.take_one()
    with held_by(f"{NAME}:1", "another"):
        assert mailbox.deliver(message).state == "RETRY"
    again = mailbox.take_one()
    assert again.id == first.id
    assert mailbox.deliver(again) == ("SUCCESS", "done")
    assert lock_of().holder.task_id == second.id


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize(
    "options",
    [{"countdown": 5000}, {"expires": datetime.now(UTC) - timedelta(days=1)}],
)
def test_the_period_begins_at_the_send(options: dict[str, Any], mailbox: Mailbox) -> None:
    """Neither the message's eta nor its expiry makes it longer or shorter."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until=PERIOD)(plain), base=SafeTask, name=NAME
    )
    task.apply_async((1,), **options)
    assert PERIOD - SLACK < remaining(lock_of()) <= PERIOD
    assert task.delay(1).is_duplicate is True


# Sends that never were.


@pytest.mark.usefixtures("locks_in_memory")
def test_a_send_that_fails_begins_no_period(make_app: MakeApp) -> None:
    """The lock is free after a failed send, and after a failed send at a commit."""
    nowhere = f"redis://127.0.0.1:{dead_port()}/0"
    task = make_app(broker_url=nowhere, task_publish_retry_policy=ONE_TRY).tasks[hourly.name]
    with pytest.raises(OperationalError):
        task.delay(1)
    assert list(iter_locks()) == []
    with transaction.atomic():
        result = task.delay_on_commit(1)
    assert isinstance(result.send_error, OperationalError)
    assert list(iter_locks()) == []


# Through the outbox.


@pytest.fixture
def carried(mailbox: Mailbox, db_alias: str) -> Carried:
    """A carried task whose rows are in a database of this test."""
    return Carried(mailbox, db_alias)


@pytest.fixture
def periodic(carried: Carried) -> Any:
    """A carried task that is sent once per period."""
    return carried.make_task(NAME, single_instance(key=[], unique_until=PERIOD))


def carried_lock() -> HeldLock:
    """Return the only lock."""
    (lock,) = iter_locks()
    return lock


def test_a_carried_message_is_sent_again_within_any_period(carried: Carried, periodic: Any) -> None:
    """A relay re-sends a task whose process died, and leaves the period of a later send alone."""
    first = carried.send(1, task=periodic)
    leave_dead(carried, first)
    assert release_lock(carried_lock())
    second = carried.send(1, task=periodic)
    before = carried_lock()
    assert before.holder.task_id == second.id
    carried.make_due()
    again = {message.id: message for message in carried.relay()}
    assert set(again) == {first.id, second.id}  # no worker has begun the second
    assert carried_lock().token == before.token
    for message in again.values():
        assert carried.mailbox.deliver(message).state == "SUCCESS"
    assert not carried.rows.exists()
    assert carried_lock().token == before.token


# What is refused.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"unique_until": 0}, "unique_until=0"),
        ({"unique_until": float("nan")}, "unique_until=nan"),
        ({"unique_until": 10**400}, "unique_until="),  # too large for a float
        ({"unique_until": True}, "unique_until=True"),
        ({"unique_until": timedelta(days=400)}, "at most a year"),
        ({"unique_until": "10 min"}, "'10 min'"),
    ],
)
def test_a_period_without_a_meaning_is_refused(options: dict[str, Any], sentence: str) -> None:
    """The error comes at import, and shows the option."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(**options)


@pytest.mark.parametrize(("name", "seconds"), [("memcached", 31 * 24 * 3600), ("portable", 1)])
def test_a_period_that_the_store_cant_keep_is_refused_at_the_send(
    name: str, seconds: float, mailbox_anywhere: Mailbox, use_store: Callable[[str], None]
) -> None:
    """The period is not adjusted: nothing is sent, and there is no lock."""
    use_store(name)
    mailbox = mailbox_anywhere
    task = mailbox.task(single_instance(unique_until=seconds)(plain), base=SafeTask, name=NAME)
    with pytest.raises(ConfigurationError, match="can't be kept in"):
        task.delay(1)
    assert mailbox.take() == []
    assert find_lock(f"sent:{task.lock_name(1)}") is None


# Periods in the command and in the test kit.


# Many senders.


def test_two_senders_at_once_publish_one_message_per_tick(redis_server: RedisServer) -> None:
    """Two processes send at the same moment, as two beats: one message, and both know of it."""
    with app_on_broker(redis_server, redis_server):
        take_published(redis_server)
        told = run_in_processes(tick_together, 2)
        assert told[0][0] == told[1][0]
        assert len(set(told[0][0])) == TICKS
        assert sum(fresh for _, fresh in told) == TICKS
        assert len(take_published(redis_server)) == TICKS


TICKS = 100


def tick_together() -> tuple[list[str], int]:
    """Send each tick when the other does; return the ids, and how many were no duplicates."""
    results = []
    for number in range(TICKS):
        meet()
        results.append(app.tasks[hourly.name].delay(number))
    return [result.id for result in results], sum(not result.is_duplicate for result in results)
