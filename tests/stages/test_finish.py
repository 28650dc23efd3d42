"""``current_claim().finish()`` in steps: its commit, and the beginning of the next stage."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from django.db import connections, transaction

from django_celery_safe import InvalidResult, current_claim
from django_celery_safe.stages.repairs import Repair
from tests.app.models import Person
from tests.stages.chores import sweep
from tests.stages.test_messages import Staged, shown


def people(staged: Staged) -> Any:
    """Return the project's rows beside the runs."""
    return Person.everyone.using(staged.alias)


@pytest.mark.sql
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


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
def test_a_sweep_does_not_wait_for_its_commit(staged: Staged) -> None:
    """A relay that sweeps goes on with its messages, however long the transaction takes."""

    def sweep_elsewhere() -> list[Repair]:
        with closing(connections[staged.alias]) as connection:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '5s'")  # an error then
            return sweep(staged.alias)

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
