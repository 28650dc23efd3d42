"""
Recording ends of a carried task that its run did not record, or can't: its process was killed.

A relay handles all others, such as the death of a whole worker, when the lease has expired.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS

from ..databases import Now
from ..delivery.endings import Outcome
from ..delivery.worker import in_background, is_dead_soon
from ..events import MESSAGE_FAILED
from ..foreign_errors import describe_error
from ..leases.holder import HOST, HeldLock, Holder, decode_holder
from ..transactions import TRIES
from .carried import end_run
from .message_table import message_table

FAILURE: Final = "That a carried task has ended could not be recorded; a relay sends it again."


def record(outcome: Outcome) -> None:
    """Record in the row of a carried message how the message, or its run, has ended."""
    match outcome.kind:
        case "succeeded" | "failed" | "retried" | "over":
            end_run(outcome)
        case _ if "attempt" not in outcome.header:
            return
        case "terminated" | "revoked" | "expired":
            _fail(outcome)
        case "timed out" if not outcome.comes_again:
            _fail(outcome)
        case "lost":
            _make_due(outcome)
        case "unknown":
            _note(outcome, f"does not know the task {outcome.request.task}.")
        case "undecodable" if outcome.error is not None:
            _note(outcome, f"refused the message: {describe_error(outcome.error)}")


def _note(outcome: Outcome, text: str) -> None:
    """Record in the row why this worker can't run the message; another may run it."""
    from ..models.text import storable  # needs the app registry

    text = storable(f"A worker on {HOST} {text}")
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))
    unclaimed = table.at(outcome.header["attempt"]).filter(token="", due_at__isnull=False)
    in_background(lambda: unclaimed.update(error=text), table.close, FAILURE)


def _make_due(outcome: Outcome) -> None:
    """Let a relay send a task whose process was killed again before its lease is over."""
    attempt = outcome.header["attempt"]
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))

    def make_due() -> None:
        row = table.find(attempt)
        is_ours = row is not None and row.token and outcome.ended(_holder_of(row))
        if is_ours and is_dead_soon(outcome.pid or 0):
            table.at(attempt).claimed(row.token).update(due_at=Now())

    in_background(make_due, table.close, FAILURE)


def _holder_of(row: Any) -> Holder:
    return decode_holder(row.holder, HeldLock("")).holder


def _fail(outcome: Outcome) -> None:
    """Fail a task that was killed for good, or whose message never runs."""
    attempt, error = outcome.header["attempt"], outcome.error
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))

    def fail() -> None:
        # A process that is being killed may give its claim back between the look and the update.
        for _ in range(TRIES):
            row = table.find(attempt)
            if row is None or row.due_at is None:
                return
            # If this delivery never ran, another delivery of the message may be running.
            if row.token and not outcome.ended(_holder_of(row)):
                return
            # A row that has ended meanwhile has an empty token, too.
            unended = table.at(attempt).filter(due_at__isnull=False)
            if unended.fail_task(row.token, type(error).__name__, str(error).strip(), ""):
                said = describe_error(error)
                MESSAGE_FAILED.emit(
                    _fail, task=outcome.task.name, task_id=outcome.task_id, error=said
                )
                return

    in_background(fail, table.close, FAILURE)
