"""``current_claim().finish()`` in carried tasks: its commit, and events after it."""

from contextlib import suppress
from contextvars import copy_context
from typing import Any

import pytest
from celery import chain
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from django_celery_safe import (
    Claim,
    ClaimLost,
    ConfigurationError,
    InvalidResult,
    WrongTransaction,
    current_claim,
    idempotent,
    send_on_commit,
)
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.background import elsewhere
from tests.clock import held_clock
from tests.concurrency.mailbox import Mailbox
from tests.kinds import more_for_claim
from tests.processes import wait_for
from tests.sending.carrying import Carried, leave_dead
from tests.sending.conftest import rolled_back
from tests.sending.test_carried import BRACKETS


def write(carried: Carried, result: Any = "stored", key: int = 1) -> Claim:
    """Write a row of the project, and finish the work with it."""
    Person.everyone.using(carried.alias).create(pk=key)
    claim = current_claim()
    claim.finish(result)
    return claim


def count_written(carried: Carried) -> int:
    """Return how many rows of the project there are."""
    return Person.everyone.using(carried.alias).count()


@pytest.mark.sql
def test_it_commits_with_the_body(carried: Carried) -> None:
    """One more query; the row stays until the run has ended."""
    seen: list[Any] = []

    def work(task: Any, number: int) -> str:
        with transaction.atomic(using=carried.alias):
            claim = write(carried)
        row = carried.row
        seen.append((row.state, row.result, claim.result, bool(claim)))
        return "returned"

    carried.body = work
    message = carried.send(1)
    with CaptureQueriesContext(connections[carried.alias]) as queries:
        assert carried.mailbox.deliver(message) == ("SUCCESS", "returned")
    assert seen == [("running", '"stored"', "stored", True)]
    assert (carried.rows.count(), count_written(carried)) == (0, 1)
    ours = [one["sql"] for one in queries if "outboxmessage" in one["sql"]]
    # The claim, the result, the look of the body, and the end.
    wanted = 4 + more_for_claim(carried.alias)
    assert len([sql for sql in ours if not sql.startswith(BRACKETS)]) == wanted


@pytest.mark.parametrize("result", ["stored", None])
def test_what_died_after_it_is_not_done_again(carried: Carried, result: Any) -> None:
    """The next run returns the result, however many processes died in the task."""

    def work(task: Any, *args: Any) -> None:
        with transaction.atomic(using=carried.alias):
            write(carried, result)

    leave_dead(carried, carried.send(1), after=work)
    carried.rows.update(deaths=99)
    assert carried.run_again() == ("SUCCESS", result)
    assert carried.calls == [1]
    assert (carried.rows.count(), count_written(carried)) == (0, 1)


def test_its_followers_are_sent_after_a_death(carried: Carried) -> None:
    """A link that was not sent yet gets the stored result."""
    follower = carried.make_task("tests.follower")
    parts = chain(carried.task.s(1), follower.s().set(using=carried.alias))
    send_on_commit(parts, using=carried.alias)
    leave_dead(carried, carried.mailbox.take_one(), after=lambda *args: write(carried) and None)
    assert carried.run_again() == ("SUCCESS", "stored")
    carried.body = lambda task, *args: args[0]
    assert carried.mailbox.deliver(carried.mailbox.take_one()) == ("SUCCESS", "stored")
    assert carried.calls == [1, "stored"]


def test_a_long_transaction_counts_no_death(mailbox: Mailbox, postgres_alias: str) -> None:
    """No renewal sees its row before the commit, which renews the lease at once."""
    carried = Carried(mailbox, postgres_alias)

    def work(task: Any, number: int) -> None:
        with transaction.atomic(using=postgres_alias):
            write(carried)
            carried.make_due()
            clock.jump(25)
        wait_for(lambda: carried.waits > 0)

    with held_clock() as clock:
        assert carried.run(work, 1).state == "SUCCESS"


@pytest.mark.sql
def test_an_error_rolls_back_both(carried: Carried) -> None:
    """The task has failed, nothing is written, and a retry does all of it."""

    def work(task: Any, number: int) -> None:
        with transaction.atomic(using=carried.alias):
            write(carried)
            raise ValueError("no")

    assert carried.run(work, 1).state == "FAILURE"
    assert (carried.row.state, carried.row.result, count_written(carried)) == ("failed", "", 0)
    carried.rows.revive()
    carried.body = lambda task, number: write(carried) and "done"
    assert carried.run_again() == ("SUCCESS", "done")


def test_an_error_after_it_fails_the_task_whose_work_is_done(carried: Carried) -> None:
    """Sent again by hand, the task returns the result and does nothing."""

    def work(task: Any, number: int) -> None:
        write(carried)
        raise ValueError("no")

    assert carried.run(work, 1).state == "FAILURE"
    assert carried.row.state == "failed"
    assert carried.row.finished
    carried.rows.revive()
    assert carried.run_again() == ("SUCCESS", "stored")
    assert carried.calls == [1]


def test_its_own_error_ends_no_renewal(carried: Carried) -> None:
    """A body that goes on after that keeps its claim, and may finish again."""

    def work(task: Any, number: int) -> None:
        with transaction.atomic(using=carried.alias):
            transaction.set_rollback(True, using=carried.alias)  # as an IntegrityError does
            with pytest.raises(TransactionManagementError):
                current_claim().finish()
        assert any(lane.leases for lane in renewer.lanes.values())
        write(carried)

    assert carried.run(work, 1).state == "SUCCESS"
    assert count_written(carried) == 1


def test_a_rollback_that_would_go_unseen_is_an_error(carried: Carried) -> None:
    """Otherwise the work would count as done, and nobody would know that it is not."""

    def hide(task: Any, number: int) -> None:
        with rolled_back(carried.alias):
            write(carried)

    state, error = carried.run(hide, 1)
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    assert (carried.row.state, carried.row.result, count_written(carried)) == ("failed", "", 0)


@pytest.mark.sql
def test_a_claim_that_was_lost_writes_nothing(carried: Carried) -> None:
    """ClaimLost leaves the body's transaction, so the work is done by the other run alone."""

    def lose(task: Any, number: int) -> None:
        carried.body = lambda task, number: write(carried) and None
        carried.make_due()
        (again,) = carried.relay()
        assert carried.deliver_elsewhere(again).state == "SUCCESS"
        with pytest.raises(ClaimLost):
            current_claim().ensure()
        with transaction.atomic(using=carried.alias):
            write(carried, key=2)

    state, error = carried.run(lose, 1)
    assert (state, type(error.__cause__)) == ("IGNORED", ClaimLost)
    assert list(Person.everyone.using(carried.alias).values_list("pk", flat=True)) == [1]
    assert not carried.rows.exists()


def test_a_lost_claim_ends_the_run_though_its_error_is_swallowed(carried: Carried) -> None:
    """The other run has not ended: the row is its own, and this run has no result."""

    def lose(task: Any, number: int) -> None:
        carried.rows.update(token="another")
        with transaction.atomic(using=carried.alias), suppress(ClaimLost):
            write(carried)

    state, error = carried.run(lose, 1)
    assert (state, type(error.__cause__)) == ("IGNORED", ClaimLost)
    assert (carried.row.state, carried.row.token, carried.row.result) == ("running", "another", "")


def test_a_retry_finds_it_done_and_a_replacement_does_not(carried: Carried) -> None:
    """The other work has the id and the row of the task, and is not finished by it."""

    def go_on(task: Any, number: int) -> Any:
        if number == 3:
            return number
        write(carried, key=number)
        if number == 1:
            raise task.retry(countdown=1)
        return task.replace(carried.task.s(3).set(using=carried.alias))

    assert carried.run(go_on, 1).state == "RETRY"
    assert carried.mailbox.deliver(carried.mailbox.take_one()) == ("SUCCESS", "stored")
    assert carried.mailbox.deliver(carried.send(2)).state == "IGNORED"
    assert carried.row.result == ""
    assert carried.mailbox.deliver(carried.mailbox.take_one()) == ("SUCCESS", 3)
    assert carried.calls == [1, 2, 3]


def test_a_task_finishes_its_own_claim(carried: Carried) -> None:
    """Not that of the block around it, nor that of the task that called it."""
    other = carried.make_task("tests.other")
    keys: list[str] = []

    def work(task: Any, number: int) -> None:
        if number > 1:
            claim = current_claim()
            keys.append(claim.key)
            claim.finish("inner")
            with pytest.raises(ConfigurationError, match="finished before"):
                claim.finish()
            return
        with pytest.raises(InvalidResult):
            current_claim().finish(object())
        with pytest.raises(ValueError, match="outer"), idempotent("outer", using=carried.alias):
            keys.append(current_claim().key)
            other(2)
            other.apply((3,)).get()
            raise ValueError("outer")
        keys.append(current_claim().key)
        assert carried.row.result == ""

    carried.body = work
    message = carried.send(1)
    assert carried.mailbox.deliver(message).state == "SUCCESS"
    assert keys == ["outer", "tests.other", "tests.other", f"tests.carried[{message.id}]"]
    record = IdempotencyRecord.objects.using(carried.alias).get()
    assert (record.state, record.result) == ("failed", "")


def test_a_thread_that_works_for_a_task_finishes_its_claim(carried: Carried) -> None:
    """It has the context of the task, as asgiref and asyncio give it to their threads."""

    def finish() -> None:
        current_claim().finish("stored")

    def work(task: Any, number: int) -> None:
        elsewhere(carried.alias, copy_context().run, finish).result()
        assert carried.row.result == '"stored"'

    assert carried.run(work, 1).state == "SUCCESS"


def test_a_message_that_is_not_carried_has_no_claim(carried: Carried) -> None:
    """It is an error, because the row would not keep the task from running again."""
    carried.body = lambda task, number: write(carried)
    carried.task.apply_async((1,), outbox=False)
    state, error = carried.mailbox.deliver(carried.mailbox.take_one())
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert "which this message was not sent with" in str(error)
    with pytest.raises(ConfigurationError, match="No claim is being worked on here"):
        current_claim()
