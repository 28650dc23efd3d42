"""
Recording ends of a carried task that its run did not record, or can't: its process was killed.

A relay handles all others, such as the death of a whole worker, when the lease has expired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery import states
from celery.backends.base import DisabledBackend
from django.db import DEFAULT_DB_ALIAS

from ..databases import Now
from ..delivery.endings import Outcome
from ..delivery.worker import in_background, is_dead_soon
from ..events import MESSAGE_FAILED
from ..leases.holder import HOST, HeldLock, decode_holder
from ..texts import describe_error, storable
from ..transactions import TRIES
from .carried import end_run
from .followed import Fault, fail_message, find_follower
from .message_table import ENDED, MessageTable, message_table

#: The error of a message whose task its worker does not know: Celery's name for it.
NOT_REGISTERED: Final = "NotRegistered"
FAILURE: Final = "That a carried task has ended could not be recorded; a relay sends it again."


def record(outcome: Outcome) -> None:
    """Record in the row of a carried message how the message, or its run, has ended."""
    match outcome.kind:
        case "succeeded" | "failed" | "retried" | "over":
            end_run(outcome)
        case _ if "attempt" not in outcome.header:
            return
        case "terminated" | "revoked" | "expired":
            _in_background(_fail, outcome)
        case "timed out" if not outcome.comes_again:
            _in_background(_fail, outcome)
        case "lost":
            _in_background(_follow_death, outcome)
        case "unknown":
            _in_background(_note, outcome)
        case "undecodable" if outcome.error is not None:
            _in_background(_note, outcome)


def _in_background(act: Callable[[MessageTable, Outcome], object], outcome: Outcome) -> None:
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))
    in_background(lambda: act(table, outcome), table.close, FAILURE)


def _note(table: MessageTable, outcome: Outcome) -> None:
    """Record in the row why this worker can't run the message; another may run it."""
    kind, text = (
        type(outcome.error).__name__,
        f"refused the message: {describe_error(outcome.error)}",
    )
    if outcome.kind == "unknown":
        kind, text = NOT_REGISTERED, f"does not know the task {outcome.request.task}."
    text, follower = f"A worker on {HOST} {text}", find_follower(outcome.header)
    rows = table.at(outcome.header["attempt"]).exclude(state="running")
    noted = rows.filter(due_at__isnull=False).update(error=storable(text))
    if noted and follower is not None:
        follower.note(outcome.task_id, Fault(kind, text))


def _follow_death(table: MessageTable, outcome: Outcome) -> None:
    """Let a relay send a task whose process was killed again before its lease is over."""
    row = table.find(outcome.header["attempt"])
    if row is None:
        has_ended = not table.goes_on(outcome.task_id)  # a retry has another attempt
    else:
        has_ended = row.state in ENDED
        if _is_of(outcome, row) and is_dead_soon(outcome.pid or 0):
            table.at(outcome.header["attempt"]).claimed(row.token).update(due_at=Now())
    if has_ended:
        _store_failure(outcome)


def _store_failure(outcome: Outcome) -> None:
    """Store a failure, as Celery does, if the row has ended but no result was stored."""
    task, request = outcome.task, outcome.request
    backend: Any = task.backend
    if isinstance(backend, DisabledBackend):
        return  # the project stores no results
    if backend.get_state(outcome.task_id) not in states.READY_STATES:
        stores = not request.ignore_result or task.store_errors_even_if_ignored
        backend.mark_as_failure(
            outcome.task_id, outcome.error, request=request, store_result=stores
        )


def _fail(table: MessageTable, outcome: Outcome) -> None:
    """Fail a task that was killed for good, or whose message never runs."""
    error = outcome.error
    # A process that is being killed may give its claim back between the look and the update.
    for _ in range(TRIES):
        row = table.find(outcome.header["attempt"])
        if row is None or row.due_at is None:
            return
        if row.state == "running" and not _is_of(outcome, row):
            return
        # A row that has ended meanwhile has an empty token, too.
        unended = table.at(outcome.header["attempt"]).filter(due_at__isnull=False)
        follower = find_follower(outcome.header)
        if fail_message(follower, outcome.task_id, unended, row.token, Fault.of(error)):
            said = describe_error(error)
            if follower is None:
                MESSAGE_FAILED.emit(
                    _fail, task=outcome.task.name, task_id=outcome.task_id, error=said
                )
            return


def _is_of(outcome: Outcome, row: Any) -> bool:
    """Return whether the run whose process was killed holds the row."""
    held_by = decode_holder(row.holder, HeldLock("")).holder
    return row.state == "running" and outcome.ended(held_by)
