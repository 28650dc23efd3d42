"""Messages that ``testing`` runs: deliver_twice, drain_outbox."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chord
from celery.exceptions import Ignore, Reject, Retry
from django.db import transaction
from django.test import TestCase

from django_celery_safe import WrongTransaction, find_lock, send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.stages import Status
from django_celery_safe.testing import (
    deliver_killed,
    deliver_twice,
    drain_outbox,
    hold_lock,
    run_stages,
)
from tests.app.models import Person
from tests.sending.published import take_published
from tests.servers import RedisServer
from tests.stages.tasks import add as step
from tests.testing import tasks
from tests.testing.tasks import effects

#: The kinds of tests: a transaction that is rolled back, and real commits.
KINDS = [
    pytest.param(commits, marks=pytest.mark.django_db(transaction=commits), id=name)
    for name, commits in {"TestCase": False, "TransactionTestCase": True}.items()
]


@pytest.fixture(autouse=True, params=KINDS)
def no_rows_left(unreachable: Celery) -> Iterator[None]:
    """In a transaction that is rolled back, and with commits: no row stays, and eager mode does."""
    unreachable.conf.task_always_eager = True
    yield
    assert unreachable.conf.task_always_eager
    assert OutboxMessage.objects.count() == 0


def keep(*signatures: Any) -> None:
    """Put messages into the outbox."""
    with transaction.atomic():
        for one in signatures:
            send_on_commit(one, outbox=True)


# deliver_killed


def test_it_goes_on_behind_the_checkpoint_before() -> None:
    """What was committed is not done again, and what was not is."""
    keys = [Person.everyone.create().pk for _ in range(5)]
    effects.clear()
    second = deliver_killed(tasks.print_badges, 2)
    assert (second.state, second.error) == ("SUCCESS", None)
    assert effects == [*keys[:4], *keys[2:]]
    assert Person.everyone.filter(is_badge_printed=True).count() == 5


def test_a_task_that_ends_before_the_checkpoint_is_an_error() -> None:
    """It has fewer of them, or none."""
    with pytest.raises(AssertionError, match="before its checkpoint 1"):
        deliver_killed(tasks.pay, 1, 7)


# deliver_twice


def test_it_shows_what_is_done_twice_and_what_once() -> None:
    """An unguarded task does its work twice; idempotent, do_once and a row of the outbox, once."""
    first, second = deliver_twice(tasks.charge, 42)
    assert effects == [42, 42]
    assert (first.state, first.result, second.result) == ("SUCCESS", "receipt 1", "receipt 2")
    effects.clear()
    first, second = deliver_twice(tasks.charge_once, order=42)
    assert (first.result, second.result) == ("receipt 1", "receipt 1")
    person = Person.everyone.create()
    assert [one.error for one in deliver_twice(tasks.welcome, person.pk)] == [None, None]
    assert [one.state for one in deliver_twice(tasks.pay, 7)] == ["SUCCESS", "IGNORED"]
    assert effects == [42, person.pk, 7]


def test_it_is_one_message_and_a_real_run() -> None:
    """Both have one id; the second is redelivered, and does not see the first's changes."""
    first, second = deliver_twice(tasks.look_around, ["a"])
    assert first.task_id == second.task_id
    assert effects == [(first.task_id, False, ["a"]), (first.task_id, True, ["a"])]
    assert first.result == {"eager": False, "direct": False}


def test_a_lock_that_is_held_is_met_by_both(locks_in_memory: None) -> None:
    """Guards work as they do in a worker: a run that meets the lock of another is skipped."""
    with hold_lock(tasks.import_feed, "here"):
        assert [one.result for one in deliver_twice(tasks.import_feed, "here")] == [None, None]
    assert [one.result for one in deliver_twice(tasks.import_feed, "here")] == ["imported here"] * 2


def test_a_retry_is_a_message_that_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    """A retried task is not run again; its new message is in ``sent``."""
    first, second = deliver_twice(tasks.stumble)
    assert (first.state, second.state, effects) == ("RETRY", "RETRY", [0, 0])
    assert isinstance(first.error, Retry)
    (again,) = first.sent
    assert (again.task, again.task_id) == (tasks.stumble.name, first.task_id)
    assert again.headers["retries"] == 1
    assert again.headers["eta"] is not None


@pytest.mark.parametrize(
    ("task", "state", "error"),
    [
        (tasks.fail, "FAILURE", ValueError),
        (tasks.ignore, "IGNORED", Ignore),
        (tasks.reject, "REJECTED", Reject),
    ],
)
def test_other_ends(task: Any, state: str, error: type[Exception]) -> None:
    """Each end has Celery's state and the exception, which leaves the call alone."""
    for delivery in deliver_twice(task):
        assert (delivery.state, delivery.result, delivery.sent) == (state, None, [])
        assert isinstance(delivery.error, error)


def test_what_a_run_sends_is_kept() -> None:
    """Sends on commit are in ``sent``, in order; each callback runs once, and no other one."""
    ran: list[str] = []
    with TestCase.captureOnCommitCallbacks(execute=True):
        if transaction.get_connection().in_atomic_block:
            transaction.on_commit(lambda: ran.append("before"))
        first, _ = deliver_twice(tasks.count_down, 1)
        assert ran == []
    assert [str(one).rpartition(".")[2] for one in first.sent] == ["count_down(0)", "greet(1)"]
    assert effects == [1, 1]


def test_the_message_has_its_lock(locks_in_memory: None) -> None:
    """With unique_until the message holds its lock when it runs, and leaves none behind."""
    assert [one.state for one in deliver_twice(tasks.visit, "here")] == ["SUCCESS", "SUCCESS"]
    with drain_outbox():
        tasks.visit.delay("here")
        with pytest.raises(AssertionError, match="is a duplicate until"):
            deliver_twice(tasks.visit, "here")
    assert find_lock("sent:" + tasks.visit.lock_name("here")) is None


def test_a_transaction_of_the_test_is_refused() -> None:
    """A worker runs no task inside of a transaction, and nothing here does."""
    for run in (lambda: deliver_twice(tasks.charge, 1), drain_outbox().__enter__):
        with pytest.raises(WrongTransaction, match="call it after the block"), transaction.atomic():
            run()
    with pytest.raises(TypeError, match="which is not a task"):
        deliver_twice(tasks.charge.s(1))
    assert effects == []


# drain_outbox


def test_the_outbox_is_run_in_order() -> None:
    """In the order of creation, countdown or not; an expired one is dropped, as a worker does."""
    late = datetime.now(UTC) - timedelta(seconds=1)
    with drain_outbox() as done:
        expired = tasks.greet.s("late").set(expires=late)
        keep(
            tasks.greet.s("first").set(countdown=600),
            tasks.charge.s(2),
            expired,
            chord([tasks.greet.s("third"), tasks.greet.s("last")], tasks.greet.si("body")),
        )
        tasks.greet.delay("not by the outbox")
        assert effects == []
    assert effects == ["first", 2, "third", "last"]
    assert [one.result for one in done] == [None, "receipt 2", None, None, None]
    assert [one.state for one in done] == ["SUCCESS", "SUCCESS", "REVOKED", "SUCCESS", "SUCCESS"]


def test_what_follows_through_the_outbox_is_run(caplog: pytest.LogCaptureFixture) -> None:
    """Messages that tasks put into the outbox run too, also after one that fails; others don't."""
    with caplog.at_level(logging.CRITICAL), drain_outbox() as done:
        keep(tasks.fail.s(), tasks.stumble.s())
        with transaction.atomic():
            transaction.on_commit(lambda: keep(tasks.count_down.s(2)))
    assert effects == [0, 2, 1, 0]
    assert [one.state for one in done] == ["FAILURE", "RETRY", *["SUCCESS"] * 3]
    assert [[one.args for one in delivery.sent] for delivery in done[2:]] == [[[2]], [[1]], [[0]]]


def test_without_end() -> None:
    """Tasks that send themselves again and again are stopped, and named."""
    said = r"not empty after 5 messages; the next is tests\.testing\.tasks\.go_on_for_ever\(\)"
    with pytest.raises(AssertionError, match=said), drain_outbox(limit=5):
        keep(tasks.go_on_for_ever.s())
    OutboxMessage.objects.all().delete()


def test_duplicates_are_dropped(locks_in_memory: None) -> None:
    """A message that waits elsewhere makes its equal a duplicate; one that has run does not."""
    with drain_outbox() as done:
        tasks.visit.delay("there")
        keep(tasks.visit.s("here"), tasks.visit.s("there"), tasks.visit.s("here"))
    assert effects == ["here", "here"]
    assert len(done) == 2


@pytest.mark.parametrize("outbox", [True, "until_done"])
def test_a_broker_that_answers_gets_nothing(
    outbox: Any, broker: Celery, redis_server: RedisServer
) -> None:
    """Messages of the outbox are run here, whatever the broker."""
    with drain_outbox() as done:
        with transaction.atomic():
            tasks.charge.apply_async_on_commit((1,), outbox=outbox)
        tasks.charge.apply_async((2,), outbox=outbox)
    assert run_stages([(step, 1)]).status == Status.SUCCEEDED
    assert [one.result for one in done] == ["receipt 1", "receipt 2"]
    assert take_published(redis_server) == []


def test_of_another_database(db_alias: str) -> None:
    """With ``using`` the outbox of that database is run."""
    with drain_outbox(db_alias) as done, transaction.atomic(using=db_alias):
        tasks.charge.apply_async_on_commit((7,), using=db_alias, outbox=True)
    assert [one.state for one in done] == ["SUCCESS"]
    assert OutboxMessage.objects.using(db_alias).count() == 0
