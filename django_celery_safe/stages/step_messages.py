"""The messages of steps: sent through the outbox, or run here if tasks run eagerly."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery, current_app
from django.db import transaction

from ..delivery.call import load_tasks
from ..delivery.header import Header, with_header
from ..sending.commit import hold
from .plan import get_step_layer
from .step_table import StepTable

if TYPE_CHECKING:
    from ..models.stages import StageStep

#: The steps that wait while this thread runs other steps eagerly.
_eager = threading.local()


def send(store: StepTable, steps: Sequence[StageStep], *, with_countdown: bool = False) -> None:
    """
    Send the messages of steps through the outbox when the open transaction commits.

    Args:
        with_countdown: Whether to apply the steps' countdowns, which have already passed when
            a sweep re-sends them.
    """
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if not all(step.task in app.tasks for step in steps):
        # A command or a web server may not have loaded them; a task knows its queue.
        load_tasks(app)
    if app.conf.task_always_eager:
        transaction.on_commit(lambda: _run_eagerly(app, steps), using=store.alias)
        return

    def send_all(given: dict[str, Any]) -> None:
        for step in steps:
            args, kwargs, options = _message(app, step, with_countdown=with_countdown)
            task = app.tasks.get(step.task)
            if task is None:  # only other workers know it
                app.send_task(step.task, args, kwargs, **options)
            else:
                task.apply_async(args, kwargs, **options)

    hold(app, send_all, store.alias, {}, outbox=True, canvas=True)


def runs_eagerly() -> bool:
    """Return whether this thread runs a step eagerly, so that other steps wait for its end."""
    return getattr(_eager, "waiting", None) is not None


def _run_eagerly(app: Celery, steps: Iterable[StageStep]) -> None:
    """Run steps here and now; each stage runs after the previous one, not nested in it."""
    waiting: list[StageStep] | None = getattr(_eager, "waiting", None)
    if waiting is not None:
        waiting += steps
        return
    _eager.waiting = waiting = list(steps)
    try:
        while waiting:
            step = waiting.pop(0)
            args, kwargs, options = _message(app, step)
            app.tasks[step.task].apply(args, kwargs, **options)
    finally:
        _eager.waiting = None


def _message(app: Celery, step: StageStep, *, with_countdown: bool = False) -> tuple[Any, ...]:
    """Return the arguments and options of a step's message; the params stay in the table."""
    task = app.tasks.get(step.task)
    place = {"run": step.run_id, "step": step.pk}
    args: tuple[Any, ...] = (place,)
    if task is not None and get_step_layer(task) is None:
        args = (place, step.task)
    header = Header(task=step.task, step=step.pk)
    names = ("queue", "priority", "countdown") if with_countdown else ("queue", "priority")
    arguments, given = step.parts
    options = {name: given[name] for name in names if name in given}
    return args, arguments, with_header({"task_id": step.task_id, **options}, header)
