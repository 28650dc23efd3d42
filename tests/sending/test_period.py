"""Tasks sent once per period, ``unique_until=600``, whether or not the first one ends."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import chain, shared_task
from celery.exceptions import Ignore, Reject
from django.core.management import call_command
from django.db import transaction
from kombu.exceptions import OperationalError

from django_celery_safe import (
    AlreadySent,
    ConfigurationError,
    HeldLock,
    SafeTask,
    find_lock,
    iter_locks,
    release_lock,
    single_instance,
)
from django_celery_safe.testing import deliver_twice, drain_outbox, on_commit_now
from tests.app.celery import app
from tests.concurrency.holders import held_by, remaining
from tests.concurrency.mailbox import Mailbox
from tests.contract.conftest import SHARED_STORES, use_store
from tests.processes import KeptProcess, dead_port, meet, run_in_processes, wait_for
from tests.processes.settings import settings_environment
from tests.sending.carrying import Carried, leave_dead
from tests.sending.conftest import ONE_TRY, MakeApp
from tests.sending.published import Published
from tests.servers import RedisServer, Server
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


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until=PERIOD, on_duplicate="raise")
def loud(number: int) -> None:
    """Be sent once per period, and raise at the second send."""


def lock_of(number: int = 1, name: str = NAME) -> HeldLock:
    """Return the lock of the send for this number."""
    lock = find_lock(f"sent:{name}:{number}")
    assert lock is not None
    return lock


# Duplicates within a period.


@pytest.mark.parametrize("name", [*SHARED_STORES, "local"])
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
            case "reject":
                raise Reject(how, requeue=False)
            case "requeue":
                raise Reject(how, requeue=True)
    return "done"


ENDS = {
    "succeed": "SUCCESS", "fail": "FAILURE", "retry": "RETRY", "ignore": "IGNORED",
    "reject": "REJECTED", "requeue": "REJECTED",
}  # fmt: skip


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("acks_late", [False, True])
def test_no_end_of_a_run_ends_the_period(how: str, acks_late: bool, mailbox: Mailbox) -> None:
    """The lock is neither freed, nor moved, nor renewed; the first's own retry passes."""
    decorate = single_instance(key="{number}", unique_until=PERIOD, timeout=5)
    task = mailbox.task(decorate(end), base=SafeTask, bind=True, name=NAME, acks_late=acks_late)
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
    [
        {},
        {"countdown": 5000},
        {"eta": datetime.now(UTC) + timedelta(days=1)},
        {"expires": 1},
        {"expires": datetime.now(UTC) - timedelta(days=1)},
    ],
)
def test_the_period_begins_at_the_send(options: dict[str, Any], mailbox: Mailbox) -> None:
    """Neither the message's eta nor its expiry makes it longer or shorter."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until=PERIOD)(plain), base=SafeTask, name=NAME
    )
    task.apply_async((1,), **options)
    assert PERIOD - SLACK < remaining(lock_of()) <= PERIOD
    assert task.delay(1).is_duplicate is True


@pytest.mark.usefixtures("locks_in_memory")
def test_a_duplicate_may_raise(broker: Any, sent: Sent) -> None:
    """``AlreadySent`` says how many seconds of the period are left."""
    first = loud.delay(1)
    with pytest.raises(AlreadySent, match=r"Its lock ends in \d+ s") as raised:
        loud.delay(1)
    assert raised.value.task_id == first.id
    assert raised.value.remaining is not None
    assert PERIOD - SLACK < raised.value.remaining <= PERIOD
    assert [one.id for one in sent()] == [first.id]


@pytest.mark.usefixtures("locks_in_memory")
def test_a_duplicate_of_a_canvas_does_nothing(mailbox: Mailbox) -> None:
    """It is published, since others wait for it, and its run returns None."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until=PERIOD)(plain), base=SafeTask, name=NAME
    )
    first = task.delay(1)
    chain(task.si(1), task.si(2)).apply_async()
    runs = {m.id: m for m in mailbox.take()}
    duplicate = next(m for m in runs.values() if m.id != first.id)
    assert duplicate.ours["duplicate"] == first.id
    assert mailbox.deliver(duplicate) == ("SUCCESS", None)
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", "done")
    assert lock_of().holder.task_id == first.id


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


@pytest.mark.usefixtures("locks_in_memory")
def test_the_period_begins_at_the_commit(sent: Sent) -> None:
    """A rollback begins none; the second of two sends in one transaction is the duplicate."""

    class Rollback(Exception):
        pass

    with pytest.raises(Rollback), transaction.atomic():
        hourly.delay_on_commit(1)
        raise Rollback
    with transaction.atomic():
        first, second = hourly.delay_on_commit(1), hourly.delay_on_commit(1)
        assert list(iter_locks()) == []
    assert (first.is_duplicate, second.is_duplicate, second.id) == (False, True, first.id)
    assert [one.id for one in sent()] == [first.id]


# Through the outbox.


@pytest.fixture
def carried(mailbox: Mailbox, postgres_alias: str, locks_in_memory: None) -> Carried:
    """A carried task whose rows are in PostgreSQL."""
    return Carried(mailbox, postgres_alias)


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


def test_a_carried_retry_is_no_duplicate(carried: Carried, periodic: Any) -> None:
    """It goes on with its row even if another send has the lock, also if a relay re-sends it."""

    def retry(task: Any, number: int) -> int:
        if not task.request.retries:
            raise task.retry(countdown=0)
        return number

    carried.body = retry
    message = carried.send(1, task=periodic)
    assert release_lock(carried_lock())
    assert carried.send(1, task=periodic).id != message.id
    assert carried.mailbox.deliver(message).state == "RETRY"
    carried.mailbox.take_one()  # lost
    carried.make_due()
    again = next(one for one in carried.relay() if one.id == message.id)
    assert carried.mailbox.deliver(again) == ("SUCCESS", 1)


def test_a_relay_begins_the_period(carried: Carried, periodic: Any) -> None:
    """A message that its sender could not publish has no lock before a relay publishes it."""
    with transaction.atomic(using=carried.alias):
        result = periodic.apply_async_on_commit((1,), using=carried.alias)
        transaction.get_connection(carried.alias).run_on_commit.clear()
    assert list(iter_locks()) == []
    carried.make_due()
    (message,) = carried.relay()
    assert message.id == result.id == carried_lock().holder.task_id
    assert periodic.apply_async_on_commit((1,), using=carried.alias).is_duplicate


# One call, and what is refused.


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize(
    "given", [{}, {"unique_until": "end", "sent_timeout": 50}, {"unique_until": 5}]
)
def test_one_call_can_have_a_period(given: dict[str, Any], mailbox: Mailbox) -> None:
    """A call may ask for a period, and a call of a task with a period for another rule."""
    decorate = single_instance(key="{number}", **given)
    task = mailbox.task(decorate(plain), base=SafeTask, name=NAME)
    first = task.apply_async((1,), single_instance={"unique_until": PERIOD})
    assert PERIOD - SLACK < remaining(lock_of()) <= PERIOD
    message = mailbox.take_one()
    assert mailbox.deliver(message) == ("SUCCESS", "done")
    again = task.apply_async((1,), single_instance={"unique_until": PERIOD})
    assert (again.id, again.is_duplicate) == (first.id, True)
    task.apply_async((2,), single_instance={"unique_until": "end", "sent_timeout": 70})
    assert remaining(lock_of(2)) <= 70


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"unique_until": 0}, "unique_until=0 is not a valid lease"),
        ({"unique_until": -1}, "unique_until=-1 is not a valid"),
        ({"unique_until": timedelta(0)}, "is not a valid"),
        ({"unique_until": float("inf")}, "is not a valid"),
        ({"unique_until": float("nan")}, "is not a valid"),
        ({"unique_until": 10**400}, "is not a valid"),  # too large for a float
        ({"unique_until": True}, "unique_until=True is not a valid"),
        ({"unique_until": timedelta(days=400)}, "at most a year"),
        ({"unique_until": []}, "is not a valid"),
        ({"unique_until": "10 min"}, "'10 min' is not known; it can be 'start', 'end'"),
        (
            {"unique_until": 5, "sent_timeout": 5},
            "sent_timeout=5 has no meaning with unique_until=5",
        ),
        ({"unique_until": 5, "on_duplicate": "shout"}, "'shout' is not known"),
    ],
)
def test_a_period_without_a_meaning_is_refused(options: dict[str, Any], sentence: str) -> None:
    """The error comes at import, and shows the option."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"unique_until": timedelta(seconds=5)}, "travels in the message"),
        ({"unique_until": True}, "travels in the message"),
        ({"unique_until": 0}, "is not a valid lease"),
        ({"unique_until": 5, "sent_timeout": 5}, "has no meaning"),
    ],
)
def test_a_period_of_one_call_is_a_number(options: dict[str, Any], sentence: str) -> None:
    """It travels in the message, as the other durations of a call."""
    with pytest.raises(ConfigurationError, match=sentence):
        hourly.apply_async((1,), single_instance=options)


@pytest.mark.parametrize(
    ("name", "seconds"), [("memcached", 31 * 24 * 3600), ("memcached", 0.5), ("portable", 1)]
)
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


@pytest.mark.usefixtures("locks_in_memory")
def test_the_command_shows_and_frees_it(
    mailbox: Mailbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does not claim that the message is still there."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until=PERIOD)(plain), base=SafeTask, name=NAME
    )
    task.delay(1)
    mailbox.deliver(mailbox.take_one())
    call_command("celery_locks", "show", f"sent:{NAME}:1")
    shown = capsys.readouterr().out
    assert "no process: a message waits or runs, or its period lasts" in shown
    call_command("celery_locks", "release", f"sent:{NAME}:1", "--no-input")
    assert task.delay(1).is_duplicate is False


@pytest.mark.usefixtures("locks_in_memory")
def test_deliver_twice_leaves_no_period() -> None:
    """A delivery in a test begins no period."""
    for _ in range(2):
        assert [one.result for one in deliver_twice(hourly, 1)] == [1, 1]
    assert list(iter_locks()) == []


@pytest.mark.usefixtures("locks_in_memory")
def test_a_drained_outbox_runs_it_once_per_period() -> None:
    """The second of two rows in one period is a duplicate, as with a relay and a worker."""
    with on_commit_now():
        for _ in range(2):
            hourly.apply_async_on_commit((1,), outbox=True)
        assert [one.result for one in drain_outbox()] == [1]


# Many senders.


@pytest.mark.parametrize("name", ["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def test_two_senders_at_once_publish_one_message_per_tick(
    name: str, request: pytest.FixtureRequest, redis_server: RedisServer
) -> None:
    """Two processes send at the same moment, 200 times: 200 messages, and both know of each."""
    broker: Server = request.getfixturevalue(f"{name}_server")
    with app_on_broker(broker, redis_server):
        take_all()  # of other tests
        told = run_in_processes(tick_together, 2)
        assert told[0][0] == told[1][0]
        assert len(set(told[0][0])) == TICKS
        assert sum(fresh for _, fresh in told) == TICKS
        assert take_all() == TICKS


TICKS = 200


def tick_together() -> tuple[list[str], int]:
    """Send each tick when the other does; return the ids, and how many were no duplicates."""
    results = []
    for number in range(TICKS):
        meet()
        results.append(app.tasks[hourly.name].delay(number))
    return [result.id for result in results], sum(not result.is_duplicate for result in results)


def take_all() -> int:
    """Take all messages out of the queue of our app; return how many there were."""
    with app.connection_for_read() as connection:
        queue, count = connection.SimpleQueue("celery"), 0
        with closing(queue), suppress(queue.Empty):
            while True:
                # RabbitMQ may still be at it when a sender has ended.
                queue.get(timeout=2).ack()
                count += 1
    return count


SCHEDULER = """
from celery import shared_task
from django_celery_safe import SafeTask, single_instance
from tests.app.celery import app

@shared_task(base=SafeTask, name="tests.tick")
@single_instance(unique_until={period})
def tick():
    pass

app.conf.beat_schedule = {{"tick": {{"task": "tests.tick", "schedule": {interval}}}}}
"""

#: Seconds between two ticks of a beat, and a period a little shorter.
INTERVAL, SHORTER = 0.2, 0.18


@pytest.mark.quarantine("2026-11-26", "ticks of 0.2 s, period of 0.18 s")
@pytest.mark.long
@pytest.mark.parametrize("name", ["redis", "rabbitmq"])
def test_two_beats_send_once_per_period(
    name: str, request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Each tick of two real beats for 200 ticks is a message or a duplicate of a period's one."""
    broker: Server = request.getfixturevalue(f"{name}_server")
    (tmp_path / "scheduler.py").write_text(SCHEDULER.format(period=SHORTER, interval=INTERVAL))
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    with app_on_broker(broker, redis_server):
        take_all()
        env = {**os.environ, **settings_environment(), "PYTHONPATH": path}
        beats = [
            KeptProcess(
                [sys.executable, "-m", "celery", "-A", "scheduler", "beat", "--loglevel", "INFO",
                 "--schedule", tmp_path / f"schedule{number}"],
                folder=tmp_path,
                log_path=tmp_path / f"{number}.log",
                env=env,
            )
            for number in (1, 2)
        ]  # fmt: skip
        began = time.monotonic()
        with beats[0], beats[1]:
            wait_for(lambda: min(map(ticks, beats)) >= TICKS, 180, "the beats do not tick")
            for beat in beats:
                beat.stop()
        took = time.monotonic() - began
        published = take_all()
    sends, duplicates = sum(map(ticks, beats)), sum(b.log.count(" is a duplicate") for b in beats)
    assert "Traceback" not in "".join(beat.log for beat in beats)
    # Each may have been stopped inside a tick.
    assert sends - 2 <= published + duplicates <= sends
    assert TICKS / 4 < published <= took / SHORTER + 1
    assert duplicates > TICKS / 4


def ticks(beat: KeptProcess) -> int:
    """Return how often a beat has sent."""
    return beat.log.count("Sending due task")
