"""Carried messages whose eta is further away than OUTBOX_RESEND_AFTER wait in their rows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_celery_safe import iter_locks, release_lock, single_instance
from django_celery_safe.databases import Now
from django_celery_safe.inspection.overview import outbox_figures
from django_celery_safe.signals import task_sent
from tests.sending.carrying import Carried
from tests.sending.conftest import hearing

#: Seconds; OUTBOX_RESEND_AFTER is 600.
FAR, NEAR = 1000.0, 500.0


def send(carried: Carried, task: Any = None, **options: Any) -> Any:
    """Send the task; return its result."""
    return (task or carried.task).apply_async_on_commit((1,), using=carried.alias, **options)


def let_it_be_due(carried: Carried) -> None:
    """Let the time of the only row come, as its message has it."""
    properties, then = carried.row.properties, datetime.now(UTC) - timedelta(seconds=1)
    eta = properties.split('"eta": "')[1].split('"')[0]
    carried.rows.update(properties=properties.replace(eta, then.isoformat()))
    carried.make_due()


@pytest.mark.sql
@pytest.mark.parametrize("when", ["countdown", "eta"])
def test_a_message_stays_in_its_row_until_it_is_due(carried: Carried, when: str) -> None:
    """The broker does not have it before; then a relay sends it at its first look."""
    times = {"countdown": FAR, "eta": datetime.now(UTC) + timedelta(seconds=FAR)}
    with hearing(task_sent) as heard:
        result = send(carried, **{when: times[when]})
    assert (carried.mailbox.take(), carried.relay(), heard) == ([], [], [])
    assert result.send_error is None
    row = carried.rows.listed().get()
    assert (row.state, row.token, row.task_id) == ("pending", "", result.id)
    assert FAR - 20 < row.due_in_s <= FAR + 1
    assert "due in" in row.reason
    let_it_be_due(carried)
    with hearing(task_sent) as heard:
        (message,) = carried.relay()
    assert [one["relayed"] for one in heard] == [True]
    assert carried.row.state == "sent"
    assert carried.mailbox.deliver(message) == ("SUCCESS", 1)
    assert not carried.rows.exists()


def test_a_near_eta_is_the_brokers(carried: Carried) -> None:
    """It is sent at once, as it was, and so is a message whose row ends with that."""
    send(carried, countdown=NEAR)
    send(carried, countdown=FAR, outbox=True)
    assert len(carried.mailbox.take()) == 2
    assert carried.row.state == "sent"


@pytest.mark.sql
def test_a_far_retry_waits_too(carried: Carried) -> None:
    """In the row of its task, with its cursor and its error's text."""
    assert carried.run(lambda task, number: task.retry(countdown=FAR), 1).state == "RETRY"
    assert (carried.mailbox.take(), carried.relay()) == ([], [])
    assert (carried.row.state, carried.row.token) == ("pending", "")
    assert FAR - 20 < carried.waits <= FAR + 1
    let_it_be_due(carried)
    (again,) = carried.relay()
    assert again.headers["retries"] == 1
    carried.body = lambda task, number: number
    assert carried.mailbox.deliver(again) == ("SUCCESS", 1)


@pytest.mark.sql
def test_a_sender_that_dies_sends_nothing_early(carried: Carried) -> None:
    """A relay that gets its row lets it wait."""
    send(carried, countdown=FAR)
    carried.rows.update(due_at=Now() - timedelta(seconds=1), token="of a dead sender")
    assert carried.relay() == []
    assert FAR - 20 < carried.waits <= FAR + 1


def test_it_expires_as_before(carried: Carried) -> None:
    """A task whose time to expire was over before its eta fails."""
    send(carried, countdown=FAR, expires=datetime.now(UTC) - timedelta(seconds=1))
    let_it_be_due(carried)
    assert carried.relay() == []
    assert carried.row.state == "failed"
    assert carried.row.error == "The task expired before it was begun."


@pytest.mark.parametrize("change", ["discard", "revive"])
def test_an_operator_may_decide_about_it(carried: Carried, change: str) -> None:
    """It can be discarded; there is nothing to retry."""
    send(carried, countdown=FAR)
    assert getattr(carried.rows, change)() == (change == "discard")
    assert carried.rows.count() == (change == "revive")


def test_it_is_a_duplicate_while_it_waits(carried: Carried) -> None:
    """A unique task that waits in its row keeps others from being sent, as one in the broker."""
    task = carried.make_task("tests.unique", single_instance(key=[], unique_until="start"))
    first = send(carried, task, countdown=FAR)
    second = send(carried, task)
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert carried.row.task_id == first.id
    let_it_be_due(carried)
    assert carried.run_again() == ("SUCCESS", 1)


@pytest.mark.sql
def test_monitoring_counts_from_its_eta(carried: Carried) -> None:
    """A message that waits for its eta is no trouble, nor is one that was due just now."""
    send(carried, countdown=FAR)
    carried.rows.update(created_at=Now() - timedelta(days=7))
    assert outbox_figures(carried.alias).oldest_s is None
    just_now = Now() - timedelta(seconds=1)
    carried.rows.update(due_at=just_now, sent_at=just_now)
    assert 1 <= outbox_figures(carried.alias).oldest_s < 60


def test_a_far_message_of_a_period_runs_whoever_has_the_period_then(carried: Carried) -> None:
    """It was accepted when it was sent, as a near one, and is no duplicate when its time comes."""
    task = carried.make_task("tests.in_period", single_instance(key=[], unique_until=600))
    assert send(carried, task, countdown=FAR).is_duplicate is False
    for lock in iter_locks():
        assert release_lock(lock)  # as the end of the period does
    assert send(carried, task).is_duplicate is False
    assert carried.mailbox.deliver(carried.mailbox.take_one()) == ("SUCCESS", 1)
    let_it_be_due(carried)
    assert carried.run_again() == ("SUCCESS", 1)
