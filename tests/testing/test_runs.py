"""Runs of stages that ``testing`` brings to their end."""

import logging

import pytest
from celery import Celery
from django.db import transaction

from django_celery_safe import WrongTransaction, stages
from django_celery_safe.models import OutboxMessage, StageRun
from django_celery_safe.stages import Status
from django_celery_safe.testing import drain_outbox, on_commit_now, run_stages
from tests.stages.tasks import add, crash, note, plain, reconnect
from tests.testing.tasks import effects, never_well, step_that_refuses, step_that_tells


@pytest.fixture(autouse=True, params=[False, True], ids=["messages", "eager"])
def eager(request: pytest.FixtureRequest, unreachable: Celery) -> bool:
    """Whether the project's tasks run eagerly, in a transaction; otherwise commits are real."""
    request.getfixturevalue("db" if request.param else "transactional_db")
    unreachable.conf.task_always_eager = request.param
    return bool(request.param)


def shown(run: StageRun) -> list[str]:
    """Return the states of a run's steps."""
    return [step.status for step in run.steps]


def test_a_plan_is_run() -> None:
    """Stages run one after the other, with the params and states that workers see."""
    run = run_stages([(step_that_tells, 3), (step_that_tells, 2), (plain, 1)], {"album": 7})
    assert (run.status, shown(run)) == (Status.SUCCEEDED, ["succeeded"] * 3)
    assert run.params == {"album": 7, "told": 2, "plain": plain.name}
    assert effects == [("running", ["album"]), ("running", ["album", "told"])]
    assert run.ended_at is not None
    assert OutboxMessage.objects.count() == 0


def test_a_failing_step_fails_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """A step that raises fails its run, and what has not begun is aborted."""
    run = run_stages([(note, 3), (crash, 2), (note, 1)])
    assert (run.status, shown(run)) == (Status.FAILED, ["succeeded", "failed", "aborted"])
    assert run.error_step is not None
    assert run.error_step.error_type == "ValueError"
    refused = run_stages([(step_that_refuses, 1)])
    assert refused.status == Status.FAILED


def test_retries_are_run() -> None:
    """A step that Celery retries is run until it is well."""
    run = run_stages([(reconnect, 2), (add, 1, {"number": 4})])
    assert (run.status, run.params) == (Status.SUCCEEDED, {"starts": 2, "sum": 4})


def test_a_run_goes_on() -> None:
    """A run that tested code started is run, where a TestCase kept it."""
    with transaction.atomic():
        run = stages.start([(add, 2), (add, 1)])
    assert run_stages(run).status == Status.SUCCEEDED
    assert run.params == {"sum": 2}
    with on_commit_now():
        assert drain_outbox() == []
    assert run_stages(run) is run


def test_a_failed_run_is_resumed(caplog: pytest.LogCaptureFixture) -> None:
    """A run that was resumed begins where it failed."""
    run = run_stages([(add, 2), (crash, 1)])
    StageRun.objects.filter(pk=run.pk).update(params_text='{"sum": 1, "well": true}')
    run.refresh_from_db()
    assert run_stages(run.resume()).status == Status.SUCCEEDED


@pytest.mark.parametrize("eager", [True], indirect=True)
def test_a_run_without_end(caplog: pytest.LogCaptureFixture) -> None:
    """A step that comes back for ever is named."""
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(AssertionError, match=r"run \d+ does not end: .*never_well.* 100 times"),
    ):
        run_stages([(never_well, 1)])


def test_a_run_that_nobody_runs() -> None:
    """A run whose step somebody else has is told, step by step."""
    run = stages_started_elsewhere()
    said = rf"{run} does not end, and no message of it is left: .*add.* is running"
    with pytest.raises(AssertionError, match=said):
        run_stages(run)


def stages_started_elsewhere() -> StageRun:
    """Return a run whose only step a worker runs now."""
    with transaction.atomic():
        run = stages.start([(add, 1)])
        run.steps.update(status=Status.RUNNING)
        StageRun.objects.filter(pk=run.pk).update(status=Status.RUNNING)
        OutboxMessage.objects.all().delete()
    return run


def test_what_does_not_fit() -> None:
    """A run has its own params, key and name; and nothing is run inside of a transaction."""
    run = run_stages([(note, 1)])
    with pytest.raises(TypeError, match="has its own params"):
        run_stages(run, {})
    with pytest.raises(TypeError, match="has its own params, key: give a plan"):
        run_stages(run, {}, key="album:7")
    assert run_stages([(note, 1)], key="album:7").key == "album:7"
    with pytest.raises(WrongTransaction), transaction.atomic():
        run_stages([(note, 1)])
