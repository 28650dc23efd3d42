"""
One step in a worker: begin it, do its work under a renewed lease, and say what became of it.

Who dies on any line leaves a step that runs under a lease that ends: then the next
delivery of its message takes it, or a sweep sends it anew.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from django.db import Error as DatabaseError

from .. import conf
from ..concurrency.copies import ComesBack, come_back, finish_copy, send_own_copy
from ..concurrency.guard import OWN_LOCK_PATIENCE
from ..concurrency.header import find_header
from ..exceptions import StepLost, WrongTransaction, describe_error
from ..locks import HeldLock
from ..locks.lease import Lease, renewer
from ..locks.lock import describe_holder, time_limit
from ..locks.stores import Location
from ..locks.stores.base import encode_holder
from ..locks.stores.rows import read_holder
from ..signals import emit, step_lost, step_skipped
from ..texts import get_logger
from ..transactions import (
    ask_again,
    in_atomic,
    is_manual,
    leave_inherited,
    losing_a_race,
    no_time_left,
)
from . import engine
from .engine import Fault
from .rows import StepStore, step_store
from .status import Status

if TYPE_CHECKING:
    from ..models import StageRun, StageStep

logger = get_logger(__name__)

#: Pause before a message that met its own step looks again, s.
PAUSE: Final = 0.05
#: Where a request has it that Celery's signals are not to decide about its step.
TOLD: Final = "celery_safe_step_told"
#: Where it has the token of its claim.
CLAIMED: Final = "celery_safe_step_claimed"
#: When a message comes back whose step could not be asked about, s.
DATABASE_AWAY: Final = 5.0


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


class Claimed(NamedTuple):
    """A step that this process runs now."""

    store: StepStore
    step: StageStep
    lease: Lease[StepStore]


def run_step(task: Any, request: Context, do: Callable[[Work], Outcome]) -> Any:
    """
    Run the step that a message is for; return what its function did, or None: it is not to run.

    Raises:
        StepLost: It was not this process's any more when its work was done.
        WrongTransaction: Inside ``atomic()``.
    """
    store = step_store()
    leave_inherited(store.alias)
    _refuse_transaction(store, task)
    claimed = _begin(store, task, request)
    if claimed is None:
        return None
    _, step, lease = claimed
    if step.run.status in Status.STOPPED:
        engine.put_back(store, step, lease, Fault("", "Its process died before the run ended."))
        return None
    if step.deaths >= engine.MOST_DEATHS:
        engine.fail(store, step, lease, Fault("", f"Its process died {step.deaths} times."))
        return None
    with _working(claimed, task, request):
        if "claim_copy" in find_header(request):
            finish_copy(task, request, _notes(store), of_claim=True)
        outcome = do(Work(step.run, step, step.run.params, step.arguments))
        if outcome.success:
            done = engine.finish(store, step, lease, outcome.params)
        else:
            done = engine.fail(store, step, lease, Fault("", outcome.error))
        if not done:
            _raise_lost(claimed)
    return outcome.result


def _begin(store: StepStore, task: Any, request: Context) -> Claimed | None:
    """Claim the step; None if it is not to run. While somebody runs it the message comes back."""
    patient_until = time.monotonic() + OWN_LOCK_PATIENCE
    token = os.urandom(16).hex()
    while True:
        asked_at = time.monotonic()
        try:
            found = ask_again(
                store.alias,
                lambda: _try_begin(store, task, request, token, asked_at),  # noqa: B023
                no_time_left,
                "a step",
            )
        except DatabaseError as error:
            store.check_migrated(error)
            if request.is_eager:
                raise
            # Nothing was done yet, so that it is no failure of the step.
            come_back(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
        if not isinstance(found, HeldLock):
            return found
        # A retry without delay may arrive before the run that sent it has ended.
        if time.monotonic() > patient_until:
            send_own_copy(task, request, found, _notes(store), of_claim=True)
        time.sleep(PAUSE)


def _try_begin(
    store: StepStore, task: Any, request: Context, token: str, asked_at: float
) -> Claimed | HeldLock | None:
    """Claim the step; return it, or who runs it now; None: it is not to run."""
    pk, task_id = find_header(request)["step"], request.id or ""
    seconds = conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")
    holder = encode_holder(
        f"{task.name}[{task_id}]", describe_holder(task, request, store.renews())
    )
    step: Any = None
    with losing_a_race():
        step = store.try_claim(pk, task_id, token, seconds, holder)
    if step is None:
        found = _find_contender(store, pk, task, request)
        if not isinstance(found, HeldLock) or found.token != token:
            return found
        step = store.find(str(pk))  # the answer to the claim before got lost
        if step is None:
            return None
    request.__dict__[CLAIMED] = token
    engine.note_begun(store, step.run)
    limit = asked_at + time_limit(task, request)
    return Claimed(store, step, Lease(store, str(pk), token, seconds, asked_at, limit, note_lost))


def _find_contender(store: StepStore, pk: int, task: Any, request: Context) -> HeldLock | None:
    """Return who runs the step now; None: it is not to run."""
    step: Any = store.find(str(pk))
    if step is None or step.task_id != request.id or step.status in Status.STOPPED:
        stands = "is gone" if step is None else f"is {step.status} (task id {step.task_id})"
        emit(
            step_skipped,
            logger,
            logging.INFO,
            "Task %s[%s] does nothing: its step %s.",
            task.name,
            request.id,
            stands,
            sender=run_step,
            step=pk,
            task=task.name,
            task_id=request.id,
            status="" if step is None else str(step.status),
        )
        return None
    if step.status == Status.RUNNING and step.ends_at >= step.asked_at:
        return read_holder(str(step), step)
    return HeldLock(str(step), remaining=0.0)  # it was let go since: look again


@contextmanager
def _working(claimed: Claimed, task: Any, request: Context) -> Iterator[None]:
    """Hold the lease in the block; if that ends in an error, note what becomes of the step."""
    store, _, lease = claimed
    try:
        if store.renews():
            renewer().add(lease)
        yield
    except StepLost:
        tell_no_more(request)
        raise
    except BaseException as error:
        if lease.pid == os.getpid():  # of a bare os.fork() the child unwinds the block, too
            renewer().remove(lease)
            _note_error(claimed, task, request, error)
        raise
    finally:
        renewer().remove(lease)


def _note_error(claimed: Claimed, task: Any, request: Context, error: BaseException) -> None:
    store, step, lease = claimed
    fault = Fault.of(error)
    try:
        if comes_again(task, error):
            engine.put_back(store, step, lease, fault)
        else:
            tell_no_more(request)
            engine.fail(store, step, lease, fault)
    except DatabaseError as failure:
        logger.warning(
            "That %s failed (%s) can't be noted; a sweep sends it again when its lease is over: %s",
            step,
            fault,
            describe_error(failure),
        )


def tell_no_more(request: Context) -> None:
    """Keep Celery's signal of a failure from deciding about a step that was decided about."""
    request.__dict__[TOLD] = True


def claimed_by(request: Context) -> str | None:
    """Return the token of the claim that a run has, or had; None: it had none."""
    token: str | None = request.__dict__.get(CLAIMED)
    return token


def is_told(request: Context) -> bool:
    """Tell whether a run's end has been noted, as far as that was possible."""
    return TOLD in request.__dict__


def comes_again(task: Any, error: BaseException) -> bool:
    """
    Tell whether the step's message may come again after an error.

    Where the task retries by itself, only Celery knows: then its signals tell the end.
    """
    match error:
        case Retry() | ComesBack():
            return True
        case Reject():
            return bool(getattr(error, "requeue", False))
        case Ignore():
            return False
        case Exception():
            return hasattr(task, "_orig_run")  # what Celery's autoretry wraps
        case _:
            return True  # the process is told to end


def _raise_lost(claimed: Claimed) -> NoReturn:
    store, step, lease = claimed
    held = store.peek(lease.name)
    holder = "" if held is None or held.token == lease.token else str(held.holder)
    if not lease.lost:
        note_lost(lease, held)
    raise StepLost(str(step), str(step.run), holder)


def note_lost(lease: Lease[Any], now_held: HeldLock | None) -> None:
    """Tell that a step is no longer ours; knows the lease alone, see ``locks.lock``."""
    if now_held is not None and now_held.token == lease.token:
        return  # it ended while its lease was to be renewed
    lease.lost = True
    holder = "" if now_held is None else str(now_held.holder)
    emit(
        step_lost,
        logger,
        logging.ERROR,
        "The step %s was lost while this process ran it; %s.",
        lease.name,
        f"{holder} has it now" if holder else "nobody is known to have it now",
        sender=run_step,
        step=int(lease.name),
        holder=holder,
    )


def _notes(store: StepStore) -> Any:
    """Return where copies of a message are noted: beside the steps, in no cache."""
    return Location("database", store.alias).store()


def _refuse_transaction(store: StepStore, task: Any) -> None:
    if in_atomic(store.alias) or is_manual(store.alias):
        raise WrongTransaction(
            f"The step {task.name} is to begin inside a transaction on {store.alias!r}, or "
            f"autocommit is off there: others would not see that it runs, and a rollback would "
            f"forget that it ended. Put atomic() inside the function."
        )
