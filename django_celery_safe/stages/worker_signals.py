"""
Ends of a step's message that its own process can't record: killed, or revoked.

Celery reports these to a worker's main process. Its signals also report whether a task with
``autoretry_for`` will retry, which can't be seen inside the step's function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from django.db import DatabaseError

from ..delivery.header import get_header, read_header
from ..delivery.worker import (
    connect_receivers,
    held_by_run,
    in_background,
    returns_after_time_limit,
    was_put_back,
)
from ..foreign_errors import text_of
from ..leases.holder import HOST
from ..sending import SafeTaskMixin
from ..transactions import lacks_table
from . import engine
from .engine import StepError
from .plan import get_step_layer
from .running import attempt_of
from .status import NOT_REGISTERED
from .step_table import step_table

if TYPE_CHECKING:
    from ..models.stages import StageStep

FAILURE: Final = "Could not record that a step's message has ended; a sweep will find its run."


def connect() -> None:
    """Connect to the signals of failed, retried, revoked, unknown and refused messages."""
    connect_receivers(
        __name__,
        failure=_on_failure,
        retry=_on_retry,
        revoked=_on_revoked,
        unknown=_on_unknown,
        rejected=_on_rejected,
    )


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Fail the step of a task that does not retry again, or that hit its time limit."""
    if isinstance(exception, WorkerLostError):
        return  # the message may be redelivered; otherwise a sweep re-sends it
    if isinstance(exception, TimeLimitExceeded):
        if not returns_after_time_limit(sender) and _may_be_step(sender):
            _fail_in_background(None, task_id, exception, held_by_run(task_id))
        return
    request = sender.request
    pk = get_header(request).get("step")
    if pk is None or request.id != task_id:
        return
    attempt = attempt_of(request)
    if attempt.is_decided or attempt.pid != os.getpid():
        return
    engine.fail_attempt(
        step_table(), pk, task_id, StepError.of(exception), lambda step: step.token == attempt.token
    )


def _on_retry(sender: Any, request: Context, reason: Any = None, **kwargs: Any) -> None:
    """Record when the retried message of a step should arrive."""
    pk = get_header(request).get("step")
    if pk is not None and not request.is_eager:
        step_table().await_retry(pk, request.id or "", reason)


def _on_revoked(
    sender: Any, request: Context, terminated: bool, expired: bool, **kwargs: Any
) -> None:
    """Fail the step of a message that will never run, or whose task was terminated."""
    pk = get_header(request).get("step")
    if pk is None:
        return
    error = RuntimeError(f"The task {'expired before it was begun' if expired else 'was revoked'}.")
    # If this delivery ran nowhere, another delivery of the message may still be running.
    task_id = request.id or ""
    is_running = terminated and not was_put_back(request)
    ours = held_by_run(task_id) if is_running else _is_nobodys
    _fail_in_background(pk, task_id, error, ours)


def _on_unknown(message: Any, name: str | None, **kwargs: Any) -> None:
    """Record that a worker dropped the step's message because it does not know the task."""
    why = "since it does not know the task: it runs another release, or does not import the module."
    _note(message, NOT_REGISTERED, why)


def _on_rejected(message: Any, exc: Exception | None, **kwargs: Any) -> None:
    """Record that a worker refused to read the step's message."""
    if exc is not None:
        _note(message, type(exc).__name__, f"which it refused: {text_of(exc)}.")


def _note(message: Any, error_type: str, why: str) -> None:
    headers = getattr(message, "headers", None) or {}
    pk = read_header(headers, headers.get("task")).get("step")
    if pk is None:
        return
    store = step_table()
    text = f"A worker on {HOST} dropped the message, {why} A sweep sends the message again later."

    def record() -> None:
        from ..models.text import storable  # needs the app registry

        waiting = store.at(str(pk)).attempt(headers.get("id") or "").waiting()
        waiting.update(error_type=error_type, error=storable(text))

    in_background(record, store.close, FAILURE)


def _fail_in_background(
    pk: int | None, task_id: str, error: BaseException, ours: Callable[[Any], bool]
) -> None:
    store = step_table()

    def fail() -> None:
        from ..models.stages import StageStep  # needs the app registry

        try:
            engine.fail_attempt(store, pk, task_id, StepError.of(error), ours)
        except DatabaseError:
            if not lacks_table(store.alias, StageStep):
                raise

    in_background(fail, store.close, FAILURE)


def _may_be_step(task: Any) -> bool:
    return isinstance(task, SafeTaskMixin) or get_step_layer(task) is not None


def _is_nobodys(step: StageStep) -> bool:
    return False
