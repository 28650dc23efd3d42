"""The parts of ``testing`` for commits: on_commit_now, assert_sent_on_commit."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TestCase

from django_celery_safe import find_lock, send_on_commit
from django_celery_safe.models import OutboxMessage
from django_celery_safe.testing import (
    assert_sent_on_commit,
    deliver_twice,
    lock_name,
    on_commit_now,
    waiting_for_commit,
)
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.servers import RedisServer
from tests.testing.tasks import effects, greet, visit


def queue_length(redis_server: RedisServer) -> int:
    """Return how many messages wait in the broker."""
    with redis_server.client(db=1) as client:
        return int(client.llen("celery"))


def test_on_commit_sends_at_the_end_of_the_block(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """A send on commit goes out at the end of the outermost atomic of the tested code."""
    with transaction.atomic():
        with transaction.atomic():
            add.delay_on_commit(1, 2)
        assert queue_length(redis_server) == 0
    assert queue_length(redis_server) == 1


def test_on_commit_sends_at_once_outside_a_block(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """Outside atomic() a send goes out at once, as in autocommit."""
    add.delay_on_commit(1, 2)
    assert queue_length(redis_server) == 1


def test_on_commit_drops_what_is_rolled_back(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """A rollback leaves its sends unsent, for whole blocks and savepoints alike."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        add.delay_on_commit(1, 2)
        raise ZeroDivisionError
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            add.delay_on_commit(3, 4)
            raise ZeroDivisionError
        add.delay_on_commit(5, 6)
    assert queue_length(redis_server) == 1


@pytest.mark.django_db
def test_without_it_nothing_is_sent_in_a_test(
    waiting_for_commit: Callable[[], int], broker: Celery, redis_server: RedisServer
) -> None:
    """Without the fixture a test's sends wait for a commit that never comes, as Django's do."""
    before = waiting_for_commit()
    with transaction.atomic():
        add.delay_on_commit(1, 2)
    assert waiting_for_commit() == before + 1
    assert queue_length(redis_server) == 0


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


class InPlainTestCase(TestCase):
    """unittest projects use the context managers."""

    def test_callbacks_see_the_rows(self) -> None:
        """A callback runs after the block and sees its rows."""
        seen: list[int] = []
        with on_commit_now(), transaction.atomic():
            Person.everyone.create()
            transaction.on_commit(lambda: seen.append(Person.everyone.count()))
            assert seen == []
        assert seen == [1]

    def test_it_waits_for_django(self) -> None:
        """Callbacks that Django's own block ran before are not run again, and do not count."""
        greet.delay_on_commit("before")
        with assert_sent_on_commit(greet, "inside"):
            greet.delay_on_commit("inside")
        assert waiting_for_commit() == 1


# Sends on commit.


def on_commit() -> None:
    """Send as the package does it."""
    with transaction.atomic():
        greet.delay_on_commit("kim")


def on_commit_of_a_savepoint() -> None:
    """Send inside of an inner block."""
    with transaction.atomic():
        on_commit()


def on_commit_without_transaction() -> None:
    """Send where nothing is to be waited for."""
    greet.delay_on_commit("kim")


def on_commit_as_django_does() -> None:
    """Send by Django's own callback."""
    with transaction.atomic():
        transaction.on_commit(lambda: greet.delay("kim"))


def on_commit_through_the_outbox() -> None:
    """Send by a row."""
    with transaction.atomic():
        greet.apply_async_on_commit(("kim",), outbox=True)


def on_commit_as_a_signature() -> None:
    """Send what others made."""
    with transaction.atomic(durable=True):
        send_on_commit(greet.s("kim"))


def on_commit_as_a_signature_without_transaction() -> None:
    """Send what others made where nothing is to be waited for."""
    send_on_commit(greet.s("kim"))


def on_commit_by_an_option() -> None:
    """Send by a plain send that is told to wait."""
    with transaction.atomic():
        greet.apply_async(("kim",), using="default")


RIGHT = [
    on_commit,
    on_commit_of_a_savepoint,
    on_commit_without_transaction,
    on_commit_as_django_does,
    on_commit_through_the_outbox,
    on_commit_as_a_signature,
    on_commit_as_a_signature_without_transaction,
    on_commit_by_an_option,
]


@pytest.mark.parametrize("send", RIGHT)
@pytest.mark.parametrize("eager", [False, True])
def test_it_is_sent_on_commit(
    send: Callable[[], None], eager: bool, any_database: str, unreachable: Celery
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


def too_early_without_transaction() -> None:
    """Send what a caller's transaction would not hold back."""
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


def another_task() -> None:
    """Send something else."""
    with transaction.atomic():
        add.delay_on_commit(1, y=2)


NAME = re.escape(greet.name)
WRONG = {
    too_early: (
        rf"^{NAME}\('kim'\) was sent on commit 0 times, instead of 1 time\.\n"
        rf"It was sent 1 time without waiting for a commit: write greet\.delay_on_commit.*\n"
        rf"All that was sent:\n  {NAME}\('kim'\), not on commit$"
    ),
    too_early_without_transaction: r"was sent 1 time without waiting",
    rolled_back: r"0 times.*\nCallbacks that a rollback dropped: 1\.\nNothing was sent\.$",
    another_argument: rf"0 times.*\nAll that was sent:\n  {NAME}\('sam', times=2\), on commit$",
    twice: r"was sent on commit 2 times, instead of 1 time\.\nAll",
    once_early: r"was sent on commit 1 time, instead of 1 time\.\nIt was sent 1 time without",
    another_task: r"All that was sent:\n  tests\.app\.tasks\.add\(1, y=2\), on commit$",
    lambda: None: r"Nothing was sent\.$",
}


@pytest.mark.parametrize(("send", "said"), WRONG.items())
@pytest.mark.parametrize("eager", [False, True])
def test_what_is_wrong_fails(
    send: Callable[[], None], said: str, eager: bool, any_database: str, unreachable: Celery
) -> None:
    """The error says what is wrong, and lists the messages that were sent."""
    unreachable.conf.task_always_eager = eager
    with pytest.raises(AssertionError, match=said), assert_sent_on_commit(greet, "kim"):
        send()
    assert effects == []


def test_a_transaction_around_the_block_is_told(any_database: str, unreachable: Celery) -> None:
    """A block in the test's own atomic() sees no commit, and says so."""
    said = r"still wait for a commit: 1\. The block stands inside atomic\(\)"
    with transaction.atomic():
        with pytest.raises(AssertionError, match=said), assert_sent_on_commit(greet, "kim"):
            on_commit()
        transaction.set_rollback(True)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (((1, 2),), ([1, 2],)),
        (([1, 2],), ((1, 2),)),
        (("kim", "hello"), ("kim",)),
        (("kim",), (ANY,)),
        (({"a": (1, 2)},), ({"a": [1, 2]},)),
    ],
)
def test_arguments_are_as_they_arrive(
    sent: tuple[Any, ...], expected: tuple[Any, ...], db: None, unreachable: Celery
) -> None:
    """Tuples are lists, defaults are filled in, and ANY is equal to all."""
    with assert_sent_on_commit(greet, *expected):
        greet.delay_on_commit(*sent)


def test_arguments_by_name_are_the_same(db: None, unreachable: Celery) -> None:
    """It makes no difference whether an argument is given by its name; ``times`` goes by place."""
    with assert_sent_on_commit(greet, "kim", "hi"), assert_sent_on_commit(greet, "kim", "hi", 1):
        greet.delay_on_commit(greeting="hi", name="kim", times=1)
    with assert_sent_on_commit(greet, name=(1, 2)):
        greet.delay_on_commit([1, 2])


@pytest.mark.parametrize("times", [0, 2])
def test_how_often(times: int, any_database: str, unreachable: Celery) -> None:
    """It is sent as often as was said, or not at all."""
    with assert_sent_on_commit(greet, "kim", times=times):
        for _ in range(times):
            on_commit()
    with (
        pytest.raises(AssertionError, match="not to be sent at all" if not times else "of 2 times"),
        assert_sent_on_commit(greet, "kim", times=times),
    ):
        on_commit()


def test_not_at_all_is_also_not_before(db: None, unreachable: Celery) -> None:
    """A task that must not be sent on commit must not be sent at once either."""
    with pytest.raises(AssertionError), assert_sent_on_commit(greet, "kim", times=0):
        greet.delay("kim")


def test_not_at_all_is_with_no_arguments_whatever(any_database: str, unreachable: Celery) -> None:
    """Without arguments, what must not be sent must not be sent with any."""
    says = "tests.testing.tasks.greet was sent 1 time, and is not to be sent at all."
    with pytest.raises(AssertionError, match=says), assert_sent_on_commit(greet, times=0):
        greet.delay_on_commit("kim")
    with assert_sent_on_commit(greet, times=0):
        add.delay_on_commit(1, 2)


@pytest.mark.parametrize("times", [0, 1])
def test_arguments_that_never_fit(times: int, any_database: str, unreachable: Celery) -> None:
    """A test that would pass, or fail, whatever the code does, is told so."""
    with (
        pytest.raises(TypeError, match=r"greet\(nobody='kim'\) can't be sent, so it never will"),
        assert_sent_on_commit(greet, nobody="kim", times=times),
    ):
        on_commit()


@pytest.mark.parametrize("task", ["tests.testing.tasks.greet", greet.delay, greet.s("kim"), None])
def test_what_is_no_task(task: Any, db: None, unreachable: Celery) -> None:
    """A name, a method or a signature in place of a task is named as what it is."""
    says = "which is not a task. Pass the task itself"
    with pytest.raises(TypeError, match=says), assert_sent_on_commit(task, "kim"):
        pass
    with pytest.raises(TypeError, match=says):
        deliver_twice(task, "kim")
    with pytest.raises(TypeError, match=says):
        lock_name(task, "kim")


@pytest.mark.parametrize("outbox", [False, True])
@pytest.mark.parametrize(
    ("canvas", "expected"),
    [
        (lambda: chain(add.si(1, 2), greet.si("kim")), ["add"]),
        (lambda: group(add.si(1, 2), greet.si("kim")), ["add", "greet"]),
        (lambda: chord([add.si(1, 2), add.si(3, 4)], total.s()), ["add", "add"]),
    ],
    ids=["chain", "group", "chord"],
)
def test_of_a_canvas_is_seen_what_is_published(
    outbox: bool,
    canvas: Callable[[], Signature],
    expected: list[str],
    any_database: str,
    unreachable: Celery,
) -> None:
    """A chain publishes its first task, a group all of them, a chord its header."""
    with assert_sent_on_commit(add, 1, 2) as sent, transaction.atomic():
        send_on_commit(canvas(), outbox=outbox)
    assert [one.task.rpartition(".")[2] for one in sent] == expected
    assert OutboxMessage.objects.count() == 0


def test_two_may_stand_together(any_database: str, unreachable: Celery) -> None:
    """Blocks around the same code each see all that it sends."""
    with assert_sent_on_commit(greet, "kim"), assert_sent_on_commit(add, 1, 2):
        on_commit()
        add.delay_on_commit(1, 2)
    with (
        pytest.raises(AssertionError),
        assert_sent_on_commit(add, 1),
        assert_sent_on_commit(greet, "kim"),
    ):
        on_commit()


def test_an_error_of_the_block_is_its_own(any_database: str, unreachable: Celery) -> None:
    """An exception leaves the block as it is, and nothing stays changed."""
    before = BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__
    unreachable.conf.task_always_eager = True
    with pytest.raises(ZeroDivisionError), assert_sent_on_commit(greet, "kim"):
        raise ZeroDivisionError
    assert (BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__) == before
    greet.apply_async(("here",))
    assert effects == [["here", "hello"]]


def test_what_was_not_published_holds_no_lock(
    locks_in_memory: None, any_database: str, unreachable: Celery
) -> None:
    """The second of two equal sends is a duplicate inside the block; after it the lock is free."""
    with assert_sent_on_commit(visit, "here"):
        visit.delay_on_commit("here")
        visit.delay_on_commit("here")
    assert find_lock("sent:" + lock_name(visit, "here")) is None
    with assert_sent_on_commit(visit, "here"):
        visit.delay_on_commit("here")


def test_events_are_no_tasks(db: None, unreachable: Celery) -> None:
    """With task_send_sent_event on, an event is published beside each task, and is none."""
    unreachable.conf.task_send_sent_event = True
    try:
        with assert_sent_on_commit(greet, "kim") as sent:
            on_commit()
            add.delay(1, 2)
    finally:
        unreachable.conf.task_send_sent_event = False
    assert [one.task.rpartition(".")[2] for one in sent] == ["greet", "add"]
