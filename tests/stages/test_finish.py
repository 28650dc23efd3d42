"""``current_claim().finish()`` in steps: its commit, and what a later run makes of it."""

import sys
from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import InvalidResult, current_claim
from tests.app.models import Person
from tests.resuming.loops import EACH_ONCE, fill, loop, written
from tests.stages.test_messages import Staged, end, shown, statuses
from tests.statements import raising


@pytest.mark.sql
def test_it_commits_with_the_body_and_the_next_stage_gets_it(staged: Staged) -> None:
    """The next stage gets the dict of finish(), and begins when the step has ended."""
    people, seen = Person.everyone.using(staged.alias), list[Any]()

    def work(task: Any) -> dict[str, Any]:
        claim = current_claim()
        assert claim.key == str(staged.step("a"))
        with transaction.atomic(using=staged.alias):
            people.create(pk=1)
            claim.finish({"width": 640})
            seen.append(staged.mailbox.take())
        seen.append((shown(run), staged.take()))
        return {"width": "returned"}

    run, message = staged.begin(do=work)
    assert staged.deliver(message) == ("SUCCESS", {"width": "returned"})
    assert seen == [[], ("rw", [])]
    staged.deliver(staged.take_one())
    assert (*statuses(run), people.count()) == ("succeeded", "ss", 1)
    assert run.params == {"width": 640, "b": True}


@pytest.mark.parametrize("ends", ["with an error", "False", "by a retry"])
def test_the_step_stays_done_whatever_happens_after_it(ends: str, staged: Staged) -> None:
    """Only the task reports the error; its message that comes again does nothing."""

    def work(task: Any) -> Any:
        current_claim().finish({"a": 1})
        end(task, ends)
        return False

    run, message = staged.begin(do=work)
    outcome = staged.deliver(message)
    if ends == "False":
        assert type(outcome.value) is InvalidResult
    assert outcome.state == ("RETRY" if ends == "by a retry" else "FAILURE")
    if ends == "by a retry":
        assert staged.deliver(staged.take_one()) == ("SUCCESS", {"a": 1})
    assert (shown(run), len(staged.take())) == ("sw", 1)
    assert staged.deliver(message).state == "IGNORED"
    assert (*statuses(run), run.params, staged.calls) == ("running", "sw", {"a": 1}, ["a"])


def test_the_next_stage_begins_although_another_callback_of_the_commit_failed(
    staged: Staged,
) -> None:
    """Django calls none after that, and no sweep is needed nevertheless."""

    def work(task: Any) -> None:
        with transaction.atomic(using=staged.alias):
            transaction.on_commit(raising(ValueError("no")), using=staged.alias)
            current_claim().finish()

    run, message = staged.begin(do=work)
    assert staged.deliver(message).state == "FAILURE"
    assert (shown(run), len(staged.take())) == ("sw", 1)


@pytest.mark.sql
def test_a_killed_step_goes_on_behind_its_last_chunk(staged: Staged) -> None:
    """Its message keeps the place; a death behind it counts anew."""
    walk = loop(fill(staged.alias), {5: sys.exit})
    run, message = staged.begin(do=lambda task: walk() == "done")
    for _ in range(2):
        with pytest.raises(SystemExit):
            staged.deliver(message)
        (row,) = staged.messages("a")
        assert (shown(run), row.deaths) == ("ww", 1)
    assert row.progress == "6/10"
    staged.deliver(message)
    assert (shown(run), written(staged.alias)) == ("sw", EACH_ONCE)
