"""
Ends of carried messages that only Celery, or the main process of a worker, sees.

A process was killed, or a message reached no run. A relay handles all others, such as the death of
a whole worker, when the lease has expired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from django.db import DEFAULT_DB_ALIAS

from ..databases import Now
from ..delivery.endings import Outcome, in_background, is_dead_soon
from ..leases.holder import HOST, HeldLock, decode_holder
from ..texts import describe_error, storable
from ..transactions import TRIES
from .carried_run import run_of
from .followed import Fault, fail_unrun, find_follower
from .outbox import ENDED, MessageTable, message_table


def record(outcome: Outcome) -> None:
    """Record in the row of a carried message how the message, or its run, has ended."""
    match outcome.kind:
        case "succeeded" | "failed" | "retried" | "over":
            _end_run(outcome)
        case _ if "attempt" not in outcome.header:
            return
        case "terminated" | "revoked" | "expired" | "timed out" if not outcome.comes_again:
            _in_background(_fail_message, outcome)
        case "lost":
            _in_background(_follow_death, outcome)
        case "unknown" | "undecodable" if outcome.error is not None:
            _in_background(_note, outcome)


def _end_run(outcome: Outcome) -> None:
    """End a run whose outcome only Celery knows, such as one that ``autoretry_for`` decides."""
    run = run_of(outcome.request)
    if run is None or not run.claim.is_held or run.claim.is_of_parent():
        return
    if outcome.kind == "over":
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    elif outcome.kind == "succeeded":
        run.succeed()
    else:
        run.fail(outcome.error)


def _in_background(act: Callable[[MessageTable, Outcome], object], outcome: Outcome) -> None:
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))
    failure = "That a carried task has ended could not be recorded; a relay sends it again."
    in_background(lambda: act(table, outcome), failure)


def _note(table: MessageTable, outcome: Outcome) -> None:
    """Record in the row why this worker can't run the message; another may run it."""
    error = outcome.error
    kind, what = type(error).__name__, f"refused the message: {describe_error(error)}"
    if outcome.kind == "unknown":
        # Celery's name for it.
        kind, what = "NotRegistered", f"does not know the task {outcome.request.task}."
    fault, follower = Fault(kind, f"A worker on {HOST} {what}"), find_follower(outcome.header)
    rows = table.at(outcome.header["attempt"]).exclude(state="running")
    noted = rows.filter(due_at__isnull=False).update(error=storable(fault.text))
    if noted and follower is not None:
        follower.note(outcome.task_id, fault)


def _follow_death(table: MessageTable, outcome: Outcome) -> None:
    """Let a relay send a task whose process was killed again before its lease is over."""
    row = table.find(outcome.header["attempt"])
    if row is not None and _is_of(outcome, row):
        if is_dead_soon(outcome.pid or 0):
            table.at(outcome.header["attempt"]).claimed(row.token).update(due_at=Now())
    elif not table.all().carried(outcome.task_id).exclude(state__in=ENDED).exists():
        # No other attempt goes on either, such as a retry.
        _store_failure(outcome)


def _store_failure(outcome: Outcome) -> None:
    """Store a failure, as Celery does, if the row has ended but no result was stored."""
    task, request, task_id = outcome.task, outcome.request, outcome.task_id
    backend: Any = task.backend
    if isinstance(backend, DisabledBackend):
        return  # the project stores no results
    if backend.get_state(task_id) not in states.READY_STATES:
        stores = not request.ignore_result or task.store_errors_even_if_ignored
        backend.mark_as_failure(task_id, outcome.error, request=request, store_result=stores)


def _fail_message(table: MessageTable, outcome: Outcome) -> None:
    """Fail a task that was killed for good, or whose message never runs."""
    attempt, fault = outcome.header["attempt"], Fault.of(outcome.error)
    # A process that is being killed may give its claim back between the look and the update.
    for _ in range(TRIES):
        row = table.find(attempt)
        if row is None or row.due_at is None:
            return
        if row.state == "running" and not _is_of(outcome, row):
            return
        # A row that has ended meanwhile has an empty token, too.
        unended = table.at(attempt).filter(due_at__isnull=False)
        if fail_unrun(outcome.header, row, unended, row.token, fault):
            return


def _is_of(outcome: Outcome, row: Any) -> bool:
    """Return whether the run whose process was killed holds the row."""
    held_by = decode_holder(row.holder, HeldLock("")).holder
    return row.state == "running" and outcome.ended(held_by)
