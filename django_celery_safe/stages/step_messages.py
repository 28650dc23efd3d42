"""The messages of steps: carried through the outbox, or run here if tasks run eagerly."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, current_app, states
from django.db import transaction

from ..delivery.call import load_tasks
from ..delivery.header import HEADER, Header
from ..sending.capture import CAPTURED
from ..sending.commit import hold
from ..sending.followed import Fault, find_follower
from .entry_options import read_entry
from .plan import get_step_layer
from .step_table import StepTable

if TYPE_CHECKING:
    from ..models.stages import StageStep

#: Options of an entry that its message has.
OPTIONS: Final[tuple[str, ...]] = ("queue", "priority", "countdown")
#: The steps that wait while this thread runs other steps eagerly.
_eager = threading.local()


def send(store: StepTable, steps: Sequence[StageStep]) -> None:
    """Send the messages of steps, which are carried, when the open transaction commits."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if not all(step.task in app.tasks for step in steps):
        # A command or a web server may not have loaded them; a task knows its queue.
        load_tasks(app)
    if app.conf.task_always_eager:
        transaction.on_commit(lambda: _run_all(app, steps, store.alias), using=store.alias)
        return

    def send_all(**_: Any) -> None:
        for step in steps:
            args, kwargs, options = _message(app, step)
            task = app.tasks.get(step.task)
            if task is None:  # only other workers know it
                app.send_task(step.task, args, kwargs, **options)
            else:
                task.apply_async(args, kwargs, **options)
        captured = CAPTURED.get()
        for message in captured.messages if captured else ():
            headers = message.options["headers"]  # it is carried, whoever knows the task
            if "step" not in headers.get(HEADER, ()):
                continue  # a receiver of Celery's signals has sent it
            message.attempt = os.urandom(16).hex()
            ours = {"attempt": message.attempt, "using": store.alias}
            headers[HEADER] = {**headers[HEADER], **ours}

    hold(app, send_all, store.alias, {}, outbox=True)


def runs_eagerly() -> bool:
    """Return whether this thread runs a step eagerly, so that other steps wait for its end."""
    return getattr(_eager, "waiting", None) is not None


def _run_all(app: Celery, steps: Iterable[StageStep], alias: str) -> None:
    """Run steps here and now; each stage runs after the previous one, not nested in it."""
    waiting: list[StageStep] | None = getattr(_eager, "waiting", None)
    if waiting is not None:
        waiting += steps
        return
    _eager.waiting = waiting = list(steps)
    try:
        while waiting:
            _run_eagerly(app, waiting.pop(0), alias)
    finally:
        _eager.waiting = None


def _run_eagerly(app: Celery, step: StageStep, alias: str) -> None:
    args, kwargs, options = _message(app, step)
    options["headers"][HEADER]["using"] = alias
    error: Any = None
    try:
        result = app.tasks[step.task].apply(args, kwargs, **options)
        error = None if result.state in (states.SUCCESS, states.RETRY) else result.result
    except Exception as raised:
        error = raised  # with task_eager_propagates
        raise
    finally:
        follower = find_follower(Header(step=step.pk, using=alias))
        if error is not None and follower is not None:
            follower.fail(step.task_id, lambda: True, Fault.of(error))


def _message(app: Celery, step: StageStep) -> tuple[Any, ...]:
    """Return the arguments and options of a step's message; the params stay in the table."""
    task = app.tasks.get(step.task)
    place = {"run": step.run_id, "step": step.pk}
    args: tuple[Any, ...] = (place,)
    if task is not None and get_step_layer(task) is None:
        args = (place, step.task)
    header = Header(task=step.task, step=step.pk)
    arguments, given = read_entry(step.arguments_text)
    options = {name: given[name] for name in OPTIONS if name in given}
    return args, arguments, {"task_id": step.task_id, "headers": {HEADER: header}, **options}
