"""Failures, resuming and aborting of a run at every moment of its plan."""

from collections.abc import Callable
from typing import Any, Final

import pytest
from django.db import transaction

from django_celery_safe import IllegalTransition
from django_celery_safe.databases import Now
from django_celery_safe.events import RUN_RESUMED
from django_celery_safe.models import StageRun
from django_celery_safe.signals import run_ended
from django_celery_safe.stages.status import Status
from tests.background import elsewhere
from tests.idempotency.test_flags_race import isolate
from tests.sending.conftest import hearing, rolled_back
from tests.servers.databases import until_somebody_waits
from tests.stages.test_messages import Staged, end, refuse, statuses

# The plan of all tests here is ab, cd, e: two steps, then two, then one. The text of
# ``shown`` has a letter for each of them: waiting, running, succeeded, failed, aborted.


def refused(do: Callable[[], Any], says: str) -> None:
    """Check that this can't be done now, and why."""
    with pytest.raises(IllegalTransition) as caught:
        do()
    assert says in str(caught.value)
    assert str(caught.value).endswith("Nothing was changed.")


# Failures, and resuming after them.


#: The steps that fail, the order in which the messages of a stage come, the final states of the
#: steps, and the steps that a resumed run does.
FAILURES: Final = [
    ("a", "abcde", "faaaa", "abcde"),
    ("a", "badce", "fsaaa", "acde"),
    ("ab", "abcde", "faaaa", "abcde"),
    ("c", "abcde", "ssfaa", "cde"),
    ("e", "abcde", "ssssf", "e"),
]


@pytest.mark.parametrize(("fails", "order", "steps", "again"), FAILURES)
def test_a_failure_stops_what_has_not_begun(
    fails: str, order: str, steps: str, again: str, staged: Staged
) -> None:
    """In each stage, whoever is first; resumed, what did not succeed is done, and no more."""
    staged.bodies.update(dict.fromkeys(fails, refuse))
    run = staged.start()
    staged.deliver_all(order)
    assert statuses(run) == ("failed", steps)
    assert run.ended_at is not None
    assert run.error_step == staged.step(fails[0])
    assert (run.stages, run.progress.done) == (3, steps.count("s"))
    refused(run.abort, f"abort {run}: its status is failed")

    staged.bodies.clear()
    staged.calls.clear()
    assert run.resume() is run
    assert (run.status, run.ended_at, run.error_step) == ("running", None, None)
    refused(run.resume, f"resume {run}: its status is running")
    staged.deliver_all(order)
    assert statuses(run) == ("succeeded", "sssss")
    assert sorted(staged.calls) == list(again)
    # The params of the stages that had ended before are there, too.
    assert run.params == dict.fromkeys("abcde", True)
    refused(run.resume, f"resume {run}: its status is succeeded")
    refused(run.abort, f"abort {run}: its status is succeeded")


def test_what_runs_may_end_when_another_fails(staged: Staged) -> None:
    """A step that runs when its run fails ends as it will; until then nothing is resumed."""

    def meet(task: Any) -> dict[str, int]:
        assert not staged.steps.first().run.is_aborted()
        staged.deliver_elsewhere(of_a)
        assert statuses(run) == ("failed", "fraaa")
        assert run.is_aborted()
        refused(run.resume, f"resume {run}: its step {staged.step('b')} still runs")
        return {"b": 2}

    staged.bodies |= {"a": refuse, "b": meet}
    run = staged.start()
    of_a, of_b = staged.take()
    staged.deliver(of_b)
    assert statuses(run) == ("failed", "fsaaa")
    staged.resume(run)
    assert run.params["b"] == 2
    assert sorted(staged.calls) == list("aabcde")


@pytest.mark.parametrize(("stops", "ends"), [("failure", "with an error"), ("abort", "by a retry")])
def test_a_step_that_fails_after_its_run_has_stopped(ends: str, stops: str, staged: Staged) -> None:
    """The run ended once; the late error is recorded, a retry is aborted; resumed, it is done."""

    def meet(task: Any) -> None:
        if stops == "abort":
            run.abort()
        else:
            staged.deliver_elsewhere(of_a)
        end(task, ends)

    staged.bodies |= {"a": refuse, "b": meet}
    with hearing(run_ended) as ended:
        run = staged.start()
        of_a, of_b = staged.take()
        staged.deliver(of_b)
        staged.deliver_all()
    assert len(ended) == 1
    wanted = ("failed", "ffaaa") if stops == "failure" else ("aborted", "aaaaa")
    assert statuses(run) == wanted
    assert len(staged.calls) == len(set(staged.calls))
    staged.resume(run)


def test_a_step_whose_process_died_keeps_nobody_from_resuming(staged: Staged) -> None:
    """Its lease is over: it is done again, and the one that was stale gets ClaimLost."""

    def stand_still(task: Any) -> dict[str, str]:
        del staged.bodies["b"]
        staged.deliver_elsewhere(of_a)
        refused(run.resume, "still runs")
        staged.end_lease("b")
        run.resume()
        assert statuses(run) == ("running", "wwwww")
        return {"b": "stale"}

    staged.bodies |= {"a": refuse, "b": stand_still}
    run = staged.start()
    of_a, of_b = staged.take()
    assert staged.deliver(of_b).state == "IGNORED"  # it lost its claim
    assert statuses(run) == ("running", "wwwww")
    del staged.bodies["a"]
    staged.deliver_all()
    assert statuses(run) == ("succeeded", "sssss")
    assert run.params == dict.fromkeys("abcde", True)


# Aborting.


#: Moments at which a run is aborted: the step that does it from inside, if one does; how many
#: messages come before it otherwise; the final states of the steps.
MOMENTS: Final = {
    "before it begins": ("", 0, "aaaaa"),
    "while the first runs": ("a", 0, "saaaa"),
    "while the last of a stage runs": ("b", 0, "ssaaa"),
    "between two stages": ("", 2, "ssaaa"),
    "while the last runs": ("e", 0, "sssss"),
}


@pytest.mark.parametrize(("during", "delivered", "steps"), MOMENTS.values(), ids=MOMENTS)
def test_an_abort_stops_what_has_not_begun(
    during: str, delivered: int, steps: str, staged: Staged
) -> None:
    """Running steps go on to their end; the others are not begun, and can be resumed."""

    def abort(task: Any) -> dict[str, bool]:
        mine = staged.runs.get()
        assert not mine.is_aborted()
        assert mine.abort() is mine
        assert (mine.status, mine.is_aborted()) == ("aborted", True)
        refused(mine.resume, "still runs")
        return {during: True}

    if during:
        staged.bodies[during] = abort
    run = staged.start()
    waiting = staged.take()
    with hearing(run_ended) as ended:
        for message in waiting[:delivered]:
            staged.deliver(message)
        if not during:
            assert run.abort() is run
        # Messages that were sent before arrive all the same.
        for message in waiting[delivered:]:
            staged.deliver(message)
        staged.deliver_all()
    assert [event["status"] for event in ended] == ["aborted"]
    assert statuses(run) == ("aborted", steps)
    assert (run.error_step, run.ended_at is None) == (None, False)
    assert "".join(staged.calls) == "abcde"[: steps.count("s")]
    refused(run.abort, f"abort {run}: its status is aborted")
    staged.resume(run)
    assert "".join(staged.calls) == "abcde"  # each of them once
    assert run.params == dict.fromkeys("abcde", True)


# Refused transitions.


def test_only_a_stopped_run_is_resumed(staged: Staged) -> None:
    """One that waits or is gone can't be resumed; the last not aborted, either."""
    run = staged.start()
    refused(run.resume, f"resume {run}: its status is waiting")
    kept = staged.runs.get()
    run.delete()
    refused(kept.resume, f"resume {kept}: it was deleted")
    refused(kept.abort, f"abort {kept}: it was deleted")


@pytest.mark.sql
@pytest.mark.parametrize("action", ["abort", "resume"])
def test_what_is_rolled_back_did_not_happen(action: str, staged: Staged) -> None:
    """Inside atomic() it is done with the commit: no message, no signal and no change before."""
    staged.bodies["b"] = refuse
    run = staged.start()
    if action == "resume":
        staged.deliver_all()
    staged.take()
    before = staged.tables()
    with hearing(run_ended, RUN_RESUMED) as heard:
        with rolled_back(staged.alias):
            getattr(run, action)()
        assert (staged.tables(), heard, staged.take()) == (before, [], [])
        with transaction.atomic(using=staged.alias):
            getattr(run, action)()
            assert (heard, staged.take()) == ([], [])
        assert len(heard) == 1
    assert len(staged.take()) == (1 if action == "resume" else 0)


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_change_waits_for_another_at_every_isolation_level(
    level: str, postgres_alias: str
) -> None:
    """An abort that waited for another change of its run is done after that, without an error."""
    isolate(postgres_alias, level)
    runs = StageRun.objects.using(postgres_alias)
    run = runs.create(stages=1, created_at=Now())
    with transaction.atomic(using=postgres_alias):
        runs.update(status=Status.RUNNING)
        second = elsewhere(postgres_alias, lambda: runs.get(pk=run.pk).abort())
        until_somebody_waits(postgres_alias)
    second.result()
    assert runs.get().status == Status.ABORTED


def test_results_that_are_too_much_fail_the_run(staged: Staged) -> None:
    """The next stage is not begun without them; mended and resumed, the run succeeds."""
    staged.bodies |= {name: lambda task: {task.request.id: "x" * 40_000} for name in "ab"}
    staged.bodies["c"] = lambda task: None
    run = staged.start("abc", "d")
    staged.deliver_all()
    assert statuses(run) == ("failed", "sssa")
    assert run.error.startswith("The results of stage 1 can't be kept for the next one: it is 80,")
    assert run.error.endswith("those that returned something run again.")
    assert run.error_step is None
    staged.bodies.clear()
    staged.calls.clear()
    run.resume()
    assert statuses(run) == ("running", "wwsw")
    staged.deliver_all()
    assert statuses(run) == ("succeeded", "ssss")
    assert staged.calls == list("abd")  # what returned nothing was not done again
    assert run.params == dict.fromkeys("abd", True)
