"""``current_claim().finish()`` in steps: its commit, and the beginning of the next stage."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from django.db import connections, transaction

from django_celery_safe import IdempotencyError, InvalidResult, StepLost, current_claim
from django_celery_safe.stages.repairs import Repair, sweep
from django_celery_safe.stages.step_table import StepTable
from tests.app.models import Person
from tests.concurrency.conftest import mailbox
from tests.stages.test_messages import Staged, of_module, shown, staged

__all__ = ["mailbox", "of_module", "staged"]


def people(staged: Staged) -> Any:
    """Return the project's rows beside the runs."""
    return Person.everyone.using(staged.alias)


@pytest.fixture(autouse=True)
def no_people(staged: Staged) -> None:
    """Begin without any, in a database that other tests had before."""
    people(staged).all()._raw_delete(staged.alias)


def test_it_commits_with_the_body_and_begins_the_next_stage(staged: Staged) -> None:
    """The next stage gets the dict of finish(), and begins at the commit, not before."""
    seen: list[Any] = []

    def work(task: Any) -> dict[str, Any]:
        claim = current_claim()
        assert claim.key == str(staged.step("a"))
        with transaction.atomic(using=staged.alias):
            people(staged).create(pk=1)
            claim.finish({"width": 640})
            seen.append(staged.mailbox.take())
        seen.append((shown(run), len(staged.take())))
        return {"width": "returned"}

    staged.bodies["a"] = work
    run = staged.start("a", "b")
    assert staged.deliver(staged.take_one()) == ("SUCCESS", {"width": "returned"})
    assert seen == [[], ("sw", 1)]
    staged.deliver(staged.sent[-1])
    run.refresh_from_db()
    assert (run.params, shown(run), people(staged).count()) == (
        {"width": 640, "b": True},
        "ss",
        1,
    )


def test_an_error_rolls_back_both(staged: Staged) -> None:
    """The step fails, and nothing of it is written."""

    def work(task: Any) -> None:
        with transaction.atomic(using=staged.alias):
            people(staged).create(pk=1)
            current_claim().finish()
            raise ValueError("no")

    staged.bodies["a"] = work
    run = staged.start("a", "b")
    assert staged.deliver(staged.take_one()).state == "FAILURE"
    assert (shown(run), people(staged).count(), staged.take()) == ("fa", 0, [])
    assert staged.step("a").error_type == "ValueError"


def test_a_rollback_that_is_hidden_is_an_error(staged: Staged) -> None:
    """Otherwise the step would count as not done, and no error would say so."""

    def work(task: Any) -> None:
        with transaction.atomic(using=staged.alias):
            current_claim().finish()
            transaction.set_rollback(True, using=staged.alias)

    staged.bodies["a"] = work
    run = staged.start("a")
    state, error = staged.deliver(staged.take_one())
    assert (state, type(error), shown(run)) == ("FAILURE", IdempotencyError, "f")


@pytest.mark.parametrize("end", ["error", "False", "retry"])
def test_the_step_stays_done_whatever_happens_after_it(end: str, staged: Staged) -> None:
    """Only the task reports the error; a redelivered message does nothing."""

    def work(task: Any) -> Any:
        current_claim().finish({"a": 1})
        if end == "error":
            raise ValueError("no")
        if end == "retry":
            raise task.retry(countdown=0)
        return False

    staged.bodies["a"] = work
    run = staged.start("a", "b")
    message = staged.take_one()
    outcome = staged.deliver(message)
    if end == "False":
        assert type(outcome.value) is InvalidResult
    assert outcome.state == ("RETRY" if end == "retry" else "FAILURE")
    assert shown(run) == "sw"
    assert staged.deliver(message) == ("SUCCESS", None)
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("running", ["a"])


def test_the_next_stage_begins_although_another_callback_of_the_commit_failed(
    staged: Staged,
) -> None:
    """Django calls none after that, and no sweep is needed nevertheless."""

    def fail() -> None:
        raise ValueError("no")

    def work(task: Any) -> None:
        with transaction.atomic(using=staged.alias):
            transaction.on_commit(fail, using=staged.alias)
            current_claim().finish()

    staged.bodies["a"] = work
    run = staged.start("a", "b")
    assert staged.deliver(staged.take_one()).state == "FAILURE"
    assert (shown(run), len(staged.take())) == ("sw", 1)


def test_a_claim_that_was_lost_writes_nothing(staged: Staged) -> None:
    """StepLost leaves the body's transaction, so the other run's work is the only one."""

    def lose(task: Any) -> None:
        staged.bodies["a"] = lambda task: people(staged).create(pk=1) and None
        staged.end_lease("a")
        assert staged.deliver_elsewhere(message).state == "SUCCESS"
        with transaction.atomic(using=staged.alias):
            people(staged).create(pk=2)
            current_claim().finish()

    staged.bodies["a"] = lose
    run = staged.start("a")
    message = staged.take_one()
    state, error = staged.deliver(message)
    assert (state, type(error), shown(run)) == ("FAILURE", StepLost, "s")
    assert list(people(staged).values_list("pk", flat=True)) == [1]


@pytest.mark.parametrize("staged", ["postgres"], indirect=True)
def test_a_sweep_does_not_wait_for_its_commit(staged: Staged) -> None:
    """A relay that sweeps goes on with its messages, however long the transaction takes."""

    def sweep_elsewhere() -> list[Repair]:
        with closing(connections[staged.alias]) as connection:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '5s'")  # an error then
            return sweep(StepTable(staged.alias))

    def work(task: Any) -> None:
        staged.end_lease("a")
        with transaction.atomic(using=staged.alias):
            current_claim().finish()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(sweep_elsewhere).result() == []

    staged.bodies["a"] = work
    run = staged.start("a")
    assert staged.deliver(staged.take_one()) == ("SUCCESS", None)
    assert (shown(run), staged.step("a").deaths) == ("s", 0)


def test_what_it_can_not_keep(staged: Staged) -> None:
    """The next stages get a dict of plain data, and nothing was recorded."""
    errors: list[Any] = []

    def work(task: Any) -> None:
        for result in (7, {"file": object()}):
            try:
                current_claim().finish(result)
            except InvalidResult as error:
                errors.append(error.reason)
        current_claim().finish()

    staged.bodies["a"] = work
    run = staged.start("a")
    assert staged.deliver(staged.take_one()).state == "SUCCESS"
    assert (errors[0], "JSON can't take it" in errors[1]) == ("its params are 7", True)
    assert shown(run) == "s"
