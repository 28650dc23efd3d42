"""Runs of stages that ``testing`` brings to their end."""

import logging

import pytest
from celery import Celery
from django.db import transaction

from django_celery_safe import WrongTransaction, stages
from django_celery_safe.models import OutboxMessage, StageRun
from django_celery_safe.stages import Status
from django_celery_safe.testing import drain_outbox, run_stages
from tests.stages.tasks import add, crash, note, plain, reconnect
from tests.stages.test_messages import shown
from tests.testing.tasks import effects, never_well, step_that_sends


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(False, marks=pytest.mark.django_db(transaction=True), id="messages"),
        pytest.param(True, marks=pytest.mark.django_db, id="eager"),
    ],
)
def eager(request: pytest.FixtureRequest, unreachable: Celery) -> None:
    """The project's tasks run eagerly, in a transaction; otherwise commits are real."""
    unreachable.conf.task_always_eager = request.param


def test_a_plan_is_run() -> None:
    """Stages run one after the other, with the params and states that workers see."""
    run = run_stages([(step_that_sends, 3), (step_that_sends, 2), (plain, 1)], {"album": 7})
    assert (run.status, shown(run)) == (Status.SUCCEEDED, "sss")
    assert run.params == {"album": 7, "sent": 2, "plain": plain.name}
    assert effects == [("running", ["album"]), ("running", ["album", "sent"])]
    assert run.ended_at is not None
    assert OutboxMessage.objects.count() == 0


def test_a_failing_step_fails_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """A step that raises fails its run, which begins there again when it is resumed."""
    run = run_stages([(add, 3), (crash, 2), (note, 1)])
    assert (run.status, shown(run)) == (Status.FAILED, "sfa")
    assert run.error_step is not None
    assert run.error_step.error_type == "ValueError"
    StageRun.objects.filter(pk=run.pk).update(params_text='{"sum": 1, "well": true}')
    run.refresh_from_db()
    assert run_stages(run.resume()).status == Status.SUCCEEDED


def test_retries_are_run() -> None:
    """A step that Celery retries is run until it is well."""
    run = run_stages([(reconnect, 2), (add, 1, {"number": 4})])
    assert (run.status, run.params) == (Status.SUCCEEDED, {"retries": 2, "sum": 4})


def test_a_run_goes_on() -> None:
    """A run that tested code started is run, where a TestCase kept it."""
    with transaction.atomic():
        run = stages.start([(add, 2), (add, 1)])
    assert run_stages(run).status == Status.SUCCEEDED
    assert run.params == {"sum": 2}
    with drain_outbox() as done:
        pass
    assert done == []
    assert run_stages(run) is run


def test_a_run_without_end(caplog: pytest.LogCaptureFixture) -> None:
    """A step that is retried for ever is named."""
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(AssertionError, match=r"run \d+ does not end: .*never_well.* 100 times"),
    ):
        run_stages([(never_well, 1)])


def test_a_run_whose_step_another_process_runs() -> None:
    """It does not end here, and the error says which step it waits for."""
    with transaction.atomic():
        run = stages.start([(add, 1)])
        run.steps.update(status=Status.RUNNING)
        StageRun.objects.filter(pk=run.pk).update(status=Status.RUNNING)
        OutboxMessage.objects.all().delete()
    said = rf"{run} does not end, and no message of it is left: .*add.* is running"
    with pytest.raises(AssertionError, match=said):
        run_stages(run)


def test_what_does_not_fit() -> None:
    """A run has its own params, key and name; and nothing is run inside of a transaction."""
    run = run_stages([(note, 1)], key="album:7")
    assert run.key == "album:7"
    for labels in ({"params": {}}, {"key": "album:8"}):
        with pytest.raises(TypeError, match="has its own params and labels"):
            run_stages(run, **labels)
    with pytest.raises(WrongTransaction), transaction.atomic():
        run_stages([(note, 1)])
