"""
Ends of a step's message that its run can't tell: a killed process, a revoked message.

Celery tells the main process of a worker of these. It also tells whether a task that
retries by itself will do so, which shows only outside of the step's function.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.utils.time import maybe_make_aware
from django.db import DatabaseError
from django.db.models.functions import Now

from ..delivery.header import get_header
from ..delivery.worker import in_background, was_put_back
from ..leases.holder import HOST, decode_holder
from ..locks import HeldLock
from ..sending import SafeTaskMixin
from ..transactions import lacks_table
from . import engine
from .engine import StepError
from .plan import get_step_layer
from .running import attempt_of
from .step_table import step_table

if TYPE_CHECKING:
    from ..models.stages import StageStep

#: Name under which the receivers are connected, once in each process.
UID: Final = "django_celery_safe.stages"

FAILURE: Final = "That a step's message has ended could not be noted; a sweep will find its run."


def connect() -> None:
    """Listen to the ends of messages, and to retries."""
    signals.task_failure.connect(_on_failure, dispatch_uid=UID)
    signals.task_retry.connect(_on_retry, dispatch_uid=UID)
    signals.task_revoked.connect(_on_revoked, dispatch_uid=UID)


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Fail the step of a task that retries no more, or of a run that took too long."""
    if isinstance(exception, WorkerLostError):
        return  # it may be delivered again; if not, a sweep sends it
    if isinstance(exception, TimeLimitExceeded):
        comes_again = sender.acks_late and not getattr(sender, "acks_on_timeout", True)
        if not comes_again and _may_be_step(sender):
            _fail_in_background(None, task_id, exception, _is_of_host)
        return
    request = sender.request
    pk = get_header(request).get("step")
    if pk is None or request.id != task_id or (attempt := attempt_of(request)).is_decided:
        return
    engine.fail_attempt(
        step_table(),
        pk,
        task_id,
        StepError.of(exception),
        lambda step: step.token == attempt.token,
    )


def _on_retry(sender: Any, request: Context, reason: Any = None, **kwargs: Any) -> None:
    """Note when the step's message is to be there again."""
    pk = get_header(request).get("step")
    when = getattr(reason, "when", None)
    if pk is None or when is None or request.is_eager:
        return
    if isinstance(when, datetime):
        when = (maybe_make_aware(when) - datetime.now(UTC)).total_seconds()
    rows = step_table().at(str(pk)).attempt(request.id or "").waiting()
    rows.update(due_at=Now() + timedelta(seconds=float(when)))


def _on_revoked(
    sender: Any, request: Context, terminated: bool, expired: bool, **kwargs: Any
) -> None:
    """Fail the step of a message that is never run, or of a run that was ended."""
    pk = get_header(request).get("step")
    if pk is None:
        return
    error = RuntimeError(f"The task {'expired before it was begun' if expired else 'was revoked'}.")
    # Another delivery of a message that ran nowhere may run nevertheless.
    ours = _is_of_host if terminated and not was_put_back(request) else _is_nobodys
    _fail_in_background(pk, request.id or "", error, ours)


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


def _is_of_host(step: StageStep) -> bool:
    return decode_holder(step.holder, HeldLock("")).holder.host == HOST


def _is_nobodys(step: StageStep) -> bool:
    return False
