"""
One step in a worker: claim it, do its work under a renewed lease, and record its outcome.

If the process dies on any line, the step's lease expires. Then the next delivery of the
message claims the step, or a sweep re-sends the message.
"""

from __future__ import annotations

import os
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate
from django.db import Error as DatabaseError
from django.db import OperationalError

from .. import conf
from ..databases import is_lost_race
from ..delivery.copies import (
    WillBeRedelivered,
    begin_or_requeue,
    resend_later,
)
from ..delivery.deaths import ends_process, refuse_after_deaths
from ..delivery.header import Header
from ..events import TASK_NOT_RUN, TASK_POISONED
from ..exceptions import InvalidResult, TaskPoisoned, WrongTransaction
from ..foreign_errors import describe_error
from ..leases.claim import Claim
from ..leases.clock import clock
from ..leases.holder import HeldLock, Holder
from ..leases.lease_table import read_holder
from ..texts import get_logger
from ..values import NotPlain, encode
from . import engine
from .engine import StepError
from .plan import LONGEST_PARAMS
from .status import Status
from .step_table import StepTable, step_table

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep

logger = get_logger(__name__)

#: The error type of a step that failed without an exception, so that lists can filter by it.
RETURNED_FALSE: Final = "ReturnedFalse"
#: Advice on the value that a step returns.
STEP_RESULT: Final = (
    "Return a dict of plain data for the next stages, None, True, False, or (success, dict)."
)
#: Delay before a message is retried if its step could not be read, s.
DATABASE_AWAY: Final = 5.0


@dataclass(slots=True)
class StepAttempt:
    """
    One attempt to run a step's message.

    Attributes:
        token: The token of its claim of the step; None: it has not claimed the step.
        is_decided: Whether the attempt has recorded its outcome, so that the receiver of
            ``task_failure`` must not.
        pid: The attempt's process. The child of a bare ``os.fork()`` has its requests, too.
    """

    token: str | None = None
    is_decided: bool = False
    pid: int = field(default_factory=os.getpid)


#: The attempt of each running message, for as long as Celery keeps its request.
_attempts: Final[WeakKeyDictionary[Context, StepAttempt]] = WeakKeyDictionary()


def attempt_of(request: Context) -> StepAttempt:
    """Return the attempt of a request; make it if there is none yet."""
    return _attempts.setdefault(request, StepAttempt())


class Work(NamedTuple):
    """
    The input of a step's function.

    Attributes:
        params: A copy of the run's params, which the step may change.
    """

    run: StageRun
    step: StageStep
    params: dict[str, Any]


class Outcome(NamedTuple):
    """
    The outcome of a step's function.

    Attributes:
        result: The value that the function returned.
        success: Whether the step succeeded.
        params: The part of the result for the next stages, not yet checked.
        error: The text to record if the step did not succeed.
    """

    result: Any
    success: bool
    params: Any
    error: str


class StepClaim(Claim):
    """
    The claim of a step; the dict that ``finish()`` gets is passed to the next stages.

    Attributes:
        step: The step's row, and its run, as they were at the claim.
    """

    table: StepTable
    step: StageStep

    def __init__(self, pk: int, task: Any, request: Context) -> None:
        super().__init__(step_table(), str(pk), f"{task.name}[{request.id}]", conf.lock_timeout())

    def record(self, outcome: Outcome) -> None:
        """
        Record the outcome, unless the function has called ``finish()``.

        Raises:
            ClaimLost: This process no longer held the step.
            InvalidResult: The function has finished the step and then returned a failure.
        """
        if self.is_finished:
            self.check_committed()
            if not outcome.success:
                reason = "it fails the step, which it finished before"
                raise InvalidResult(self.step.task, reason, STEP_RESULT)
            return
        text = self._encode(outcome.params)
        if outcome.success:
            self._record_done(text)
        elif not engine.fail(self, StepError(RETURNED_FALSE, outcome.error)):
            self.raise_lost()

    def _write_done(self, text: str) -> bool:
        return self.table.finish(self.step.pk, self.token, text)

    def _go_on(self) -> None:
        engine.follow_success(self)

    def _encode(self, result: Any) -> str:
        if result is None:
            return ""
        if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
            reason = f"its params are {result!r:.200}"
            raise InvalidResult(self.step.task, reason, STEP_RESULT)
        try:
            return encode(result, LONGEST_PARAMS, strict=True) if result else ""
        except NotPlain as error:
            raise InvalidResult(self.step.task, str(error), STEP_RESULT) from error


def run_step(task: Any, request: Context, header: Header, do: Callable[[Work], Outcome]) -> Any:
    """
    Run a message's step; return its function's result, or None if the step must not run.

    Args:
        header: The message's header, with the step's id.

    Raises:
        ClaimLost: This process no longer held the step when its work was done.
        TaskPoisoned: Too many processes have died in the step; it is not run again.
        WrongTransaction: Inside ``atomic()``.
    """
    claim = StepClaim(header["step"], task, request)
    if not _begin(claim, task, request):
        return None
    step = claim.step
    with claim.holding(lambda error: _record_error(claim, task, request, error)):
        claim.begin()
        if step.run.status in Status.STOPPED:
            engine.put_back(claim, StepError("", "Its process died before the run ended."))
            return None
        if step.deaths:
            refuse_after_deaths(task, request.id, step.deaths, step.last_death)
        outcome = _do(claim, task, request, do)
        # After a bare os.fork() the child also gets here, and must not end the claim.
        if not claim.is_of_parent():
            if claim.is_resent() and not claim.is_finished:
                _await_retry(claim, request)
            else:
                claim.record(outcome)
    return outcome.result


def _await_retry(claim: StepClaim, request: Context) -> None:
    """Let a step wait for the message that its task has sent by ``retry(throw=False)``."""
    retry = getattr(request, "safe_retry", None) or Retry("The task has re-sent itself")
    if not engine.put_back(claim, StepError.of(retry)):
        claim.raise_lost()
    claim.table.await_retry(claim.step.pk, request.id or "", retry)


def _do(claim: StepClaim, task: Any, request: Context, do: Callable[[Work], Outcome]) -> Outcome:
    """Call the step's function; retry an error up to the number in the plan's entry."""
    step = claim.step
    _, options = step.parts
    try:
        return do(Work(step.run, step, step.run.params))
    except TaskPredicate:
        raise
    except Exception as error:
        is_over = claim.is_finished or claim.was_lost(error)
        if is_over or request.retries >= options.get("retries", 0):
            raise
        raise task.retry(exc=error, max_retries=options["retries"]) from error


def _begin(claim: StepClaim, task: Any, request: Context) -> bool:
    """Claim the step; False if it must not run. A step that is running is retried later."""
    holder = claim.prepare(
        task, request, f"The step {task.name}", "Put atomic() inside the function."
    )

    def try_begin() -> bool | HeldLock:
        claim.asked_at = clock.now()
        try:
            return claim.ask(lambda: _try_begin(claim, task, request, holder))
        except DatabaseError as error:
            claim.table.check_migrated(error)
            if request.is_eager:
                raise
            # The step has not started, so it did not fail.
            resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")

    begun = try_begin()
    if isinstance(begun, HeldLock):
        return begin_or_requeue(begun, try_begin, task, request)
    return begun


def _try_begin(claim: StepClaim, task: Any, request: Context, holder: str) -> bool | HeldLock:
    """Claim the step; return whether to run it, or its current holder."""
    store = claim.table
    step: Any = None
    try:
        step = store.claim_step(
            int(claim.name), request.id or "", claim.token, claim.seconds, holder
        )
    except OperationalError as error:
        if not is_lost_race(error):
            raise
    if step is None:
        found = _find_contender(store, claim.name, task, request)
        if found is None:
            return False
        if found.token != claim.token:
            return found
        step = store.find(claim.name)  # an earlier claim succeeded, but its answer was lost
        if step is None:
            return False
    claim.step = step
    attempt_of(request).token = claim.token
    if step.run.status == Status.WAITING:
        engine.record_begun(store, step.run)
    return True


def _find_contender(store: StepTable, pk: str, task: Any, request: Context) -> HeldLock | None:
    """Return the step's current holder; None: the step must not run."""
    step: Any = store.find(pk)
    if step is None or step.task_id != request.id or step.status in Status.STOPPED:
        if step is not None and step.status == Status.SUCCEEDED:
            # Its process may have died before it checked whether the stage is complete.
            engine.leave_stage(store, step)
        now = "gone" if step is None else f"{step.status}, or another message's"
        TASK_NOT_RUN.emit(run_step, task=task.name, task_id=request.id, reason=f"its step is {now}")
        return None
    if step.status == Status.RUNNING and step.ends_at >= step.asked_at:
        return read_holder(str(step), step)
    # The step was released since. The caller tries again, as if this message held the step.
    return HeldLock(str(step), remaining=0.0, holder=Holder(task_id=request.id))


def _record_error(claim: StepClaim, task: Any, request: Context, error: BaseException) -> None:
    """Record the new state of a step whose work ended in an error."""
    if claim.was_lost(error):
        attempt_of(request).is_decided = True
        return
    fault = StepError.of(error)
    try:
        # finish()'s callback may not have run: Django stops at the first one that raises.
        with suppress(WrongTransaction):  # finish() was rolled back
            claim.check_committed()
        if comes_again(task, error):
            engine.put_back(claim, fault, died=ends_process(error))
        else:
            attempt_of(request).is_decided = True
            if engine.fail(claim, fault) and isinstance(error, TaskPoisoned):
                said = describe_error(error)
                TASK_POISONED.emit(run_step, task=task.name, task_id=request.id, error=said)
    except DatabaseError as failure:
        logger.warning(
            "Could not record that %s failed (%s); a sweep re-sends it when its lease is over: %s",
            claim.key,
            fault,
            describe_error(failure),
        )


def comes_again(task: Any, error: BaseException) -> bool:
    """
    Return whether the step's message may be retried or redelivered after an error.

    If the task has ``autoretry_for``, only Celery knows: its signals then report the end.
    """
    match error:
        case Retry() | WillBeRedelivered():
            return True
        case Reject():
            return bool(getattr(error, "requeue", False))
        case Ignore() | TaskPoisoned() | CancelledError():
            return False
        case Exception():
            return hasattr(task, "_orig_run")  # what Celery's autoretry wraps
        case _:
            return True  # a signal ends the process
