"""The messages of steps: carried through the outbox, or run here if tasks run eagerly."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery, current_app, states
from django.db import transaction

from ..delivery.call import load_tasks
from ..delivery.header import HEADER, Header
from ..sending.commit import hold
from ..sending.followed import Fault, find_follower
from ..sending.outbox import UNTIL_DONE
from .plan import get_step_layer, read_entry

if TYPE_CHECKING:
    from ..models.stages import StageStep
    from .engine import StepTable

#: The steps that wait while this thread runs other steps eagerly.
_eager = threading.local()


def send(store: StepTable, steps: Sequence[StageStep]) -> None:
    """Send the messages of steps, which are carried, when the open transaction commits."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if not all(step.task in app.tasks for step in steps):
        # A command or a web server may not have loaded them; a task knows its queue.
        load_tasks(app)
    if app.conf.task_always_eager:
        transaction.on_commit(lambda: _run_all(app, steps), using=store.alias)
        return

    def send_all(**_: Any) -> None:
        for step in steps:
            args, kwargs, options = _message(app, step)
            # A signature also sends a task that only other workers know.
            app.signature(step.task).apply_async(args, kwargs, **options)

    hold(app, send_all, store.alias, {}, UNTIL_DONE)


def runs_eagerly() -> bool:
    """Return whether this thread runs a step eagerly, so that other steps wait for its end."""
    return getattr(_eager, "waiting", None) is not None


def _run_all(app: Celery, steps: Iterable[StageStep]) -> None:
    """Run steps here and now; each stage runs after the previous one, not nested in it."""
    waiting: list[StageStep] | None = getattr(_eager, "waiting", None)
    if waiting is not None:
        waiting += steps
        return
    _eager.waiting = waiting = list(steps)
    try:
        while waiting:
            _run_eagerly(app, waiting.pop(0))
    finally:
        _eager.waiting = None


def _run_eagerly(app: Celery, step: StageStep) -> None:
    args, kwargs, options = _message(app, step)
    error: Any = None
    try:
        result = app.tasks[step.task].apply(args, kwargs, **options)
        error = None if result.state in (states.SUCCESS, states.RETRY) else result.result
    except Exception as raised:
        error = raised  # with task_eager_propagates
        raise
    finally:
        follower = find_follower(options["headers"][HEADER])
        if error is not None and follower is not None:
            follower.fail(step.task_id, lambda: True, Fault.of(error))


def _message(app: Celery, step: StageStep) -> tuple[Any, ...]:
    """Return the arguments and options of a step's message; the params stay in the table."""
    task = app.tasks.get(step.task)
    place = {"run": step.run_id, "step": step.pk}
    is_plain = task is not None and get_step_layer(task) is None
    args = (place, step.task) if is_plain else (place,)
    header = Header(task=step.task, step=step.pk, using=step._state.db)
    arguments, options = read_entry(step.arguments_text)
    options.pop("retries", None)  # the step itself counts them
    return args, arguments, {"task_id": step.task_id, "headers": {HEADER: header}, **options}
