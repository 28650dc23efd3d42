"""Messages that ``testing`` runs: deliver_twice, drain_outbox."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from django.db import transaction

from django_celery_safe import WrongTransaction, find_lock, send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.testing import (
    assert_sent_on_commit,
    deliver_twice,
    drain_outbox,
    hold_lock,
    lock_name,
    on_commit_now,
)
from tests.app.models import Person
from tests.testing.tasks import (
    charge,
    charge_once,
    count_down,
    effects,
    fail,
    go_on_for_ever,
    greet,
    ignore,
    import_feed,
    look_around,
    pass_on,
    reject,
    stumble,
    visit,
    welcome,
)


@pytest.fixture(autouse=True)
def no_rows_left(db: None, unreachable: Celery) -> Iterator[None]:
    """The tested task leaves nothing in the outbox, and runs nothing eagerly."""
    unreachable.conf.task_always_eager = True
    yield
    assert unreachable.conf.task_always_eager
    assert OutboxMessage.objects.count() == 0


# deliver_twice


def test_it_shows_what_is_done_twice_and_what_once() -> None:
    """An unguarded task does its work twice; an idempotent one has one result; so has do_once."""
    first, second = deliver_twice(charge, 42)
    assert effects == [42, 42]
    assert (first.state, first.result, second.result) == ("SUCCESS", "receipt 1", "receipt 2")
    effects.clear()
    first, second = deliver_twice(charge_once, order=42)
    assert (first.result, second.result) == ("receipt 1", "receipt 1")
    person = Person.everyone.create()
    assert [one.error for one in deliver_twice(welcome, person.pk)] == [None, None]
    assert effects == [42, person.pk]


def test_it_is_one_message_and_a_real_run() -> None:
    """Both have one id; the second is redelivered, and does not see the first's changes."""
    first, second = deliver_twice(look_around, ["a"])
    assert first.task_id == second.task_id
    assert effects == [(first.task_id, False, ["a"]), (first.task_id, True, ["a"])]
    assert first.result == {"eager": False, "direct": False}


def test_a_lock_that_is_held_is_met_by_both(locks_in_memory: None) -> None:
    """Guards work as they do in a worker: a run that meets the lock of another is skipped."""
    with hold_lock(import_feed, "here"):
        assert [one.result for one in deliver_twice(import_feed, "here")] == [None, None]
    assert [one.result for one in deliver_twice(import_feed, "here")] == ["imported"] * 2


def test_a_retry_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A retried task is not run again; its new message is in ``sent``."""
    first, second = deliver_twice(stumble)
    assert (first.state, second.state, effects) == ("RETRY", "RETRY", [0, 0])
    assert isinstance(first.error, Retry)
    (again,) = first.sent
    assert (again.task, again.task_id, again.headers["retries"]) == (
        stumble.name,
        first.task_id,
        1,
    )
    assert again.headers["eta"] is not None


@pytest.mark.parametrize(
    ("task", "state", "error"),
    [(fail, "FAILURE", ValueError), (ignore, "IGNORED", Ignore), (reject, "REJECTED", Reject)],
)
def test_other_ends(task: Any, state: str, error: type[Exception]) -> None:
    """Each end has Celery's state and the exception, which leaves the call alone."""
    for delivery in deliver_twice(task):
        assert (delivery.state, delivery.result, delivery.sent) == (state, None, [])
        assert isinstance(delivery.error, error)


def test_what_a_run_sends_is_told() -> None:
    """A run's sends are in ``sent``, in order; a block around sees what it sends on commit."""
    with assert_sent_on_commit(count_down, 0, times=2):
        first, _ = deliver_twice(count_down, 1)
    sent = [(one.task.rpartition(".")[2], one.args) for one in first.sent]
    assert sent == [("count_down", [0]), ("greet", [1])]
    with assert_sent_on_commit(greet, "kim", times=2):
        deliver_twice(pass_on, "kim")


def test_the_message_has_its_lock(locks_in_memory: None) -> None:
    """With unique_until the message holds its lock when it runs, and leaves none behind."""
    first, second = deliver_twice(visit, "here")
    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")
    with (
        hold_lock("sent:" + lock_name(visit, "here"), task_id="other"),
        pytest.raises(AssertionError, match="is a duplicate until"),
    ):
        deliver_twice(visit, "here")
    assert find_lock("sent:" + lock_name(visit, "here")) is None


def test_a_send_in_the_transaction_of_the_test_is_refused() -> None:
    """A worker runs no task inside of a transaction, and nothing here does."""
    for run in (lambda: deliver_twice(charge, 1), drain_outbox):
        with pytest.raises(WrongTransaction, match="call it after the block"), transaction.atomic():
            run()
    assert effects == []


# drain_outbox


def keep(*signatures: Any) -> None:
    """Put messages into the outbox."""
    with transaction.atomic():
        for one in signatures:
            send_on_commit(one, outbox=True)


@pytest.fixture
def by_messages(transactional_db: None, unreachable: Celery) -> Iterator[None]:
    """Let sends make messages and commit, as in production, and keep those of the outbox."""
    unreachable.conf.task_always_eager = False
    with on_commit_now():
        yield


@pytest.fixture
def then_eager(unreachable: Celery) -> Iterator[None]:
    """Go back to eager tasks at the end."""
    yield
    unreachable.conf.task_always_eager = True


pytestmark = pytest.mark.usefixtures("then_eager")


def test_the_outbox_is_run_in_order(by_messages: None) -> None:
    """In the order of creation, countdown or not; an expired one is dropped, as a worker does."""
    late = datetime.now(UTC) - timedelta(seconds=1)
    first, expired = greet.s("first").set(countdown=600), greet.s("late").set(expires=late)
    keep(first, charge.s(2), expired, greet.s("third"))
    done = drain_outbox()
    assert effects == [["first", "hello"], 2, ["third", "hello"]]
    assert [one.result for one in done] == [None, "receipt 2", None, None]
    assert [one.state for one in done] == ["SUCCESS", "SUCCESS", "REVOKED", "SUCCESS"]
    assert drain_outbox() == []


def test_what_follows_through_the_outbox_is_run(
    by_messages: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that tasks put into the outbox run too, also after one that fails; others don't."""
    with caplog.at_level(logging.CRITICAL):
        keep(fail.s(), stumble.s(), count_down.s(2))
        done = drain_outbox()
    assert effects == [0, 2, 1, 0]
    assert [one.state for one in done] == ["FAILURE", "RETRY", *["SUCCESS"] * 3]
    assert [[one.args for one in delivery.sent] for delivery in done[2:]] == [[[2]], [[1]], [[0]]]


def test_without_end(by_messages: None) -> None:
    """Tasks that send themselves again and again are stopped, and named."""
    keep(go_on_for_ever.s())
    said = r"not empty after 5 messages; the next is tests\.testing\.tasks\.go_on_for_ever\(\)"
    with pytest.raises(AssertionError, match=said):
        drain_outbox(limit=5)
    OutboxMessage.objects.all().delete()


def test_duplicates_are_dropped(by_messages: None, locks_in_memory: None) -> None:
    """Two rows of one task with unique_until run one by one; a third meets the other's lock."""
    keep(visit.s("here"), visit.s("here"))
    with hold_lock("sent:" + lock_name(visit, "there"), task_id="other"):
        keep(visit.s("there"))
        assert len(drain_outbox()) == 2
    assert effects == ["here", "here"]


def test_of_another_database(db_alias: str, by_messages: None) -> None:
    """With ``using`` the outbox of that database is run."""
    with transaction.atomic(using=db_alias):
        charge.apply_async_on_commit((7,), using=db_alias, outbox=True)
    assert [one.state for one in drain_outbox(db_alias)] == ["SUCCESS"]
    assert OutboxMessage.objects.using(db_alias).count() == 0
