"""
Ends of a step's message that its own process can't record: killed, or revoked.

Celery also reports whether a task with ``autoretry_for`` will retry, which can't be seen inside
the step's function.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from django.db import DatabaseError

from ..delivery.endings import Outcome
from ..delivery.worker import in_background
from ..foreign_errors import text_of
from ..leases.holder import HOST, HeldLock, decode_holder
from ..transactions import lacks_table
from . import engine
from .engine import StepError
from .running import attempt_of
from .status import NOT_REGISTERED
from .step_table import step_table

if TYPE_CHECKING:
    from ..models.stages import StageStep

#: Why a worker does not know a task.
NOT_IMPORTED: Final = "it runs another release, or does not import the module"
FAILURE: Final = "Could not record that a step's message has ended; a sweep will find its run."


def record(outcome: Outcome) -> None:
    """Record in a step how its message, or the run of the message, has ended."""
    pk = outcome.header.get("step")
    if pk is None:
        return
    match outcome.kind:
        case "failed":
            _fail_attempt(pk, outcome)
        case "retried" | "re-sent":
            step_table().await_retry(pk, outcome.task_id, outcome.error)
        case "terminated" | "revoked" | "expired":
            _fail_in_background(pk, outcome)
        case "timed out" if not outcome.comes_again:
            _fail_in_background(pk, outcome)
        case "unknown":
            _note(pk, outcome, NOT_REGISTERED, f"since it does not know the task: {NOT_IMPORTED}.")
        case "undecodable" if outcome.error is not None:
            why = f"which it refused: {text_of(outcome.error)}."
            _note(pk, outcome, type(outcome.error).__name__, why)


def _fail_attempt(pk: int, outcome: Outcome) -> None:
    """Fail the step of a task that does not retry again."""
    attempt, fault = attempt_of(outcome.request), StepError.of(outcome.error)
    if not attempt.is_decided and attempt.pid == os.getpid():
        engine.fail_attempt(
            step_table(), pk, outcome.task_id, fault, lambda step: step.token == attempt.token
        )


def _note(pk: int, outcome: Outcome, error_type: str, why: str) -> None:
    """Record why a worker dropped the step's message."""
    from ..models.text import storable  # needs the app registry

    text = f"A worker on {HOST} dropped the message, {why} A sweep sends the message again later."
    waiting = step_table().at(str(pk)).attempt(outcome.task_id).waiting()
    values = {"error_type": error_type, "error": storable(text)}
    in_background(lambda: waiting.update(**values), step_table().close, FAILURE)


def _fail_in_background(pk: int, outcome: Outcome) -> None:
    """Fail the step of a message that will never run, or whose run was killed for good."""
    store, fault = step_table(), StepError.of(outcome.error)

    def is_ended(step: StageStep) -> bool:
        # If this delivery ran nowhere, another delivery of the message may still be running.
        holder = decode_holder(step.holder, HeldLock("")).holder
        return outcome.ended(holder)

    def fail() -> None:
        from ..models.stages import StageStep  # needs the app registry

        try:
            engine.fail_attempt(store, pk, outcome.task_id, fault, is_ended)
        except DatabaseError:
            if not lacks_table(store.alias, StageStep):
                raise

    in_background(fail, store.close, FAILURE)
