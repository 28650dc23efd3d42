"""
Recording ends of a carried task that its run can't record: a killed process, a revoked message.

Celery reports these to the main process of a worker. A relay handles all others, such as the
death of a whole worker, when the lease has expired.
"""

from __future__ import annotations

from typing import Any, Final

from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS

from ..delivery.header import Header, get_header, read_header
from ..delivery.worker import (
    connect_receivers,
    find_received,
    held_by_run,
    in_background,
    returns_after_time_limit,
    was_put_back,
)
from ..events import MESSAGE_FAILED
from ..foreign_errors import describe_error
from ..leases.holder import HOST
from ..transactions import TRIES
from .followed import Fault, fail_message, find_follower
from .message_table import message_table
from .outbox import EXPIRED

#: The error of a message whose task its worker does not know: Celery's name for it.
NOT_REGISTERED: Final = "NotRegistered"
FAILURE: Final = "That a carried task has ended could not be recorded; a relay sends it again."


def connect() -> None:
    """Connect to the signals that Celery sends in the main process of a worker."""
    connect_receivers(
        __name__,
        failure=_on_failure,
        revoked=_on_revoked,
        unknown=_on_unknown,
        rejected=_on_rejected,
    )


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Fail a task that was killed at its hard time limit, unless the broker redelivers it."""
    if not isinstance(exception, TimeLimitExceeded) or returns_after_time_limit(sender):
        return
    for request in find_received(task_id):
        _fail(get_header(request._context), sender.name, task_id, exception, is_running=True)


def _on_revoked(
    sender: Any, request: Context, terminated: bool, expired: bool, **kwargs: Any
) -> None:
    """Fail a task that expired or was revoked, before its run or during it."""
    # If this delivery never ran, another delivery of the message may be running.
    is_running = terminated and not was_put_back(request)
    error = RuntimeError(EXPIRED if expired else "The task was revoked.")
    _fail(get_header(request), sender.name, request.id or "", error, is_running=is_running)


def _on_unknown(name: str, message: Any, **kwargs: Any) -> None:
    """Record in the row that this worker does not know the task; another worker may know it."""
    _note(message, NOT_REGISTERED, f"A worker on {HOST} does not know the task {name}.")


def _on_rejected(message: Any, exc: Exception | None, **kwargs: Any) -> None:
    """Record in the row that this worker refused to read the message; another may accept it."""
    if exc is not None:
        said = f"A worker on {HOST} refused the message: {describe_error(exc)}"
        _note(message, type(exc).__name__, said)


def _note(message: Any, error_type: str, text: str) -> None:
    from ..models.text import storable  # needs the app registry

    headers = message.headers or {}
    header = read_header(headers, headers.get("task"))
    if "attempt" not in header:
        return
    table = message_table(header.get("using", DEFAULT_DB_ALIAS))
    unclaimed = table.at(header["attempt"]).filter(token="", due_at__isnull=False)

    def note() -> None:
        follower = find_follower(header)
        if unclaimed.update(error=storable(text)) and follower is not None:
            follower.note(headers.get("id") or "", Fault(error_type, text))

    in_background(note, table.close, FAILURE)


def _fail(
    header: Header, task: str, task_id: str, error: BaseException, *, is_running: bool
) -> None:
    if "attempt" not in header:
        return
    table = message_table(header.get("using", DEFAULT_DB_ALIAS))
    is_of_worker, follower = held_by_run(task_id), find_follower(header)

    def fail() -> None:
        # A process that is being killed may give its claim back between the look and the update.
        for _ in range(TRIES):
            row = table.find(header["attempt"])
            if row is None or row.due_at is None:
                return
            if row.token and not (is_running and is_of_worker(row)):
                return
            # A row that has ended meanwhile has an empty token, too.
            unended = table.at(header["attempt"]).filter(due_at__isnull=False)
            if fail_message(follower, task_id, unended, row.token, Fault.of(error)):
                said = describe_error(error)
                if follower is None:
                    MESSAGE_FAILED.emit(_fail, task=task, task_id=task_id, error=said)
                return

    in_background(fail, table.close, FAILURE)
