"""Runs of stages from their first step to their last, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import Celery
from django.db import transaction

from ..stages import engine, step_messages
from ..stages.plan import Plan
from ..stages.status import Status
from ..stages.step_table import StepTable
from .deliveries import deliver, get_app, refuse_transaction, relaying, rows_of, take
from .messages import Sent

if TYPE_CHECKING:
    from ..models.stages import StageRun

#: How often the message of one step may come back in :func:`run_stages`.
MOST_RETURNS: Final = 100


def run_stages(
    run_or_plan: StageRun | Plan | Mapping[str, Any] | Iterable[Any],
    params: Mapping[str, Any] | None = None,
) -> StageRun:
    """
    Run a plan of stages in this process until it ends, well or not, and return its run.

    Each step is a message that is run as in :func:`deliver_twice`, once, and again at once if its
    task is retried. What steps send besides is neither published nor run.

    Args:
        run_or_plan: What ``stages.start`` takes; or a run, which goes on from where it is.
        params: As for ``stages.start``; not with a run, which has its own.

    Returns:
        The run, read anew. That a step failed is in its ``status`` and ``error_step``.

    Raises:
        InvalidPlan: The plan can't be run.
        AssertionError: It does not end: a step comes back again and again, or waits for what
            nobody does.
        WrongTransaction: Inside ``atomic()``, where no worker runs a step.
    """
    from ..models.stages import StageRun  # needs the app registry

    refuse_transaction("run_stages")
    with relaying(get_app()) as sent:
        if not isinstance(run_or_plan, StageRun):
            run = engine.start(run_or_plan, params)
        elif params is not None:
            raise TypeError(f"{run_or_plan} has params of its own: give a plan, or no params.")
        else:
            run = run_or_plan
            _send_again(run)
        returns, retried = Counter[str](), list[Sent]()
        while (found := _take_step(run, retried)) is not None:
            app, message = found
            returns[message.task_id] += 1
            if returns[message.task_id] > MOST_RETURNS:
                raise AssertionError(
                    f"{run} does not end: the message of {message} came back {MOST_RETURNS} times."
                )
            retried += deliver(app, message, sent).sent
    run.refresh_from_db()
    if run.status not in Status.STOPPED:
        left = ", ".join(f"{step} is {step.status}" for step in run.steps.unfinished())
        raise AssertionError(f"{run} does not end, and no message of it is left: {left}.")
    return run


def _send_again(run: StageRun) -> None:
    """Send what a run's stage waits for: a TestCase may have kept it, or the outbox has it."""
    run.refresh_from_db()
    store = StepTable(run.find_database())
    if run.status in Status.STOPPED:
        return
    with transaction.atomic(using=store.alias):
        steps = list(store.steps().filter(run=run.pk, stage=run.stage).waiting())
        rows_of(store.alias).filter(task_id__in=[step.task_id for step in steps]).erase()
        step_messages.send(store, steps)


def _take_step(run: StageRun, retried: list[Sent]) -> tuple[Celery, Sent] | None:
    """Take the next message of a run's steps: from the outbox, or one that was retried."""
    ids = set(run.steps.values_list("task_id", flat=True))
    found = take(rows_of(run.find_database()).filter(task_id__in=ids))
    again = [one for one in retried if one.task_id in ids]
    if found is not None or not again:
        return found
    retried.remove(again[0])
    return get_app(), again[0]
