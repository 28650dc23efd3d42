"""The messages of steps: sent through the outbox, or run here where tasks run eagerly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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

#: The steps that wait where this thread runs others eagerly.
_eager = threading.local()


def send(
    store: StepTable, steps: Sequence[StageStep], emit: Callable[[], object] = lambda: None
) -> None:
    """
    Send the messages of steps, through the outbox, when the open transaction commits.

    Args:
        emit: Emits it; what that leaves for the commit is forgotten if they can't be sent.
    """
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if not all(step.task in app.tasks for step in steps):
        # A command or a web server may not have yet, and a task knows its queue.
        load_tasks(app)
    if app.conf.task_always_eager:
        emit()
        transaction.on_commit(lambda: _run_eagerly(app, steps), using=store.alias)
        return

    def send_all(given: dict[str, Any]) -> None:
        emit()
        for step in steps:
            args, kwargs, options = _message(app, step)
            task = app.tasks.get(step.task)
            if task is None:  # another worker's
                app.send_task(step.task, args, kwargs, **options)
            else:
                task.apply_async(args, kwargs, **options)

    hold(app, send_all, store.alias, {}, outbox=True, canvas=True)


def runs_eagerly() -> bool:
    """Return whether a step runs eagerly in this thread, so that others wait for its end."""
    return getattr(_eager, "waiting", None) is not None


def _run_eagerly(app: Celery, steps: Iterable[StageStep]) -> None:
    """Run steps here and now, each stage after the one before, not inside of it."""
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


def _message(app: Celery, step: StageStep) -> tuple[Any, ...]:
    """Return arguments and options of a step's message; its params stay in the table."""
    task = app.tasks.get(step.task)
    place = {"run": step.run_id, "step": step.pk}
    args: tuple[Any, ...] = (place,)
    if task is not None and get_step_layer(task) is None:
        args = (place, step.task)
    header = Header(task=step.task, step=step.pk, by_call=True)
    return args, step.arguments, with_header({"task_id": step.task_id}, header)
