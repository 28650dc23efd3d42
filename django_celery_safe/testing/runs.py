"""Running stages in this process, from the first step to the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, current_app

from ..sending.outbox import message_table
from ..stages import engine, step_messages
from ..stages.engine import table_in
from ..stages.plan import Plan
from ..stages.status import Status
from .deliveries import deliver, refuse_transaction, take
from .messages import Sent, kept_from_broker

if TYPE_CHECKING:
    from ..models.stages import StageRun

#: How many times :func:`run_stages` runs the message of one step before it gives up.
MOST_RETURNS: Final = 100


def run_stages(
    run_or_plan: StageRun | Plan | Mapping[str, Any] | Iterable[Any],
    params: Mapping[str, Any] | None = None,
    **labels: Any,
) -> StageRun:
    """
    Run a plan of stages in this process until it stops, even by a failure, and return its run.

    The message of each step is run once, as in :func:`deliver_twice`, and again at once if its
    task is retried. Other messages that steps send are neither published nor run.

    Args:
        run_or_plan: A plan, as for ``stages.start``; or a run, to continue it.
        params: See ``stages.start``; not allowed with a run, which has its own.
        labels: ``key``, ``name`` and ``url``, as for ``stages.start``; not allowed with a run.

    Returns:
        The run, re-read from the database. After a failed step, see its ``status`` and
        ``error_step``.

    Raises:
        ConfigurationError: The plan can't be run.
        AssertionError: The run does not end.
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a step.
    """
    from ..models.stages import StageRun  # needs the app registry

    refuse_transaction("run_stages")
    with kept_from_broker(current_app, outbox_too=True) as sent:
        if not isinstance(run_or_plan, StageRun):
            run = engine.start(run_or_plan, params, **labels)
        elif params is not None or labels:
            raise TypeError(
                f"{run_or_plan} has its own params and labels: give a plan, or no others."
            )
        else:
            run = run_or_plan
            _send_again(run)
        returns = Counter[str]()
        while (found := _take_step(run)) is not None:
            app, message = found
            returns[message.task_id] += 1
            if returns[message.task_id] > MOST_RETURNS:
                raise AssertionError(
                    f"{run} does not end: the message of {message} came back {MOST_RETURNS} times."
                )
            deliver(app, message, sent)
    run.refresh_from_db()
    if run.status not in Status.STOPPED:
        left = ", ".join(f"{step} is {step.status}" for step in run.steps.unfinished())
        raise AssertionError(f"{run} does not end, and no message of it is left: {left}.")
    return run


def _send_again(run: StageRun) -> None:
    """Re-send the messages that a run's stage waits for; a TestCase may have kept them."""
    run.refresh_from_db()
    store = table_in(run.find_database())
    steps = list(store.steps.filter(run=run.pk, stage=run.stage).waiting())
    message_table(store.alias).all().carried(*(step.task_id for step in steps)).erase()
    step_messages.send(store, steps)


def _take_step(run: StageRun) -> tuple[Celery, Sent] | None:
    """Take the next message of a run's steps out of the outbox."""
    ids = run.steps.open().values_list("task_id", flat=True)
    return take(message_table(run.find_database()).all().carried(*ids))
