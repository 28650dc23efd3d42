"""
Ends of a carried task's message that its run can't tell: a killed process, a revoked message.

Celery tells the main process of a worker of these. What it is not told of, such as the death of
a whole worker, a relay finds when the lease is over.
"""

from __future__ import annotations

from typing import Any, Final

from celery import signals
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS

from ..delivery.header import Header, get_header, read_header
from ..delivery.worker import find_received, in_background, was_put_back
from ..events import MESSAGE_FAILED
from ..exceptions import describe_error
from ..leases.holder import HOST, decode_holder
from ..locks import HeldLock
from .carried import message_table
from .outbox import EXPIRED

#: Name under which the receivers are connected, once in each process.
UID: Final = "django_celery_safe.carried"

FAILURE: Final = "That a carried task has ended could not be recorded; a relay sends it again."


def connect() -> None:
    """Listen to the ends of messages of which the main process of a worker is told."""
    signals.task_failure.connect(_on_failure, dispatch_uid=UID)
    signals.task_revoked.connect(_on_revoked, dispatch_uid=UID)
    signals.task_unknown.connect(_on_unknown, dispatch_uid=UID)


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Fail a task whose process was killed at its hard time limit, unless it comes again."""
    if not isinstance(exception, TimeLimitExceeded):
        return
    if sender.acks_late and not getattr(sender, "acks_on_timeout", True):
        return
    for request in find_received(task_id):
        _fail(get_header(request._context), sender.name, task_id, exception, is_running=True)


def _on_revoked(
    sender: Any, request: Context, terminated: bool, expired: bool, **kwargs: Any
) -> None:
    """Fail a task that is never run, or whose run was ended."""
    # Another delivery of a message that ran nowhere may run nevertheless.
    is_running = terminated and not was_put_back(request)
    error = RuntimeError(EXPIRED if expired else "The task was revoked.")
    _fail(get_header(request), sender.name, request.id or "", error, is_running=is_running)


def _on_unknown(name: str, message: Any, **kwargs: Any) -> None:
    """Say in the row that this worker does not know the task: another one may."""
    header = read_header(message.headers, name)
    if "attempt" not in header:
        return
    table = message_table(header.get("using", DEFAULT_DB_ALIAS))
    text = f"A worker on {HOST} does not know the task {name}."
    in_background(
        lambda: table.at(header["attempt"]).filter(token="").update(error=text),
        table.close,
        FAILURE,
    )


def _fail(
    header: Header, task: str, task_id: str, error: BaseException, *, is_running: bool
) -> None:
    if "attempt" not in header:
        return
    table = message_table(header.get("using", DEFAULT_DB_ALIAS))

    def fail() -> None:
        row = table.find(header["attempt"])
        if row is None or row.due_at is None:
            return
        if row.token and not (is_running and _is_of_host(row)):
            return
        if table.at(header["attempt"]).fail_task(
            row.token, type(error).__name__, str(error).strip(), ""
        ):
            said = describe_error(error)
            MESSAGE_FAILED.emit(_fail, task=task, task_id=task_id, error=said)

    in_background(fail, table.close, FAILURE)


def _is_of_host(row: Any) -> bool:
    return decode_holder(row.holder, HeldLock("")).holder.host == HOST
