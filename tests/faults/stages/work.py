"""
The steps of the runs, which note what they do outside of the package's tables.

A process that imports this also records the package's signals, if the settings say where.
"""

import time
from typing import Any

from celery import shared_task
from django.dispatch import receiver

from django_celery_safe import SafeTask, stages
from django_celery_safe.models import StageRun, StageStep
from django_celery_safe.signals import run_repaired, stage_started, step_lost, step_succeeded
from tests.faults.stages import twice
from tests.faults.stages.plan import Witness, find_witness

Params = dict[str, Any]


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def late(params: Params, run: StageRun, step: StageStep, seconds: float, beat: float) -> Params:
    """Work; the broker has the message until this has ended."""
    return work(params, step, seconds, beat)


@shared_task(base=SafeTask)
@stages.step
def early(params: Params, run: StageRun, step: StageStep, seconds: float, beat: float) -> Params:
    """Work; a kill of its process loses the message."""
    return work(params, step, seconds, beat)


def work(params: Params, step: StageStep, seconds: float, beat: float) -> Params:
    """Be inside for a while; return what says that this step was done."""
    witness = find_witness()
    assert witness is not None
    place = {"step": step.pk, "run": step.run_id, "stage": step.stage - 1}
    with witness.room.inside(str(step.pk)):
        witness.steps.write("begun", known=len(params), **place)
        time.sleep(seconds)
        time.sleep(-time.monotonic() % beat if beat else 0)
        witness.steps.write("ended", **place)
    return {f"{step.stage - 1}.{step.position}": True}


def connect(witness: Witness) -> None:
    """Note what the package tells."""
    signals = witness.signals

    @receiver(stage_started, weak=False)
    def note_stage(run: int, stage: int, **kwargs: Any) -> None:
        signals.write("stage", run=run, stage=stage - 1)

    @receiver(step_succeeded, weak=False)
    def note_success(step: int, **kwargs: Any) -> None:
        signals.write("succeeded", step=step)

    @receiver(step_lost, weak=False)
    def note_loss(step: int, **kwargs: Any) -> None:
        signals.write("lost", step=step)

    @receiver(run_repaired, weak=False)
    def note_repair(run: int, task_id: str, reason: str, **kwargs: Any) -> None:
        signals.write("repaired", run=run, task_id=task_id, reason=reason)


if (_witness := find_witness()) is not None:
    connect(_witness)
    twice.connect(_witness)
