"""
The changes of a run, from its start to its end.

A step that succeeds is recorded by one statement, and committed; then its process looks
whether the stage is complete. The last step to be recorded sees all the others, so at least
one process begins the next stage; the lock of the run's row lets one do it. Every other
change is one transaction that locks the run's row first, and the steps that it changes after
that. The messages of the next steps are written into the outbox in the same transaction, and
no result backend is asked.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Exists, F
from django.db.models.functions import Now

from ..emitting import Event
from ..events import (
    RUN_ENDED,
    RUN_FAILED,
    RUN_RESUMED,
    RUN_STARTED,
    STAGE_STARTED,
    STEP_FAILED,
    STEP_SUCCEEDED,
)
from ..exceptions import IllegalTransition, InvalidResult, describe_error, find_soft_time_limit
from ..sending.commit import must_wait
from ..texts import get_logger
from ..transactions import losing_a_race
from ..values import NotPlain, encode
from .plan import LONGEST_PARAMS, Plan, make_plan
from .status import Status
from .step_messages import send
from .step_table import ClaimedStep, StepTable, step_table

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep
    from ..models.step_states import StageSteps

logger = get_logger(__name__)

#: How often a process may die in a step before the step fails; RabbitMQ's quorum queues give
#: a message up after as many deliveries.
MOST_DEATHS: Final = 20


class StepError(NamedTuple):
    """An error as a step's row stores it: its type ("": none) and its text."""

    type: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> StepError:
        """Return what is kept of an error; of a soft time limit that cut off another, that."""
        error = find_soft_time_limit(error) or error
        return cls(type(error).__name__, str(error).strip())

    def __str__(self) -> str:
        return f"{self.type}: {self.text}".strip(": ")


def start(
    plan: Plan | Mapping[str, Any] | Iterable[Any], params: Mapping[str, Any] | None = None
) -> StageRun:
    """
    Run tasks in stages: those of one priority together, lower priorities after higher ones.

    A stage begins when all of the one before have succeeded, exactly once, and its steps
    find in their params what those returned. A step that fails, after its retries, stops
    what has not begun. The run and its messages are written in one transaction: inside
    ``atomic()`` it begins when that commits.

    Args:
        plan: A list of ``(task, priority)`` or ``(task, priority, arguments)``. Tasks by object or
            name; the same one may stand there several times. Priorities are numbers, of
            which the highest runs first; arguments are a dict, for this entry's function
            alone. Or a dictionary of such a list and params, ``{"sub_tasks": [...],
            "params": {...}}``.
        params: What the steps get, as a dict of plain data; None: nothing. 64 KB of JSON at
            most, along with what the steps add.

    Returns:
        The run. ``run.wait()`` waits for its end, and ``run.progress`` tells how far it is.

    Raises:
        InvalidPlan: It can't be run as it stands; nothing was written.
        WrongTransaction: Another database is inside ``atomic()``, for whose commit the run
            would not wait.
        ConfigurationError: The database has no tables for runs.

    Example:
        >>> from django_celery_safe import stages
        >>> run = stages.start([("shop.tasks.fetch", 3), ("shop.tasks.notify", 1)], {"album": 7})
        >>> run.progress.total
        2

    Source:
        "Celery task priority orchestration".
    """
    plan = make_plan(plan, params)
    store = step_table()
    must_wait(store.alias)  # for that of another database it could not
    try:
        with transaction.atomic(using=store.alias):
            return _write(store, plan)
    except DatabaseError as error:
        store.check_migrated(error)
        raise


def _write(store: StepTable, plan: Plan) -> StageRun:
    from ..models.stages import StageRun, StageStep  # needs the app registry

    run = StageRun(
        stages=len(plan.stages), params_text=plan.params, created_at=Now(), stage_at=Now()
    )
    run.save(using=store.alias, force_insert=True)
    steps = [
        StageStep(
            run=run,
            stage=stage,
            position=position,
            priority=entry.priority,
            task=entry.task,
            arguments_text=entry.arguments,
            task_id=str(uuid.uuid4()),
        )
        for stage, entries in enumerate(plan.stages)
        for position, entry in enumerate(entries)
    ]
    store.steps().add(steps)
    run.refresh_from_db()
    RUN_STARTED.emit_on_commit(start, using=store.alias, run=run.pk, stages=run.stages)
    _begin_stage(store, run, [step for step in steps if step.stage == 0])
    return run


def record_begun(store: StepTable, run: StageRun) -> None:
    """Record that a run's first step has begun."""
    with losing_a_race():
        store.runs().filter(pk=run.pk, status=Status.WAITING).update(status=Status.RUNNING)
    run.status = Status.RUNNING


def finish(claimed: ClaimedStep, params: dict[str, Any]) -> bool:
    """
    Record that a step succeeded, and begin the next stage if its own is complete.

    Tried again for as long as nobody else can have begun the step.

    Args:
        params: What the next stages get.

    Returns:
        Whether the claim still held the step.

    Raises:
        InvalidResult: The params can't be kept; nothing was recorded.
    """
    try:
        text = encode(params, LONGEST_PARAMS) if params else ""
    except NotPlain as error:
        raise InvalidResult(claimed.step.task, str(error)) from error

    claim, step = claimed
    store, is_recorded = claim.table, False

    def record_and_leave() -> None:
        nonlocal is_recorded
        if not is_recorded:
            is_recorded = store.finish(step.pk, claim.token, text) or (
                # The answer to the one before may have got lost.
                store.at(claim.name).is_done_by(claim.token)
            )
            if not is_recorded:
                return
            _emit_of_step(store, STEP_SUCCEEDED, step)
        leave_stage(store, step)

    try:
        claim.ask(record_and_leave, f"step {step.pk} of run {step.run_id}")
    except DatabaseError as error:
        if not is_recorded:
            raise
        logger.warning(
            "Stage %s of run %s may be complete, and can't be asked about; a sweep begins the next "
            "one: %s",
            step.stage + 1,
            step.run_id,
            describe_error(error),
        )
    return is_recorded


def leave_stage(store: StepTable, step: StageStep) -> None:
    """Let the run of a step that has succeeded go on, if the step's stage is complete."""
    if not store.is_complete(step.run_id, step.stage):
        return
    with store.runs().locked(step.run_id) as run:
        if run is not None and run.status not in Status.STOPPED:
            _go_on(store, run)


def fail(claimed: ClaimedStep, fault: StepError) -> bool:
    """Record that a step failed, and stop its run; return whether the claim still held the step."""
    claim, step = claimed
    store = claim.table

    def ask() -> bool:
        return _fail(store, store.at(claim.name).claimed(claim.token), step, fault)

    return claim.ask(ask, f"the step {step}")


def fail_attempt(
    store: StepTable,
    pk: int | None,
    task_id: str,
    fault: StepError,
    ours: Callable[[StageStep], bool],
) -> bool:
    """
    Fail a step whose message was revoked, expired or killed.

    Args:
        pk: The step; None: whichever has this task id, if any.
        ours: Returns whether it was that run of a running step which ended.

    Returns:
        Whether the step waited for it, or was being run by it.
    """
    steps = store.steps().attempt(task_id).select_related("run")
    step = (steps if pk is None else steps.filter(pk=pk)).first()
    if step is None or step.status in Status.STOPPED:
        return False
    if step.status == Status.RUNNING and not ours(step):
        return False
    row = store.at(str(step.pk)).attempt(task_id).filter(status=step.status, token=step.token)
    return _fail(store, row, step, fault)


def fail_silent(store: StepTable, run: StageRun, step: StageStep, reason: str) -> bool:
    """Fail a step of a locked run whose process has died; return whether it still had."""
    row = store.at(str(step.pk)).running().filter(token=step.token, ends_at__lt=Now())
    row.update(deaths=F("deaths") + 1)
    return _fail_locked(store, run, row, step, StepError("", reason))


def put_back(claimed: ClaimedStep, fault: StepError) -> bool:
    """Let a step wait for its message, which comes again; return whether the claim still had it."""
    claim, step = claimed
    store = claim.table

    def ask() -> bool:
        with store.runs().locked(step.run_id) as run:
            stopped = run is None or run.status in Status.STOPPED
            status = Status.ABORTED if stopped else Status.WAITING
            return store.at(claim.name).put_back(claim.token, status, *fault)

    return claim.ask(ask, f"the step {step}")


def resume(run: StageRun) -> None:
    """Run again what failed and what followed; see :meth:`StageRun.resume`."""
    store, pk = _store_of(run), run.pk
    with store.runs().locked(pk) as now:
        now = _checked(run, now, "resume")
        if now.status not in (Status.FAILED, Status.ABORTED):
            raise IllegalTransition(str(run), "resume", f"it is {now.status}")
        if (busy := now.steps.alive().first()) is not None:
            raise IllegalTransition(str(run), "resume", f"its step {busy} still runs")
        left = list(now.steps.unfinished())
        for step in left:
            step.task_id = str(uuid.uuid4())
        now.steps.unfinished().begin_anew(left)
        store.runs().filter(pk=pk).update(
            status=Status.RUNNING, stage_at=Now(), ended_at=None, error=""
        )
        RUN_RESUMED.emit_on_commit(start, using=store.alias, run=pk, steps=len(left))
        again = [step for step in left if step.stage == now.stage]
        if again:
            _begin_stage(store, now, again)
        else:
            _go_on(store, now)  # it was stopped while the last of that stage ran
    run.refresh_from_db(using=store.alias)


def abort(run: StageRun) -> None:
    """Stop what has not begun; see :meth:`StageRun.abort`."""
    store = _store_of(run)
    with store.runs().locked(run.pk) as now:
        now = _checked(run, now, "abort")
        if now.status in Status.STOPPED:
            ended = "been aborted" if now.status == Status.ABORTED else now.status
            raise IllegalTransition(str(run), "abort", f"it has {ended}")
        _stop(store, now, Status.ABORTED)
    run.refresh_from_db(using=store.alias)


def go_on(store: StepTable, pk: int) -> bool:
    """Let a run go on whose stage is complete, or that has failed; return whether it did."""
    with store.runs().locked(pk) as run:
        if run is None or run.status in Status.STOPPED:
            return False
        if run.steps.failed().exists():
            _stop(store, run, Status.FAILED)
            return True
        return _go_on(store, run)


def _begin_stage(store: StepTable, run: StageRun, steps: list[StageStep]) -> None:
    def emit() -> None:
        STAGE_STARTED.emit_on_commit(
            start, using=store.alias, run=run.pk, stage=run.stage + 1, steps=len(steps)
        )

    send(store, steps, emit)


def _go_on(store: StepTable, run: StageRun) -> bool:
    """Begin the next stage of a locked run, or end it, if its stage is complete."""
    stages = run.steps.filter(stage__in=[run.stage, run.stage + 1])
    left = stages.filter(stage=run.stage).unfinished()
    rows = list(stages.filter(~Exists(left)))
    if not rows:
        return False
    ended = [step for step in rows if step.stage == run.stage]
    following = [step for step in rows if step.stage == run.stage + 1]
    params = merge(run, ended)
    try:
        run.params_text = encode(params, LONGEST_PARAMS) if params else "{}"
    except NotPlain as error:
        what = f"What stage {run.stage + 1} returned can't be kept for the next one: {error}."
        _stop(store, run, Status.FAILED, what)
        return True
    ours = store.runs().filter(pk=run.pk, stage=run.stage)
    if not following:
        ours.update(status=Status.SUCCEEDED, params_text=run.params_text, ended_at=Now())
        _emit_ended(store, run, Status.SUCCEEDED, "")
        return True
    run.stage += 1
    ours.update(stage=run.stage, params_text=run.params_text, stage_at=Now())
    try:
        _begin_stage(store, run, following)
    except (DatabaseError, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - sending a task may raise anything
        # No fault of the step that has just ended.
        what = f"Stage {run.stage + 1} can't be begun: {describe_error(error)}."
        _stop(store, run, Status.FAILED, what)
    return True


def merge(run: StageRun, steps: Iterable[StageStep]) -> dict[str, Any]:
    """Return a run's params with what these steps returned, the later ones over the earlier."""
    params, by = run.params, dict[str, "StageStep"]()
    for step in steps:
        for key, value in step.params.items():
            if key in by and params[key] != value:
                logger.warning(
                    "Two steps of %s returned %r, and that of the later one in the plan is kept: "
                    "%s and %s.",
                    run,
                    key,
                    by[key],
                    step,
                )
            params[key], by[key] = value, step
    return params


def _fail(store: StepTable, row: StageSteps, step: StageStep, fault: StepError) -> bool:
    with store.runs().locked(step.run_id) as run:
        if _fail_locked(store, run, row, step, fault):
            return True
        # The answer to the one before may have got lost.
        return store.at(str(step.pk)).failed().attempt(step.task_id).exists()


def _fail_locked(
    store: StepTable, run: StageRun | None, row: StageSteps, step: StageStep, fault: StepError
) -> bool:
    if not row.fail(*fault):
        return False
    _emit_of_step(store, STEP_FAILED, step, error=str(fault))
    if run is not None and run.status not in Status.STOPPED:
        _stop(store, run, Status.FAILED)
    return True


def _stop(store: StepTable, run: StageRun, status: Status, error: str = "") -> None:
    """End a locked run that goes on, and what of it has not begun."""
    store.runs().filter(pk=run.pk).update(status=status, ended_at=Now(), error=error)
    store.steps().filter(run=run.pk).abort()
    _emit_ended(store, run, status, error)


def _store_of(run: StageRun) -> StepTable:
    return StepTable(run.find_database())


def _checked(run: StageRun, now: StageRun | None, action: str) -> StageRun:
    if now is None:
        raise IllegalTransition(str(run), action, "it was deleted")
    return now


def _emit_ended(store: StepTable, run: StageRun, status: Status, error: str) -> None:
    event = RUN_FAILED if status == Status.FAILED else RUN_ENDED
    event.emit_on_commit(start, using=store.alias, run=run.pk, status=status.value, error=error)


def _emit_of_step(store: StepTable, event: Event, step: StageStep, **fields: Any) -> None:
    event.emit_on_commit(
        start,
        using=store.alias,
        run=step.run_id,
        step=step.pk,
        task=step.task,
        task_id=step.task_id,
        **fields,
    )
