"""
The changes of a run, from its start to its end.

One statement records that a step succeeded. After its commit, the step's process checks
whether the stage is complete. The last step to be recorded sees all the others, so at least
one process tries to start the next stage; the lock on the run's row makes sure that only one
does. Every other change is one transaction that locks the run's row first, then the rows of
the steps that it changes. That transaction also writes the messages of the next steps into
the outbox. No result backend is involved.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import Exists

from ..databases import MYSQL, Now, is_lost_race, refuse_unfit
from ..emitting import Event
from ..events import RUN_ENDED, RUN_FAILED, RUN_STARTED, STEP_FAILED
from ..exceptions import AlreadyStarted
from ..foreign_errors import describe_error, find_soft_time_limit, text_of
from ..sending.commit import must_wait
from ..texts import get_logger
from ..transactions import TRIES, attempts
from ..values import NotPlain, encode
from .labels import NO_LABELS, Labels, make_labels
from .plan import LONGEST_PARAMS, Plan, make_plan
from .status import Status
from .step_messages import send
from .step_table import BATCH, COUNTDOWN, StepTable, step_table

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep
    from ..models.step_states import StageSteps
    from .running import StepClaim

logger = get_logger(__name__)

#: How many times a start tries to write its run while other runs with its key are ending.
MOST_STARTS: Final = 3


class StepError(NamedTuple):
    """An error as a step's row stores it: type ("": none), text and end of the traceback."""

    type: str
    text: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> StepError:
        """Return the type and text of an error, or of the soft time limit that it hides."""
        error = find_soft_time_limit(error) or error
        # Celery also makes errors to report an event; these were never raised.
        trace = "".join(format_exception(error)) if error.__traceback__ else ""
        return cls(type(error).__name__, text_of(error), trace)

    def __str__(self) -> str:
        return f"{self.type}: {self.text}".strip(": ")


def start(
    plan: Plan | Mapping[str, Any] | Iterable[Any],
    params: Mapping[str, Any] | None = None,
    *,
    key: str = "",
    name: str = "",
    url: Any = "",
) -> StageRun:
    """
    Run tasks in stages: tasks of one priority together, lower priorities after higher ones.

    A stage starts exactly once, when all steps of the previous stage have succeeded; its
    steps find the results of that stage in their params. If a step fails after its retries,
    the steps that have not started are aborted. The run and its messages are written in one
    transaction: inside ``atomic()`` the run starts when that block commits. The router chooses
    their database.

    Args:
        plan: A list of ``(task, priority)`` or ``(task, priority, arguments)``. A task is an
            object or a name and may appear several times. Priorities are numbers; the highest
            runs first. Arguments are a dict that only this entry's function receives.
            Names in it that begin with an @ are options, such as ``"@queue"``.
            A dictionary with such a list and the params also works: ``{"sub_tasks": [...],
            "params": {...}}``. A :class:`Plan` works, too. At most 100,000 entries.
        params: A dict of plain data for the steps; None: empty. At most 64 KB of JSON,
            including the params that the steps add.
        key: No second run with this key starts before the first run has ended; "": any number
            of runs. At most 255 characters, such as ``"album:7"``.
        name: The name that lists and errors show to people; "": the run's key or number.
            It is cut to 255 characters.
        url: The object that the run is about, to which the admin links: an object with
            ``get_absolute_url()``, or a URL; "": none. A URL begins with ``/``, ``http://`` or
            ``https://``.

    Returns:
        The run. ``run.wait()`` waits for its end, and ``run.progress`` says how far it is.

    Raises:
        ConfigurationError: The plan can't be run, or the database has no tables for runs;
            nothing was written.
        AlreadyStarted: A run with this key has not ended; the error's ``run`` is that run.
        WrongTransaction: Another database is inside ``atomic()``, and the run would not wait
            for that commit.

    Example:
        >>> from django_celery_safe import stages
        >>> run = stages.start([("shop.tasks.fetch", 3), ("shop.tasks.notify", 1)], {"album": 7})
        >>> run.progress.total
        2

    Source:
        "Celery task priority orchestration".
    """
    plan, labels = make_plan(plan, params), NO_LABELS
    if (key, name, url) != NO_LABELS:
        labels = make_labels(key, name, url)
    store = step_table()
    must_wait(store.alias)  # the run could not wait for a commit on another database
    try:
        if connections[store.alias].vendor == MYSQL:
            refuse_unfit(store.alias, "hold runs of stages")
        return _write_once(store, plan, labels)
    except DatabaseError as error:
        store.check_migrated(error)
        raise


def _write_once(store: StepTable, plan: Plan, labels: Labels) -> StageRun:
    for last in range(1, MOST_STARTS + 1):
        try:
            # When the start that holds a key is rolled back, MySQL reports a deadlock to all
            # but one of the starts that waited for the key.
            for attempt in attempts(store.alias, "The start of a run"):
                with attempt, transaction.atomic(using=store.alias):
                    run = _write(store, plan, labels)
                    attempt.is_written = True
            return run
        except IntegrityError as error:
            if not labels.key:
                raise
            active = store.runs().filter(active_key=labels.key).first()
            # That run may have ended since, or this transaction's isolation may hide it.
            if active is not None or last == MOST_STARTS:
                raise AlreadyStarted(labels.key, active) from error
    raise AssertionError  # pragma: no cover


def _write(store: StepTable, plan: Plan, labels: Labels) -> StageRun:
    from ..models.stages import StageRun, StageStep  # needs the app registry

    run = StageRun(
        **labels._asdict(),
        active_key=labels.key or None,  # type: ignore[misc]
        stages=len(plan.stages),
        params_text=plan.params,
        created_at=Now(),
        stage_at=Now(),
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
        for stage, entries in enumerate(plan.stages, 1)
        for position, entry in enumerate(entries, 1)
    ]
    store.steps().bulk_create(steps, batch_size=BATCH)
    if steps[0].pk is None:  # MySQL returns no keys
        steps = list(store.steps().filter(run=run.pk).in_order())
    run.refresh_from_db()
    emit_of_run(store, RUN_STARTED, run, stages=run.stages)
    begin_stage(store, run, [step for step in steps if step.stage == run.stage])
    return run


def record_begun(store: StepTable, run: StageRun) -> None:
    """Record that a run's first step has started."""
    try:
        store.runs().filter(pk=run.pk, status=Status.WAITING).update(status=Status.RUNNING)
    except OperationalError as error:
        if not is_lost_race(error):  # another step of the run may have recorded it
            raise
    run.status = Status.RUNNING


def follow_success(claim: StepClaim) -> None:
    """Continue the run of a step whose success has been committed."""
    step = claim.step
    try:
        claim.ask(lambda: leave_stage(claim.table, step))
    except DatabaseError as error:
        logger.warning(
            "Could not check whether stage %s of run %s is complete; if it is, a sweep begins the "
            "next one: %s",
            step.stage,
            step.run_id,
            describe_error(error),
        )


def leave_stage(store: StepTable, step: StageStep) -> None:
    """Continue the run of a step that has succeeded, if the step's stage is complete."""
    if not store.is_complete(step.run_id, step.stage):
        return
    with store.runs().locked(step.run_id) as run:
        if run is not None and run.status not in Status.STOPPED:
            go_on_locked(store, run)


def fail(claim: StepClaim, fault: StepError) -> bool:
    """Record that a step failed, and stop its run; return whether the claim still held the step."""
    store, step = claim.table, claim.step

    def ask() -> bool:
        return _fail(store, store.at(claim.name).claimed(claim.token), step, fault)

    return claim.ask(ask)


def fail_attempt(
    store: StepTable,
    pk: int | None,
    task_id: str,
    fault: StepError,
    ours: Callable[[StageStep], bool],
) -> bool:
    """
    Fail a step whose message was revoked or expired, or whose process was killed.

    Args:
        pk: The step; None: the step with this task id, if there is one.
        ours: Returns whether the attempt that ended is the one that holds the running step.

    Returns:
        Whether the step was waiting for that message or was run by it.
    """
    steps = store.steps().attempt(task_id).select_related("run")
    # A process that is being killed may give its claim back between the look and the update.
    for _ in range(TRIES):
        step = (steps if pk is None else steps.filter(pk=pk)).first()
        if step is None or step.status in Status.STOPPED:
            return False
        if step.status == Status.RUNNING and not ours(step):
            return False
        row = store.at(str(step.pk)).attempt(task_id).filter(status=step.status, token=step.token)
        if _fail(store, row, step, fault):
            return True
    return False


def put_back(claim: StepClaim, fault: StepError, *, died: bool = False) -> bool:
    """Make a step wait for its message again; return whether the claim still held it."""
    store, step = claim.table, claim.step

    def ask() -> bool:
        with store.runs().locked(step.run_id) as run:
            stopped = run is None or run.status in Status.STOPPED
            status = Status.ABORTED if stopped else Status.WAITING
            row = store.at(claim.name)
            if row.put_back(claim.token, status, *fault, died=died):
                return True
            # An earlier attempt may have succeeded, although its answer was lost.
            return bool(row.filter(token=claim.token, status=status).exists())

    return claim.ask(ask)


def go_on(store: StepTable, pk: int) -> bool:
    """Continue a run whose stage is complete, or end it if a step failed; return True if so."""
    with store.runs().locked(pk) as run:
        if run is None or run.status in Status.STOPPED:
            return False
        if run.steps.failed().exists():
            stop(store, run, Status.FAILED)
            return True
        return go_on_locked(store, run)


def begin_stage(store: StepTable, run: StageRun, steps: list[StageStep]) -> None:
    """Send the messages of a locked run's stage; steps with a countdown start later."""
    if any(COUNTDOWN in step.arguments_text for step in steps):
        store.delay(steps)
    send(store, steps, with_countdown=True)


def go_on_locked(store: StepTable, run: StageRun) -> bool:
    """Start the next stage of a locked run, or end the run, if its stage is complete."""
    stages = run.steps.filter(stage__in=[run.stage, run.stage + 1])
    left = stages.filter(stage=run.stage).unfinished()
    rows = list(stages.filter(~Exists(left)))
    if not rows:
        return False
    ended = [step for step in rows if step.stage == run.stage]
    following = [step for step in rows if step.stage == run.stage + 1]
    try:
        run.params_text = encode_params(run, ended)
    except NotPlain as error:
        what = (
            f"The results of stage {run.stage} can't be kept for the next one: {error}. Let its "
            f"steps return less and resume: those that returned something run again."
        )
        stop(store, run, Status.FAILED, what)
        return True
    ours = store.runs().filter(pk=run.pk, stage=run.stage)
    if not following:
        ours.update(
            status=Status.SUCCEEDED, params_text=run.params_text, ended_at=Now(), active_key=None
        )
        _emit_ended(store, run, Status.SUCCEEDED, "")
        return True
    run.stage += 1
    ours.update(stage=run.stage, params_text=run.params_text, stage_at=Now())
    try:
        begin_stage(store, run, following)
    except (DatabaseError, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - sending a task may raise anything
        # The step that has just ended is not to blame, so it stays a success.
        what = f"Stage {run.stage} can't be begun: {describe_error(error)}."
        stop(store, run, Status.FAILED, what)
    return True


def encode_params(run: StageRun, ended: Iterable[StageStep]) -> str:
    """
    Return the params of a run after these steps, as JSON.

    Raises:
        NotPlain: They are too large.
    """
    params = merge(run, ended)
    return encode(params, LONGEST_PARAMS) if params else "{}"


def merge(run: StageRun, steps: Iterable[StageStep]) -> dict[str, Any]:
    """Return a run's params with the values that these steps returned; later steps win."""
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
        if not row.fail(*fault):
            # An earlier attempt may have succeeded, although its answer was lost.
            return store.at(str(step.pk)).failed().attempt(step.task_id).exists()
        STEP_FAILED.emit_on_commit(
            start,
            using=store.alias,
            run=step.run_id,
            step=step.pk,
            task=step.task,
            task_id=step.task_id,
            error=str(fault),
        )
        if run is not None and run.status not in Status.STOPPED:
            stop(store, run, Status.FAILED)
        return True


def stop(store: StepTable, run: StageRun, status: Status, error: str = "") -> None:
    """End a locked run that is active, and abort its steps that have not started."""
    store.runs().filter(pk=run.pk).update(
        status=status, ended_at=Now(), error=error, active_key=None
    )
    store.steps().filter(run=run.pk).abort()
    _emit_ended(store, run, status, error)


def _emit_ended(store: StepTable, run: StageRun, status: Status, error: str) -> None:
    event = RUN_FAILED if status == Status.FAILED else RUN_ENDED
    emit_of_run(store, event, run, status=status.value, error=error)


def emit_of_run(store: StepTable, event: Event, run: StageRun, **fields: Any) -> None:
    """Emit a run's event when the open transaction commits."""
    event.emit_on_commit(
        start, using=store.alias, run=run.pk, key=run.key, name=run.name or run.key, **fields
    )
