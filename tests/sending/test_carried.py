"""Tasks that are carried until done: their row after each event, run by real tracers."""

import asyncio
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import chain, chord, group
from celery.backends.base import DisabledBackend
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, WorkerTerminate
from celery.signals import after_task_publish, task_received, task_rejected
from django.db import DataError, connections, transaction
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import ContentDisallowed
from pytest_django import Settings

from django_celery_safe import (
    ClaimLost,
    ConfigurationError,
    TaskPoisoned,
    WrongTransaction,
    cache_lock,
    find_lock,
    iter_locks,
    release_lock,
    send_on_commit,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.delivery.header import HEADER
from django_celery_safe.leases.holder import HOST, Holder, encode_holder
from django_celery_safe.sending import carried_run as carried_module
from django_celery_safe.sending.outbox import Next, message_table
from django_celery_safe.sending.publisher import Publisher
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import (
    claim_lost,
    message_brought_back,
    message_done,
    message_failed,
    task_poisoned,
)
from tests.app.models import Person
from tests.background import before_its_update, settle
from tests.clock import held_clock
from tests.concurrency.mailbox import Message, end_child
from tests.kinds import more_for_claim
from tests.listening import receiving
from tests.processes import dead_port
from tests.sending.carrying import Carried, leave_dead, lose_commit, revoke
from tests.sending.conftest import dying_sender, hearing
from tests.statements import at_statement, raising

#: Larger than any process id (Linux: PID_MAX_LIMIT).
NO_PROCESS = 2**22 + 1
#: Makes the message of a task unique until its run has ended.
UNIQUE = single_instance(key=[], unique_until="end")
#: Statements that open and close transactions.
BRACKETS = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")


class Unspeakable(Exception):
    """An error that can't be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


def retry_once(task: Any, number: int = 0) -> int:
    """Ask for another run at the first one."""
    if not task.request.retries:
        raise task.retry(countdown=0)
    return number


@pytest.mark.sql
def test_the_row_stays_until_the_task_is_done(carried: Carried) -> None:
    """It is sent, then running, then gone; a send costs one query, a run two."""
    with transaction.atomic(using=carried.alias):
        with CaptureQueriesContext(connections[carried.alias]) as sending:
            carried.task.apply_async_on_commit((7,), using=carried.alias)
        assert carried.row.state == "pending"
    message = carried.mailbox.take_one()
    assert carried.row.state == "sent"
    assert 590 < carried.waits <= 600
    seen: list[Any] = []

    def look(task: Any, number: int) -> int:
        seen.append((carried.row.state, carried.row.starts, 25 < carried.waits <= 30))
        return number

    carried.body = look
    assert carried.mailbox.deliver(message) == ("SUCCESS", 7)
    assert seen == [("running", 1, True)]
    assert not carried.rows.exists()
    carried.body = lambda task, number: number
    again = carried.send(8)
    with CaptureQueriesContext(connections[carried.alias]) as running:
        carried.mailbox.deliver(again)
    counts = [
        sum(not query["sql"].startswith(BRACKETS) for query in queries)
        for queries in (sending, running)
    ]
    assert counts == [1, 2 + more_for_claim(carried.alias)]


@pytest.mark.sql
def test_a_row_that_django_does_not_know_to_be_rolled_back_runs_nothing(carried: Carried) -> None:
    """The message goes out without a look for its row, which its run does not find."""
    with transaction.atomic(using=carried.alias):
        savepoint = connections[carried.alias].savepoint()
        carried.task.apply_async_on_commit((7,), using=carried.alias)
        connections[carried.alias].savepoint_rollback(savepoint)
    state, _ = carried.mailbox.deliver(carried.mailbox.take_one())
    assert (state, carried.calls) == ("IGNORED", [])


def test_a_message_that_meets_a_live_run_is_forgotten(carried: Carried) -> None:
    """No copy of it is sent: the row is what brings the task back."""
    message = carried.send(1)
    carried.body = lambda task, number: carried.deliver_elsewhere(message).state
    assert carried.mailbox.deliver(message) == ("SUCCESS", "IGNORED")
    assert (carried.calls, carried.mailbox.take()) == ([1], [])


def test_messages_of_what_is_done_or_discarded_do_nothing(
    carried: Carried, settings: Settings
) -> None:
    """With a retention a done row is kept, and can't be retried."""
    other = carried.send(2)
    assert carried.rows.discard() == 1
    assert carried.mailbox.deliver(other).state == "IGNORED"
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": 60}}
    message = carried.send(1)
    assert [carried.mailbox.deliver(message).state for _ in range(2)] == ["SUCCESS", "IGNORED"]
    assert carried.calls == [1]
    assert (carried.row.state, carried.row.due_at) == ("done", None)
    carried.rows.update(attempts=1)  # as if its sender had failed
    assert carried.rows.revive() == 0


def test_a_relay_that_was_absent_does_not_judge(carried: Carried) -> None:
    """Half a lease long it brings no run back: living processes renew their leases first."""
    relay = Relay(carried.alias)
    with held_clock() as clock:
        clock.advance(10.0)
        assert relay.relay_batch() == 0
        leave_dead(carried, carried.send(1))
        for seconds, found in ((16.0, 0), (14.0, 0), (1.5, 1)):
            clock.advance(seconds)
            assert relay.relay_batch() == found


@pytest.mark.sql
def test_what_died_is_sent_again_by_a_relay(carried: Carried) -> None:
    """Under the same id, with one death more, which is told of; it is done once more."""
    message = carried.send(1)
    leave_dead(carried, message)
    with hearing(message_brought_back) as heard:
        (again,) = carried.relay()
    assert again.id == message.id
    assert (carried.row.state, carried.row.deaths) == ("sent", 1)
    assert [event["task_id"] for event in heard] == [message.id]
    assert heard[0]["reason"] == "its process died (death 1)"
    assert carried.mailbox.deliver(again) == ("SUCCESS", 1)
    assert carried.mailbox.deliver(message).state == "IGNORED"
    assert not carried.rows.exists()


@pytest.mark.sql
def test_a_row_that_was_written_twice_is_one_task(carried: Carried) -> None:
    """The answer of its INSERT got lost, and the connection was cut: it was repeated."""
    message = carried.send(1)
    carried.rows.create(**{**carried.rows.values().get(), "id": None})
    assert [carried.mailbox.deliver(message).state for _ in range(2)] == ["SUCCESS", "IGNORED"]
    assert not carried.rows.exists()


@pytest.mark.sql
def test_a_redelivered_message_takes_over_when_the_lease_is_over(carried: Carried) -> None:
    """With acks_late the broker may be faster than a relay; the death counts all the same."""
    message = carried.send(1)
    leave_dead(carried, message)
    deaths: list[int] = []
    carried.body = lambda task, number: deaths.append(carried.row.deaths)
    assert carried.mailbox.deliver(message).state == "SUCCESS"
    assert deaths == [1]


def test_what_no_worker_began_is_sent_again_later_and_later(carried: Carried) -> None:
    """After its ETA and OUTBOX_RESEND_AFTER, then twice that, and so on; it still runs once."""
    carried.send(1, countdown=500)
    assert 1090 < carried.waits <= 1100
    carried.rows.all().erase()
    messages = [carried.send(1)]
    waits = [carried.waits]
    with hearing(message_brought_back) as heard:
        for _ in range(9):
            carried.make_due()
            messages += carried.relay()
            waits.append(carried.waits)
    assert [event["reason"] for event in heard] == [
        f"no worker began it, {times} time(s) so far" for times in range(1, 10)
    ]
    assert [round(wait / 600, 1) for wait in waits] == [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]
    assert carried.row.deaths == 0
    states = [carried.mailbox.deliver(message).state for message in messages]
    assert states == ["SUCCESS"] + 9 * ["IGNORED"]


@pytest.mark.sql
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_run_that_lost_its_lease_ends_nothing(carried: Carried, is_closed: bool) -> None:
    """Another process has begun it, which alone ends the row, and alone has a result."""

    def lose(task: Any, number: int) -> Any:
        carried.body = lambda task, number: "the second"
        carried.make_due()
        (again,) = carried.relay()
        result = carried.deliver_elsewhere(again)
        if is_closed:  # as long work may leave it
            connections[carried.alias].close()
        return result

    with hearing(claim_lost) as heard:
        state, error = carried.run(lose, 1)
    assert (state, type(error.__cause__)) == ("IGNORED", ClaimLost)
    assert len(heard) == 1
    assert not carried.rows.exists()
    assert carried.calls == [1, 1]


@pytest.mark.parametrize(("retention", "end"), [(0, None), (60, None), (0, ValueError())])
def test_a_run_that_lost_its_claim_leaves_the_row_alone(
    carried: Carried, settings: Settings, retention: int, end: Exception | None
) -> None:
    """Another run has it, and has not ended; without its row it would be lost with its process."""
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": retention}}
    fail = raising(end) if end else lambda task: None
    state, error = carried.run(lambda task: carried.rows.update(token="another") and fail(task))
    assert (state, type(error.__cause__)) == ("IGNORED", type(end) if end else ClaimLost)
    assert (carried.row.state, carried.row.token) == ("running", "another")


@pytest.mark.sql
def test_a_retry_keeps_its_row(carried: Carried) -> None:
    """The next attempt's message is in the row; those of earlier attempts do nothing."""

    def retry(task: Any, number: int) -> int:
        if task.request.retries < 2:
            raise task.retry(args=(number + 1,), countdown=60)
        return number

    carried.body = retry
    first = carried.send(1)
    assert carried.mailbox.deliver(first).state == "RETRY"
    second = carried.mailbox.take_one()
    assert (second.id, second.headers["retries"], second.args) == (first.id, 1, [2])
    assert (carried.row.state, 650 < carried.waits <= 660) == ("sent", True)
    assert carried.mailbox.deliver(first).state == "IGNORED"
    # Its message got lost: a relay sends that of the retry again, not the first one.
    carried.make_due()
    (again,) = carried.relay()
    assert (again.headers["retries"], again.args) == (1, [2])
    assert carried.mailbox.deliver(again).state == "RETRY"
    assert carried.mailbox.deliver(carried.mailbox.take_one()) == ("SUCCESS", 3)
    assert carried.mailbox.deliver(second).state == "IGNORED"
    assert (carried.calls, carried.rows.count()) == ([1, 2, 3], 0)


def test_no_answer_loses_a_replacement(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has the message of the other task, which nothing carries, and a relay sends it."""
    plain = carried.make_task("tests.plain", base=DjangoTask, outbox=None)

    def replace(task: Any) -> None:
        lose_commit(carried.alias, monkeypatch)
        raise task.replace(plain.si())

    with hearing(claim_lost) as told:
        assert carried.run(replace).state == "IGNORED"
    assert (carried.row.task, carried.row.attempt, told) == (plain.name, "", [])


@pytest.mark.parametrize("how", ["inside atomic()", "without throw", "by autoretry"])
def test_a_retry_is_sent_however_it_is_written(carried: Carried, how: str) -> None:
    """Also where its transaction is rolled back, and where the function goes on after it."""

    def retry(task: Any, number: int) -> None:
        if task.request.retries:
            return
        if how == "by autoretry":
            raise OSError("once")
        with transaction.atomic(using=carried.alias):
            if how == "without throw":
                task.retry(countdown=0, throw=False)
            else:
                raise task.retry(countdown=0)

    task = carried.make_task("tests.other", autoretry_for=(OSError,), retry_backoff=0)
    carried.run(retry, 1, task=task)
    assert (carried.row.state, carried.row.deaths) == ("sent", 0)
    assert carried.mailbox.deliver(carried.mailbox.take_one()).state == "SUCCESS"
    assert (len(carried.calls), carried.rows.count()) == (2, 0)


@pytest.mark.parametrize(
    ("left", "error"), [("atomic()", WrongTransaction), ("autocommit off", ValueError)]
)
def test_a_task_that_leaves_a_transaction_open_fails(
    carried: Carried, left: str, error: type[Exception]
) -> None:
    """It is not run again and again, as if its process had died; what is open is rolled back."""

    def leave_open(task: Any, number: int) -> None:
        if left == "atomic()":
            transaction.atomic(using=carried.alias).__enter__()
        else:
            transaction.set_autocommit(False, using=carried.alias)
        Person.everyone.using(carried.alias).create(pk=number)
        if error is ValueError:
            raise ValueError("no such order")

    task = carried.make_task("tests.other", autoretry_for=(WrongTransaction,), max_retries=0)
    state, raised = carried.run(leave_open, 1, task=task)
    assert (state, type(raised)) == ("FAILURE", error)
    assert (carried.row.state, carried.row.error_type) == ("failed", error.__name__)
    assert not Person.everyone.using(carried.alias).exists()
    # The next task of the process begins as any other.
    assert carried.run(lambda task, number: number, 2) == ("SUCCESS", 2)


def test_a_run_that_can_not_begin_is_not_retried(carried: Carried) -> None:
    """The row brings the task back; autoretry_for would send another one beside it."""
    task = carried.make_task("tests.other", autoretry_for=(Exception,), retry_backoff=0)
    message = carried.send(1, task=task)
    # Another task of the process left a transaction open.
    with transaction.atomic(using=carried.alias):
        assert carried.mailbox.deliver(message).state == "FAILURE"
    # The worker lacks the database of the row.
    message.headers[HEADER]["using"] = "elsewhere"
    state, error = carried.mailbox.deliver(message)
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert "the database 'elsewhere', which DATABASES of this worker has not" in str(error)
    assert carried.mailbox.take() == []
    assert (carried.row.state, carried.calls) == ("sent", [])
    carried.make_due()
    assert carried.run_again() == ("SUCCESS", 1)
    assert (carried.calls, carried.rows.count()) == ([1], 0)


def test_a_failed_task_is_kept(carried: Carried) -> None:
    """With type, text and the end of the traceback; retry runs it again under its id."""
    carried.body = raising(ValueError("no such order " + 1000 * "more "))
    message = carried.send(1)
    with hearing(message_failed, message_done) as told:
        assert carried.mailbox.deliver(message).state == "FAILURE"
    row = carried.row
    assert (row.state, row.error_type, row.error[:13]) == ("failed", "ValueError", "no such order")
    assert len(row.traceback) == 4000
    assert row.traceback.rstrip().endswith("more more")
    assert [(one["signal"], one["task_id"]) for one in told] == [(message_failed, message.id)]
    assert carried.mailbox.deliver(message).state == "IGNORED"
    assert carried.relay() == []
    carried.body = lambda task, number: "mended"
    assert carried.rows.revive() == 1
    (again,) = carried.relay()
    with hearing(message_done) as done:
        assert carried.mailbox.deliver(again) == ("SUCCESS", "mended")
    assert not carried.rows.exists()
    assert [one["task_id"] for one in done] == [again.id] == [message.id]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Ignore(), "gone"),
        (Reject("not ours"), "failed"),
        (Reject("later", requeue=True), "pending"),
        (SoftTimeLimitExceeded(), "failed"),
        (Unspeakable(), "failed"),
    ],
)
def test_how_other_ends_leave_the_row(carried: Carried, error: Exception, state: str) -> None:
    """Ignore ends it well, Reject fails it or leaves it to its message, a time limit fails it."""
    # autoretry_for takes a Reject for an error, but the row says what becomes of the task.
    carried.run(raising(error), task=carried.make_task("tests.other", autoretry_for=(Reject,)))
    assert carried.mailbox.take() == []
    rows = [row.state for row in carried.rows.all()]
    assert rows == ([] if state == "gone" else [state])


@pytest.mark.parametrize(
    ("error", "state", "deaths"),
    [
        # billiard's children leave so at SIGTERM; the second ends workers without children.
        (SystemExit(-241), "pending", 0),
        (WorkerTerminate(1), "pending", 0),
        # sys.exit() is a death, or the task would be run for ever.
        (SystemExit(0), "pending", 1),
        (KeyboardInterrupt(), "pending", 1),
        # asyncio's error ends no process.
        (asyncio.CancelledError(), "failed", 0),
    ],
    ids=repr,
)
def test_a_process_that_is_told_to_end_gives_its_task_back(
    carried: Carried, error: BaseException, state: str, deaths: int
) -> None:
    """The task is due at once; one that leaves by itself has died."""
    with pytest.raises(type(error)):
        carried.run(raising(error))
    assert (carried.row.state, carried.row.deaths) == (state, deaths)
    assert len(carried.relay()) == (state == "pending")


def test_a_process_that_gives_its_task_back_when_it_is_revoked(carried: Carried) -> None:
    """It is killed while the main process fails the task, which is not run again."""

    def give_back() -> None:
        assert carried.rows.put_back(carried.row.token, timedelta(0), "SystemExit: -241")

    def lose(task: Any) -> None:
        with before_its_update(give_back):
            revoke(task, message, terminated=True)

    carried.body = lose
    message = carried.send()
    state, error = carried.mailbox.deliver(message)
    assert (state, type(error.__cause__)) == ("IGNORED", ClaimLost)
    assert (carried.row.state, carried.row.error) == ("failed", "The task was revoked.")
    assert carried.relay() == []


def test_a_message_that_is_done_while_its_duplicate_is_revoked(carried: Carried) -> None:
    """The delivery that ran it has ended its row, which stays done."""

    def end() -> None:
        carried.rows.update(state="done", ended_at=Now(), due_at=None, token="")

    message = carried.send()
    with before_its_update(end):
        revoke(carried.task, message)
    assert (carried.row.state, carried.row.error) == ("done", "")


def test_poison_is_not_run_for_ever(carried: Carried) -> None:
    """After max_deaths it fails with TaskPoisoned, which no autoretry_for retries."""
    alone = single_instance(key=[], on_conflict="retry")
    task = carried.make_task("tests.poison", alone, max_deaths=2, autoretry_for=(Exception,))
    message = carried.send(task=task)
    # A run that stepped aside has not begun.
    with cache_lock(task.lock_name()):
        assert carried.mailbox.deliver(message).state == "RETRY"
    assert (carried.row.starts, carried.row.started_at) == (0, None)
    message = carried.mailbox.take_one()
    carried.body = raising(SystemExit(1))
    for _ in range(2):
        with suppress(SystemExit):
            carried.mailbox.deliver(message)
        (message,) = carried.relay()
    with hearing(task_poisoned) as heard:
        state, error = carried.mailbox.deliver(message)
    assert (state, type(error), error.deaths) == ("FAILURE", TaskPoisoned, 2)
    assert f"process {os.getpid()} on " in error.last
    row = carried.row
    assert (row.state, row.error_type, row.starts) == ("failed", "TaskPoisoned", 2)
    assert row.started_at is not None
    assert len(heard) == 1
    assert carried.rows.revive() == 1
    assert carried.row.deaths == 0


@pytest.mark.parametrize("kind", ["chain", "callbacks", "group", "chord"])
def test_what_follows_is_written_as_the_row_ends(carried: Carried, kind: str) -> None:
    """Its rows and the end of the row are one: none sees both, and it is sent after them."""
    begin, *parts = (
        carried.make_task(f"tests.{name}").s().set(using=carried.alias) for name in "abc"
    )
    begin.args = (1,)
    wanted = ["tests.b"] if kind in {"chain", "chord"} else ["tests.b", "tests.c"]
    if kind == "callbacks":
        begin.set(link=parts)
    canvas = {
        "chain": lambda: chain(begin, parts[0]),
        "callbacks": lambda: begin,
        "group": lambda: chain(begin, group(parts)),
        "chord": lambda: chord([begin], parts[0]),
    }[kind]()
    seen: list[list[str]] = []

    def look(**kwargs: Any) -> None:
        seen.append([row.task for row in carried.rows.order_by("task")])

    send_on_commit(canvas, using=carried.alias)
    message = carried.mailbox.take_one()
    with receiving(after_task_publish, look):
        assert carried.mailbox.deliver(message) == ("SUCCESS", 1)
    following = carried.mailbox.take()
    assert sorted(one.headers["task"] for one in following) == wanted
    assert seen == [wanted] * len(wanted)
    for one in following:
        assert carried.mailbox.deliver(one).state == "SUCCESS"
    assert not carried.rows.exists()
    # The message of the first, delivered once more, sends nothing.
    assert carried.mailbox.deliver(message).state == "IGNORED"
    assert carried.mailbox.take() == []


def test_the_part_that_sends_the_body_of_a_chord_is_done(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row ends with the send; if the database refuses that once, the body is sent after it."""
    parts = [carried.make_task(f"tests.{name}").s(1).set(using=carried.alias) for name in "ab"]
    body = carried.make_task("tests.body").s().set(using=carried.alias)
    end_row = carried_module.Run.end

    def refuse_then_end(run: Any, follow: Any = None) -> bool:
        with transaction.atomic(using=carried.alias):
            if follow is not None:
                follow()
                raise DataError("refused")
        return end_row(run, follow)

    send_on_commit(chord(parts, body), using=carried.alias)
    monkeypatch.setattr(carried_module.Run, "end", refuse_then_end)
    with hearing(message_done, claim_lost) as told:
        for message in carried.mailbox.take():
            assert carried.mailbox.deliver(message).state == "SUCCESS"
    assert [one["signal"] for one in told] == [message_done] * 2
    assert carried.row.task == "tests.body"
    carried.mailbox.deliver(carried.mailbox.take_one())
    assert not carried.rows.exists()


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_soft_time_limit_after_the_end_was_committed(
    carried: Carried, monkeypatch: pytest.MonkeyPatch, is_retried: bool
) -> None:
    """The run ends as its row says, with its result; a relay sends what was not sent."""
    first, second = (carried.make_task(f"tests.{name}") for name in ("first", "second"))
    links = [one.s(*args).set(using=carried.alias) for one, args in ((first, [1]), (second, []))]
    send_on_commit(chain(*links), using=carried.alias)
    message = carried.mailbox.take_one()
    if is_retried:
        carried.body = retry_once
    with monkeypatch.context() as patch, hearing(message_failed, claim_lost) as told:
        patch.setattr(Publisher, "publish", raising(SoftTimeLimitExceeded()))
        state = carried.mailbox.deliver(message).state
    assert state == first.AsyncResult(message.id).state == ("RETRY" if is_retried else "SUCCESS")
    assert told == []
    carried.make_due()
    (following,) = carried.relay()
    assert following.headers["task"] == ("tests.first" if is_retried else "tests.second")


def test_a_soft_time_limit_right_after_the_end_was_written(carried: Carried) -> None:
    """The task is done, as its row says, and its result is stored."""
    interrupt = raising(SoftTimeLimitExceeded())
    written = at_statement(carried.alias, "DELETE", interrupt, after=True)
    with written, hearing(claim_lost) as told:
        assert carried.mailbox.deliver(carried.send(1)) == ("SUCCESS", 1)
    assert told == []
    assert not carried.rows.exists()


def test_a_refused_message_says_so_whatever_the_refusal_says(carried: Carried) -> None:
    """Its row says it, cut to what a row keeps, although anyone may have written the message."""
    message = carried.send(1)
    task_rejected.send(sender=None, message=message, exc=ContentDisallowed("a\0b" + 5000 * "c"))
    settle()
    said = carried.row.error
    assert "refused the message: ContentDisallowed: a\N{REPLACEMENT CHARACTER}bccc" in said
    assert len(said) == 1000
    assert carried.mailbox.deliver(message) == ("SUCCESS", 1)


def test_a_task_that_calls_itself_is_one_run(carried: Carried) -> None:
    """Celery copies the request for the inner call, which is no delivery of the message."""
    outcome = carried.run(lambda task, number: number + task(number - 1) if number else 0, 3)
    assert outcome == ("SUCCESS", 6)
    assert (carried.calls, carried.rows.count()) == ([3, 2, 1, 0], 0)


def test_a_link_that_can_not_be_sent(carried: Carried) -> None:
    """The task before it is failed, instead of being done without it or for ever again."""
    first, second = (carried.make_task(f"tests.{name}") for name in ("first", "second"))
    send_on_commit(chain(first.s(1), second.s().set(using="nowhere")), using=carried.alias)
    # Not pytest.warns, which raises what garbage collection may warn of meanwhile.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        carried.mailbox.deliver(carried.mailbox.take_one())
    assert any("outside body" in str(one.message) for one in caught)
    assert (carried.row.task, carried.row.state) == ("tests.first", "failed")
    assert carried.row.error == "Its result can't be stored, or what follows it be sent."


def test_parts_of_a_canvas_that_can_not_be_carried(carried: Carried) -> None:
    """They are ordinary rows, which end with the sending; the others are carried."""
    plain = carried.make_task("tests.celery", base=DjangoTask)
    send_on_commit(group(carried.task.si(1), plain.si(2)), using=carried.alias)
    assert [row.task for row in carried.rows.all()] == ["tests.carried"]
    assert len(carried.mailbox.take()) == 2
    with pytest.raises(ConfigurationError, match="is not a SafeTask that is known here"):
        send_on_commit(plain.si(1), using=carried.alias, outbox="until_done")


@pytest.mark.parametrize("goes_on", ["by a retry", "by its row"])
def test_a_sender_that_records_too_late_records_nothing(carried: Carried, goes_on: str) -> None:
    """The task has begun meanwhile, and is to be sent again: a relay has to do that soon."""
    carried.body = retry_once if goes_on == "by a retry" else raising(SystemExit(1))
    message = carried.send(1)
    pk, token = carried.row.pk, "the sender's"
    with suppress(SystemExit):
        carried.mailbox.deliver(message)
    carried.rows.update(state="pending", due_at=Now())
    message_table(carried.alias).record_sent(token, {pk: Next(60.0)})
    assert carried.row.state == "pending"
    carried.mailbox.take()
    assert [one.ours["attempt"] for one in carried.relay()] == [carried.row.attempt]


def test_a_begun_task_is_no_duplicate(carried: Carried) -> None:
    """Another message took the lock of its send meanwhile: it waits, and is not dropped."""
    task = carried.make_task("tests.unique", UNIQUE)
    first = carried.send(1, task=task)
    leave_dead(carried, first)
    (held,) = iter_locks()
    assert release_lock(held)
    second = carried.send(2, task=task)
    begun = carried.rows.filter(task_id=first.id)
    begun.update(due_at=Now() - timedelta(seconds=1))
    assert carried.relay() == []
    (held,) = iter_locks()
    assert held.name in begun.get().error
    assert held.token not in begun.get().error
    carried.mailbox.deliver(second)
    begun.update(due_at=Now() - timedelta(seconds=1))
    assert carried.run_again() == ("SUCCESS", 1)


@pytest.mark.parametrize("until", ["start", 600])
def test_a_begun_task_does_not_wait_for_a_later_message(carried: Carried, until: Any) -> None:
    """Its own message is unique no more since it began, or since its period ended."""
    task = carried.make_task("tests.unique", single_instance(key=[], unique_until=until))
    first = carried.send(1, task=task)
    leave_dead(carried, first)
    for held in iter_locks():
        release_lock(held)
    carried.send(2, task=task, countdown=60)
    carried.rows.filter(task_id=first.id).update(due_at=Now() - timedelta(seconds=1))
    (again,) = carried.relay()
    assert (again.id, carried.mailbox.deliver(again)) == (first.id, ("SUCCESS", 1))
    # The later one is still unique.
    assert task.apply_async_on_commit((3,), using=carried.alias).is_duplicate


def refusing(carried: Carried, begin_of_sql: str) -> Any:
    """Let the database refuse the statements that begin so."""
    return at_statement(carried.alias, begin_of_sql, raising(DataError("refused")))


def test_a_claim_or_an_end_that_the_database_refuses(carried: Carried) -> None:
    """The message is sent again under its attempt; a task that ended is not recorded as failed."""
    message = carried.send(1)
    with refusing(carried, "UPDATE"):
        assert carried.mailbox.deliver(message).state == "RETRY"
    again = carried.mailbox.take_one()
    assert (again.id, again.ours["attempt"]) == (message.id, message.ours["attempt"])
    assert (carried.row.state, carried.calls) == ("sent", [])
    with refusing(carried, "DELETE"):
        state, error = carried.mailbox.deliver(again)
    assert (state, type(error.__cause__)) == ("IGNORED", DataError)
    assert carried.task.AsyncResult(message.id).state == "RETRY"
    assert (carried.row.state, carried.row.error) == ("running", "")
    carried.make_due()
    assert carried.run_again() == ("SUCCESS", 1)


def test_a_failure_that_can_not_be_recorded(
    carried: Carried, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so, with the error of the task, and a relay sends it again."""

    def fail(task: Any) -> None:
        refused.enter_context(refusing(carried, "UPDATE"))
        raise ValueError("no such order")

    carried.body = fail
    errback = carried.make_task("tests.errback")
    message = carried.send(link_error=errback.si("failed").set(using=carried.alias))
    with ExitStack() as refused:
        state, error = carried.mailbox.deliver(message)
    assert (state, type(error.__cause__)) == ("IGNORED", ValueError)
    assert carried.task.AsyncResult(message.id).state == "PENDING"
    assert carried.mailbox.take() == []
    assert "(ValueError: no such order) can't be recorded; a relay sends it again" in caplog.text
    assert carried.row.state == "running"


def test_a_call_and_the_setting_may_ask_for_it(carried: Carried, settings: Settings) -> None:
    """outbox="until_done" is understood wherever outbox=True is; anything else is an error."""
    task = carried.make_task("tests.plain", outbox=None)
    sends: list[Callable[[], Any]] = [
        lambda: task.apply_async_on_commit((1,), using=carried.alias, outbox="until_done"),
        lambda: send_on_commit(task.si(1), using=carried.alias, outbox="until_done"),
    ]
    for send in sends:
        send()
        assert carried.row.attempt
        carried.rows.all().erase()
    carried.mailbox.take()
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": "until_done"}
    carried.send(1, task=task)
    assert carried.row.attempt
    with pytest.raises(ConfigurationError, match="'forever' is not a valid use of the outbox"):
        carried.send(1, task=task, outbox="forever")
    with pytest.raises(ConfigurationError, match="max_deaths of tests"):
        carried.make_task("tests.wrong", max_deaths=0).name  # noqa: B018 - made at its use


def test_a_row_ends_after_the_lock_of_its_run(carried: Carried) -> None:
    """Another run can take the lock as soon as the row says that this run is done."""
    held: list[bool] = []

    def look(*args: Any, **event: Any) -> None:
        held.append(find_lock("tests.carried:7") is not None)

    with receiving(message_done, look):
        carried.run(look, single_instance={"key": "7"})
    assert held == [True, False]


def test_a_duplicate_leaves_no_row(carried: Carried) -> None:
    """Whether the sender or a relay finds out: it would be run once the first is done."""
    task = carried.make_task("tests.unique", UNIQUE)
    first = carried.send(1, task=task)
    second = task.apply_async_on_commit((2,), using=carried.alias)
    assert (second.id, second.is_duplicate) == (first.id, True)
    with dying_sender(carried.alias, due=True):
        task.apply_async_on_commit((3,), using=carried.alias)
    assert carried.relay() == []
    assert carried.row.task_id == first.id


@pytest.mark.parametrize("until", ["end", 600])
def test_what_is_discarded_may_be_sent_again_at_once(carried: Carried, until: Any) -> None:
    """Although its message is still on its way; but a period lasts."""
    task = carried.make_task("tests.unique", single_instance(key=[], unique_until=until))
    carried.send(1, task=task)
    assert carried.rows.discard() == 1
    again = task.apply_async_on_commit((2,), using=carried.alias)
    assert again.is_duplicate is (until == 600)


def test_what_expired_is_not_sent_again(carried: Carried) -> None:
    """It fails, since a broker that drops what expired would let no worker say so."""
    carried.send(1, expires=datetime.now(UTC) + timedelta(hours=1))
    carried.make_due()
    assert len(carried.relay()) == 1
    carried.send(2, expires=datetime.now(UTC) - timedelta(seconds=1))
    carried.make_due()
    with hearing(message_failed) as heard:
        assert [message.args for message in carried.relay()] == [[1]]
    (failed,) = carried.rows.failed()
    assert failed.error == "The task expired before it was begun."
    assert [event["task_id"] for event in heard] == [failed.task_id]
    assert carried.relay() == []


def test_a_result_that_can_not_be_stored_fails_the_row(carried: Carried) -> None:
    """As it fails the task, which is not retried for it; a result that is ignored harms nothing."""
    for options in ({}, {"autoretry_for": (Exception,), "max_retries": 3}):
        task = carried.make_task(f"tests.other{len(options)}", **options)
        assert carried.run(lambda task: object(), task=task).state == "FAILURE"
        assert (carried.row.state, carried.row.error_type) == ("failed", "EncodeError")
        assert carried.mailbox.take() == []
        carried.rows.all().delete()
    assert carried.mailbox.deliver(carried.send(ignore_result=True)).state == "SUCCESS"
    assert (len(carried.calls), carried.rows.count()) == (3, 0)


@pytest.mark.sql
def test_a_message_whose_database_is_away_comes_back(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same message, a moment later."""
    message = carried.send(1)
    connections[carried.alias].close()
    with monkeypatch.context() as patch:
        patch.setitem(connections[carried.alias].settings_dict, "PORT", str(dead_port()))
        patch.setitem(connections[carried.alias].settings_dict, "NAME", "/nowhere/at all")
        assert carried.mailbox.deliver(message).state == "RETRY"
    connections[carried.alias].close()
    again = carried.mailbox.take_one()
    assert (again.id, again.ours) == (message.id, message.ours)
    assert carried.mailbox.deliver(again) == ("SUCCESS", 1)
    assert carried.mailbox.deliver(message).state == "IGNORED"
    assert (carried.calls, carried.rows.count()) == ([1], 0)


def test_what_replaces_a_task_is_carried(carried: Carried) -> None:
    """Each part has a row, and none is left in the end."""
    first, second, last = (
        carried.make_task(f"tests.{name}").si(name).set(using=carried.alias) for name in "abc"
    )

    def replace(task: Any, number: Any) -> Any:
        return task.replace(chord([first, second], last)) if number == 1 else number

    assert carried.run(replace, 1).state == "IGNORED"
    waiting = carried.mailbox.take()
    assert len(waiting) == 2
    assert {row.task_id for row in carried.rows.all()} == {one.id for one in waiting}
    while waiting:
        assert carried.mailbox.deliver(waiting.pop()).state == "SUCCESS"
        waiting += carried.mailbox.take()
    assert (carried.calls[-1], carried.rows.count()) == ("c", 0)


@pytest.mark.parametrize("carried", ["postgres"], indirect=True)
@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE"])
def test_a_connection_that_ended_during_the_task(carried: Carried, state: str) -> None:
    """Its end is recorded by a new one."""

    def lose_connection(task: Any) -> None:
        connections[carried.alias].connection.close()
        if state == "FAILURE":
            raise ValueError("no such order")

    assert carried.run(lose_connection).state == state
    assert [row.state for row in carried.rows.all()] == (["failed"] if state == "FAILURE" else [])


def lose(carried: Carried, message: Message) -> None:
    """Report to the worker's main process that the process of a run was killed."""
    request = carried.mailbox.receive(message)
    task_received.send(sender=None, request=request)
    request.worker_pid = NO_PROCESS
    end_child(request, WorkerLostError("signal 9"))
    settle()


@pytest.mark.parametrize(
    ("host", "pid", "is_due"),
    [(HOST, NO_PROCESS, True), (HOST, 1, False), ("elsewhere", NO_PROCESS, False)],
    ids=["its own", "another process's", "another host's"],
)
def test_the_task_of_a_killed_process_is_due_at_once(
    host: str, pid: int, is_due: bool, carried: Carried
) -> None:
    """
    The worker that lost it makes it due, unless another process has claimed it meanwhile.

    It comes again, so the same is still a duplicate.
    """
    task = carried.make_task("tests.killed", UNIQUE)
    message = carried.send(task=task)
    leave_dead(carried, message)
    holder = encode_holder(message.id, Holder(host=host, pid=pid))
    carried.rows.update(holder=holder, due_at=Now() + timedelta(seconds=30))
    lose(carried, message)
    assert len(carried.relay()) == is_due
    assert carried.row.deaths == is_due
    assert find_lock(f"sent:{task.lock_name()}") is not None


def test_a_death_after_the_end_of_the_task(
    carried: Carried, caplog: pytest.LogCaptureFixture
) -> None:
    """If the process had not stored a result a failure is stored, where results are stored."""
    message = carried.send()
    carried.mailbox.deliver(message)
    assert not carried.rows.exists()
    result = carried.task.AsyncResult(message.id)
    result.forget()
    lose(carried, message)
    assert result.state == "FAILURE"
    carried.task.backend = DisabledBackend(app=carried.mailbox.app)
    lose(carried, message)
    assert [record.message for record in caplog.records if record.exc_info] == []
