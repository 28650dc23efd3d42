"""The parts of ``testing`` for commits: on_commit_now, assert_sent_on_commit."""

import re
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import ANY

import pytest
from asgiref.sync import sync_to_async
from celery import Celery
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TestCase

from django_celery_safe import find_lock, send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.stages import Status
from django_celery_safe.testing import (
    assert_sent_on_commit,
    deliver_twice,
    drain_outbox,
    lock_name,
    on_commit_now,
    run_stages,
    waiting_for_commit,
)
from tests.app.models import Person
from tests.app.tasks import add
from tests.sending.published import take_published
from tests.servers import RedisServer
from tests.stages.tasks import add as step
from tests.testing.tasks import charge, effects, greet, visit


def test_on_commit_sends_at_the_end_of_the_block(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """A send goes out at the end of the outermost atomic of the tested code, or at once."""
    with transaction.atomic():
        with transaction.atomic():
            add.delay_on_commit(1, 2)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            add.delay_on_commit(3, 4)
            raise ZeroDivisionError
        assert take_published(redis_server) == []
    assert len(take_published(redis_server)) == 1
    add.delay_on_commit(1, 2)
    assert len(take_published(redis_server)) == 1


@pytest.mark.django_db
def test_what_waited_before_goes_on_waiting() -> None:
    """A block runs what is registered in it, and leaves alone what was before it."""
    ran: list[str] = []
    transaction.on_commit(lambda: ran.append("before"))
    with on_commit_now(), on_commit_now(), transaction.atomic():
        transaction.on_commit(lambda: ran.append("inside"))
    assert (ran, waiting_for_commit()) == (["inside"], 1)
    with TestCase.captureOnCommitCallbacks(execute=True):
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["inside", "after"]


# Sends on commit.


def on_commit() -> None:
    """Send as the package does it."""
    with transaction.atomic():
        greet.delay_on_commit("kim")


def as_django_does() -> None:
    """Send by Django's own callback."""
    with transaction.atomic():
        transaction.on_commit(lambda: greet.delay("kim"))


def as_a_signature() -> None:
    """Send what others made."""
    with transaction.atomic(durable=True):
        send_on_commit(greet.s("kim"), outbox=True)


@pytest.mark.parametrize(
    ("send", "eager"),
    [
        (on_commit, False),
        (lambda: greet.delay_on_commit("kim"), True),
        (as_django_does, False),
        (as_a_signature, True),
    ],
)
def test_it_is_sent_on_commit(
    send: Callable[[], None], eager: bool, db: None, unreachable: Celery
) -> None:
    """Every way of sending on commit is one; nothing is run, and no broker is asked."""
    unreachable.conf.task_always_eager = eager
    with assert_sent_on_commit(greet, "kim") as sent:
        send()
    (one,) = sent
    assert (one.task, one.args, one.on_commit, str(one)) == (
        greet.name,
        ["kim"],
        True,
        f"{greet.name}('kim')",
    )
    assert (effects, OutboxMessage.objects.count()) == ([], 0)
    assert unreachable.conf.task_always_eager is eager


def too_early() -> None:
    """Send before the commit."""
    with transaction.atomic():
        greet.delay("kim")


def rolled_back() -> None:
    """Send what is never committed."""
    with transaction.atomic(), pytest.raises(ZeroDivisionError), transaction.atomic():
        greet.delay_on_commit("kim")
        raise ZeroDivisionError


def another_argument() -> None:
    """Send to somebody else."""
    with transaction.atomic():
        greet.delay_on_commit("sam", times=2)


def twice() -> None:
    """Send it once more."""
    on_commit()
    on_commit()


def once_early() -> None:
    """Send it as it should be, and another one before."""
    with transaction.atomic():
        greet.delay("kim")
        greet.delay_on_commit("kim")


NAME = re.escape(greet.name)
WRONG = {
    too_early: (
        rf"^{NAME}\('kim'\) was sent on commit 0 times, instead of 1 time\.\n"
        rf"It was sent 1 time without waiting for a commit: write greet\.delay_on_commit.*\n"
        rf"All that was sent:\n  {NAME}\('kim'\), not on commit$"
    ),
    rolled_back: r"0 times.*\nCallbacks that a rollback dropped: 1\.\nNothing was sent\.$",
    another_argument: rf"0 times.*\nAll that was sent:\n  {NAME}\('sam', times=2\), on commit$",
    twice: r"was sent on commit 2 times, instead of 1 time\.\nAll",
    once_early: r"was sent on commit 1 time, instead of 1 time\.\nIt was sent 1 time without",
}


@pytest.mark.parametrize(("send", "said"), WRONG.items())
def test_what_is_wrong_fails(
    send: Callable[[], None], said: str, db: None, unreachable: Celery
) -> None:
    """The error says what is wrong, and lists the messages that were sent."""
    unreachable.conf.task_always_eager = True
    with pytest.raises(AssertionError, match=said), assert_sent_on_commit(greet, "kim"):
        send()
    assert effects == []


def test_a_transaction_around_the_block_is_told(db: None, unreachable: Celery) -> None:
    """A block in the test's own atomic() sees no commit, and says so."""
    said = r"still wait for a commit: 1\. The block stands inside atomic\(\)"
    with transaction.atomic():
        with pytest.raises(AssertionError, match=said), assert_sent_on_commit(greet, "kim"):
            on_commit()
        transaction.set_rollback(True)


def test_arguments_are_as_they_arrive(db: None, unreachable: Celery) -> None:
    """Tuples are lists, defaults are filled in, names or places are the same; ANY fits all."""
    sent: Any
    for sent, expected in (((1, 2), [1, 2]), ("kim", ANY), ({"a": (1, 2)}, {"a": [1, 2]})):
        with assert_sent_on_commit(greet, expected):
            greet.delay_on_commit(sent)
    with assert_sent_on_commit(greet, "kim", "hi"), assert_sent_on_commit(greet, "kim", "hi", 1):
        greet.delay_on_commit(greeting="hi", name="kim", times=1)


def test_not_at_all(db: None, unreachable: Celery) -> None:
    """Without arguments, what must not be sent must not be sent with any, nor at once."""
    says = "tests.testing.tasks.greet was sent 1 time, and is not to be sent at all."
    with pytest.raises(AssertionError, match=says), assert_sent_on_commit(greet, times=0):
        greet.delay_on_commit("kim")
    with assert_sent_on_commit(greet, times=0):
        add.delay_on_commit(1, 2)
    with pytest.raises(AssertionError), assert_sent_on_commit(greet, "kim", times=0):
        greet.delay("kim")


def test_what_never_fits(db: None, unreachable: Celery) -> None:
    """A test that would pass, or fail, whatever the code does, is told so."""
    with (
        pytest.raises(TypeError, match=r"greet\(nobody='kim'\) can't be sent, so it never will"),
        assert_sent_on_commit(greet, nobody="kim", times=0),
    ):
        on_commit()
    tasks: list[Any] = ["tests.testing.tasks.greet", greet.s("kim")]
    for task in tasks:
        for ask in (assert_sent_on_commit, deliver_twice, lock_name):
            with (
                pytest.raises(TypeError, match="which is not a task"),
                cast(Any, ask(task, "kim")),
            ):
                pass


def test_an_error_of_the_block_is_its_own(db: None, unreachable: Celery) -> None:
    """An exception leaves the block as it is, and nothing stays changed."""
    before = BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__
    unreachable.conf.task_always_eager = True
    with pytest.raises(ZeroDivisionError), assert_sent_on_commit(greet, "kim"):
        raise ZeroDivisionError
    assert (BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__) == before
    greet.apply_async(("here",))
    assert effects == [["here", "hello"]]


def test_what_was_not_published_holds_no_lock(
    locks_in_memory: None, db: None, unreachable: Celery
) -> None:
    """The second of two equal sends is a duplicate inside the block; after it the lock is free."""
    with assert_sent_on_commit(visit, "here"):
        visit.delay_on_commit("here")
        visit.delay_on_commit("here")
    assert find_lock("sent:" + lock_name(visit, "here")) is None
    with assert_sent_on_commit(visit, "here"):
        visit.delay_on_commit("here")


# In async tests, whose database is used from another thread.


@sync_to_async
def view(name: str) -> None:
    """Write, and send at the commit."""
    with transaction.atomic():
        Person.everyone.create()
        greet.delay_on_commit(name)


@pytest.mark.usefixtures("unreachable")
class InTestCase(TestCase):
    """The test is a coroutine, and what it tests runs in a thread."""

    async def test_an_async_view_sends_on_commit(self) -> None:
        """The block stands in the coroutine, and the view's transaction in a thread."""
        with assert_sent_on_commit(greet, "ann") as sent:
            await view("ann")
        assert [one.on_commit for one in sent] == [True]

    async def test_a_send_in_the_coroutine_itself(self) -> None:
        """Without a transaction it is sent on commit all the same."""
        with assert_sent_on_commit(greet, "ann"):
            greet.delay_on_commit("ann")


# Messages of the outbox, which a test runs itself.


@pytest.mark.django_db
@pytest.mark.parametrize("outbox", [True, "until_done"])
def test_a_broker_that_answers_gets_nothing(
    outbox: Any, broker: Celery, redis_server: RedisServer
) -> None:
    """Messages of the outbox stay there until they are run, whatever the broker."""
    with on_commit_now():
        with transaction.atomic():
            charge.apply_async_on_commit((1,), outbox=outbox)
        charge.apply_async((2,), outbox=outbox)
        assert run_stages([(step, 1)]).status == Status.SUCCEEDED
        assert [one.state for one in drain_outbox()] == ["SUCCESS", "SUCCESS"]
    assert effects == [1, 2]
    assert take_published(redis_server) == []


@pytest.mark.django_db(transaction=True)
def test_it_says_what_to_do_where_a_broker_may_have_the_messages(broker: Celery) -> None:
    """In a test that commits it is an error, because the outcome would depend on the broker."""
    with pytest.raises(AssertionError, match="on_commit_now"):
        drain_outbox()
