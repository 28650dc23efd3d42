"""
One step in a worker: begin it, do its work under a renewed lease, and say what became of it.

Who dies on any line leaves a step that runs under a lease that ends: then the next
delivery of its message takes it, or a sweep sends it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from django.db import Error as DatabaseError

from .. import conf
from ..delivery.copies import WillBeRedelivered, begin_or_requeue, delete_markers, resend_later
from ..events import STEP_GONE, STEP_LOST, STEP_SKIPPED
from ..exceptions import StepLost, describe_error
from ..leases.holder import HeldLock, Holder
from ..leases.lease_table import read_holder
from ..leases.row_claim import RowClaim
from ..locks.stores import Location
from ..texts import get_logger
from ..transactions import losing_a_race
from . import engine
from .engine import StepError
from .status import Status
from .step_table import ClaimedStep, StepTable, step_table

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep

logger = get_logger(__name__)

#: When a message comes back whose step could not be asked about, s.
DATABASE_AWAY: Final = 5.0


@dataclass(slots=True)
class Attempt:
    """
    One run of a step's message.

    Attributes:
        token: The token of its claim of the step; None: it has had none.
        is_decided: Whether the run has recorded its outcome, so that the receiver of
            ``task_failure`` must not.
    """

    token: str | None = None
    is_decided: bool = False


#: The attempt of each message that runs, for as long as Celery keeps its request.
_attempts: Final[WeakKeyDictionary[Context, Attempt]] = WeakKeyDictionary()


def attempt_of(request: Context) -> Attempt:
    """Return what is known of the step's run that this request is for."""
    return _attempts.setdefault(request, Attempt())


class Work(NamedTuple):
    """
    What a step's function is to work on.

    Attributes:
        params: Those of the run, for this step alone to change.
        arguments: Those of the plan's entry.
    """

    run: StageRun
    step: StageStep
    params: dict[str, Any]
    arguments: dict[str, Any]


class Outcome(NamedTuple):
    """
    What a step's function said.

    Attributes:
        result: What it returned.
        success: Whether the step succeeded.
        params: What the next stages get.
        error: What is noted if it did not succeed.
    """

    result: Any
    success: bool
    params: dict[str, Any]
    error: str


def run_step(task: Any, request: Context, pk: int, do: Callable[[Work], Outcome]) -> Any:
    """
    Run the step that a message is for; return what its function did, or None: it is not to run.

    Args:
        pk: The step's id, from the message.

    Raises:
        StepLost: It was not this process's any more when its work was done.
        WrongTransaction: Inside ``atomic()``.
    """
    store = step_table()
    claimed = _begin(store, pk, task, request)
    if claimed is None:
        return None
    claim, step = claimed
    with claim.working(lambda error: _record_error(claimed, task, request, error)):
        claim.begin(task, request)
        if step.run.status in Status.STOPPED:
            engine.put_back(claimed, StepError("", "Its process died before the run ended."))
            return None
        if step.deaths >= engine.MOST_DEATHS:
            engine.fail(claimed, StepError("", f"Its process died {step.deaths} times."))
            return None
        delete_markers(task, request, _markers(store), of_claim=True)
        outcome = do(Work(step.run, step, step.run.params, step.arguments))
        if outcome.success:
            done = engine.finish(claimed, outcome.params)
        else:
            done = engine.fail(claimed, StepError("", outcome.error))
        if not done:
            raise StepLost(str(step), str(step.run), claim.find_new_holder())
    return outcome.result


def _begin(store: StepTable, pk: int, task: Any, request: Context) -> ClaimedStep | None:
    """Claim the step; None if it is not to run. While somebody runs it the message comes back."""
    seconds = conf.lock_timeout()
    claim = RowClaim(store, str(pk), seconds, _emit_lost)
    claim.prepare(f"The step {task.name}", "Put atomic() inside the function.")

    def try_begin() -> ClaimedStep | HeldLock | None:
        asked_at = time.monotonic()
        try:
            return claim.ask(lambda: _try_begin(claim, task, request, asked_at), "a step")
        except DatabaseError as error:
            store.check_migrated(error)
            if request.is_eager:
                raise
            # Nothing was done yet, so that it is no failure of the step.
            resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")

    return begin_or_requeue(try_begin, task, request, _markers(store))


def _try_begin(
    claim: RowClaim[StepTable], task: Any, request: Context, asked_at: float
) -> ClaimedStep | HeldLock | None:
    """Claim the step; return it, or who runs it now; None: it is not to run."""
    store, task_id = claim.table, request.id or ""
    holder = claim.describe_holder(f"{task.name}[{task_id}]", task, request)
    step: Any = None
    with losing_a_race():
        step = store.claim_step(int(claim.name), task_id, claim.token, claim.seconds, holder)
    if step is None:
        found = _find_contender(store, claim.name, task, request)
        if not isinstance(found, HeldLock) or found.token != claim.token:
            return found
        step = store.find(claim.name)  # the answer to the claim before got lost
        if step is None:
            return None
    attempt_of(request).token = claim.token
    if step.run.status == Status.WAITING:
        engine.record_begun(store, step.run)
    claim.asked_at = asked_at
    return ClaimedStep(claim, step)


def _find_contender(store: StepTable, pk: str, task: Any, request: Context) -> HeldLock | None:
    """Return who runs the step now; None: it is not to run."""
    step: Any = store.find(pk)
    if step is None or step.task_id != request.id or step.status in Status.STOPPED:
        if step is not None and step.status == Status.SUCCEEDED:
            # Its process may have died before it looked whether the stage is complete.
            engine.leave_stage(store, step)
        event = STEP_GONE if step is None else STEP_SKIPPED
        event.emit(
            run_step,
            step=int(pk),
            task=task.name,
            task_id=request.id,
            status="" if step is None else str(step.status),
        )
        return None
    if step.status == Status.RUNNING and step.ends_at >= step.asked_at:
        return read_holder(str(step), step)
    # It was let go since. Look again, as for a run of this message.
    return HeldLock(str(step), remaining=0.0, holder=Holder(task_id=request.id))


def _record_error(claimed: ClaimedStep, task: Any, request: Context, error: BaseException) -> None:
    """Record what becomes of a step whose work ended in an error."""
    if isinstance(error, StepLost):
        attempt_of(request).is_decided = True
        return
    fault = StepError.of(error)
    try:
        if comes_again(task, error):
            engine.put_back(claimed, fault)
        else:
            attempt_of(request).is_decided = True
            engine.fail(claimed, fault)
    except DatabaseError as failure:
        logger.warning(
            "That %s failed (%s) can't be noted; a sweep sends it again when its lease is over: %s",
            claimed.step,
            fault,
            describe_error(failure),
        )


def comes_again(task: Any, error: BaseException) -> bool:
    """
    Return whether the step's message may come again after an error.

    Where the task retries by itself, only Celery knows: then its signals tell the end.
    """
    match error:
        case Retry() | WillBeRedelivered():
            return True
        case Reject():
            return bool(getattr(error, "requeue", False))
        case Ignore():
            return False
        case Exception():
            return hasattr(task, "_orig_run")  # what Celery's autoretry wraps
        case _:
            return True  # the process is told to end


def _emit_lost(pk: str, holder: str) -> None:
    STEP_LOST.emit(run_step, step=int(pk), holder=holder)


def _markers(store: StepTable) -> Location:
    """Return where the markers of copies are: beside the steps, in no cache."""
    return Location("database", store.alias)
