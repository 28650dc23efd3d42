"""
What happens to a run, from its start to its end: each change is one transaction.

It locks the run's row first and what it changes of the steps after that, and writes the
messages of the next steps into the outbox along with it. So of steps that end at the same
time one begins the next stage, whatever dies; and nothing here asks a result backend.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Celery, current_app
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Exists, F
from django.db.models.functions import Now

from ..concurrency.header import Header, with_header
from ..exceptions import IllegalTransition, InvalidResult, describe_error, find_time_limit
from ..locks.lease import Lease
from ..sending.commit import hold, must_wait
from ..signals import (
    emit,
    is_observed,
    run_ended,
    run_resumed,
    run_started,
    stage_started,
    step_failed,
    step_succeeded,
)
from ..texts import get_logger
from ..transactions import ask_again, losing_a_race
from ..values import NotPlain, encode
from .plan import LONGEST_PARAMS, Plan, find_step_layer, make_plan
from .rows import StepStore, step_store
from .status import Status

if TYPE_CHECKING:
    from ..models import StageRun, StageStep, StageSteps

logger = get_logger(__name__)

#: The steps that wait where this thread runs others eagerly.
_eager = threading.local()

#: How often a process may die in a step before the step fails; RabbitMQ's quorum queues give
#: a message up after as many deliveries.
MOST_DEATHS: Final = 20


class Fault(NamedTuple):
    """What a step's row keeps of an error: its type, "" for none, and its text."""

    type: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return what is kept of an error; of a soft time limit that cut off another, that."""
        error = find_time_limit(error) or error
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
    store = step_store()
    must_wait(store.alias)  # for that of another database it could not
    try:
        with transaction.atomic(using=store.alias):
            return _write(store, plan)
    except DatabaseError as error:
        store.check_migrated(error)
        raise


def _write(store: StepStore, plan: Plan) -> StageRun:
    from ..models import StageRun, StageStep  # needs the app registry

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
    _tell(
        store, run_started, "Started %s of %s stage(s).", run, run.stages, run=run.pk,
        stages=run.stages,
    )  # fmt: skip
    _begin_stage(store, run, [step for step in steps if step.stage == 0])
    return run


def note_begun(store: StepStore, run: StageRun) -> None:
    """Note that a run's first step has begun."""
    if run.status != Status.WAITING:
        return
    with losing_a_race():
        store.runs().filter(pk=run.pk, status=Status.WAITING).update(status=Status.RUNNING)
    run.status = Status.RUNNING


def finish(store: StepStore, step: StageStep, lease: Lease[Any], params: dict[str, Any]) -> bool:
    """
    Note that a step succeeded, and begin the next stage if it was the last of its own.

    Tried again for as long as nobody else can have begun the step.

    Args:
        params: What the next stages get.

    Returns:
        Whether the step was still that of this lease.

    Raises:
        InvalidResult: The params can't be kept; nothing was noted.
    """
    try:
        text = encode(params, LONGEST_PARAMS) if params else ""
    except NotPlain as error:
        raise InvalidResult(step.task, str(error)) from error

    def ask() -> bool:
        with store.runs().locked(step.run_id) as run:
            complete = store.finish(step.pk, lease.token, text)
            if complete is None:
                # The answer to the one before may have got lost.
                return store.at(lease.name).is_done_by(lease.token)
            _tell_step(store, step_succeeded, logging.DEBUG, "Step %s of run %s succeeded.", step)
            if complete and run is not None and run.status not in Status.STOPPED:
                _go_on(store, run)
        return True

    return _ask(store, ask, step, lease)


def fail(store: StepStore, step: StageStep, lease: Lease[Any], fault: Fault) -> bool:
    """Note that a step failed, and stop its run; tell whether it was still that of this lease."""
    return _ask(
        store, lambda: _fail(store, store.at(lease.name).claimed(lease.token), step, fault),
        step, lease,
    )  # fmt: skip


def fail_attempt(
    store: StepStore, pk: int | None, task_id: str, fault: Fault, ours: Callable[[StageStep], bool]
) -> bool:
    """
    Note that the message of a step came to its end without its run's saying so.

    Args:
        pk: The step; None: whichever has this task id, if any.
        ours: Tells whether it was that run of a running step which ended.

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


def fail_silent(store: StepStore, run: StageRun, step: StageStep, reason: str) -> bool:
    """Fail a step of a locked run whose process has died; tell whether it still had."""
    row = store.at(str(step.pk)).running().filter(token=step.token, ends_at__lt=Now())
    row.update(deaths=F("deaths") + 1)
    return _fail_locked(store, run, row, step, Fault("", reason))


def put_back(store: StepStore, step: StageStep, lease: Lease[Any], fault: Fault) -> bool:
    """Let a step wait for its message, which comes again; tell whether it was of this lease."""

    def ask() -> bool:
        with store.runs().locked(step.run_id) as run:
            stopped = run is None or run.status in Status.STOPPED
            status = Status.ABORTED if stopped else Status.WAITING
            return store.at(lease.name).put_back(lease.token, status, *fault)

    return _ask(store, ask, step, lease)


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
        _tell(store, run_resumed, "Resumed %s, %s step(s).", now, len(left), run=pk,
              steps=len(left))  # fmt: skip
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
            raise IllegalTransition(str(run), "abort", f"it has {_ended(now.status)}")
        _stop(store, now, Status.ABORTED)
    run.refresh_from_db(using=store.alias)


def go_on(store: StepStore, pk: int) -> bool:
    """Let a run go on whose stage is complete, or that has failed; tell whether it did."""
    with store.runs().locked(pk) as run:
        if run is None or run.status in Status.STOPPED:
            return False
        if run.steps.failed().exists():
            _stop(store, run, Status.FAILED)
            return True
        return _go_on(store, run)


def send(
    store: StepStore, steps: Sequence[StageStep], tell: Callable[[], object] = lambda: None
) -> None:
    """
    Send the messages of steps, through the outbox, when the open transaction commits.

    Args:
        tell: Tells of it; what that leaves for the commit is forgotten if they can't be sent.
    """
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if not all(step.task in app.tasks for step in steps):
        # A command or a web server may not have yet, and a task knows its queue.
        app.loader.import_default_modules()
    if app.conf.task_always_eager:
        tell()
        transaction.on_commit(lambda: _run_eagerly(app, steps), using=store.alias)
        return

    def send_all(given: dict[str, Any]) -> None:
        tell()
        for step in steps:
            args, kwargs, options = _message(app, step)
            task = app.tasks.get(step.task)
            if task is None:  # another worker's
                app.send_task(step.task, args, kwargs, **options)
            else:
                task.apply_async(args, kwargs, **options)

    hold(app, send_all, store.alias, {}, outbox=True, canvas=True)


def runs_eagerly() -> bool:
    """Tell whether a step runs eagerly in this thread, so that others wait for its end."""
    return getattr(_eager, "waiting", None) is not None


def _run_eagerly(app: Celery, steps: Iterable[StageStep]) -> None:
    """Run steps here and now, each stage after the one before, not inside of it."""
    waiting: list[StageStep] | None = getattr(_eager, "waiting", None)
    if waiting is not None:
        waiting += steps
        return
    _eager.waiting = waiting = list(steps)
    try:
        while waiting:
            step = waiting.pop(0)
            args, kwargs, options = _message(app, step)
            app.tasks[step.task].apply(args, kwargs, **options)
    finally:
        _eager.waiting = None


def _message(app: Celery, step: StageStep) -> tuple[Any, ...]:
    """Return arguments and options of a step's message; its params stay in the table."""
    task = app.tasks.get(step.task)
    place = {"run": step.run_id, "step": step.pk}
    args: tuple[Any, ...] = (place,)
    if task is not None and find_step_layer(task) is None:
        args = (place, step.task)
    header = Header(task=step.task, step=step.pk)
    return args, step.arguments, with_header({"task_id": step.task_id}, header)


def _begin_stage(store: StepStore, run: StageRun, steps: list[StageStep]) -> None:
    def tell() -> None:
        _tell(
            store, stage_started, "Began stage %s of %s, %s step(s).", run.stage + 1, run,
            len(steps), run=run.pk, stage=run.stage, steps=len(steps),
        )  # fmt: skip

    send(store, steps, tell)


def _go_on(store: StepStore, run: StageRun) -> bool:
    """Begin the next stage of a locked run, or end it, if its stage is complete."""
    stages = run.steps.filter(stage__in=[run.stage, run.stage + 1])
    left = store.steps().filter(run=run.pk, stage=run.stage).unfinished()
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
        _tell_ended(store, run, Status.SUCCEEDED, "")
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


def _fail(store: StepStore, row: StageSteps, step: StageStep, fault: Fault) -> bool:
    with store.runs().locked(step.run_id) as run:
        if _fail_locked(store, run, row, step, fault):
            return True
        # The answer to the one before may have got lost.
        return store.at(str(step.pk)).failed().attempt(step.task_id).exists()


def _fail_locked(
    store: StepStore, run: StageRun | None, row: StageSteps, step: StageStep, fault: Fault
) -> bool:
    if not row.fail(*fault):
        return False
    _tell_step(
        store, step_failed, logging.WARNING, "Step %s of run %s failed: %s", step, str(fault),
        error=str(fault),
    )  # fmt: skip
    if run is not None and run.status not in Status.STOPPED:
        _stop(store, run, Status.FAILED)
    return True


def _stop(store: StepStore, run: StageRun, status: Status, error: str = "") -> None:
    """End a locked run that goes on, and what of it has not begun."""
    store.runs().filter(pk=run.pk).update(status=status, ended_at=Now(), error=error)
    store.steps().filter(run=run.pk).abort()
    _tell_ended(store, run, status, error)


def _ask(store: StepStore, ask: Callable[[], bool], step: StageStep, lease: Lease[Any]) -> bool:
    return ask_again(store.alias, ask, lease.patience(), f"the step {step}")


def _store_of(run: StageRun) -> StepStore:
    return StepStore(run.find_database())


def _checked(run: StageRun, now: StageRun | None, action: str) -> StageRun:
    if now is None:
        raise IllegalTransition(str(run), action, "it was deleted")
    return now


def _ended(status: str) -> str:
    return "been aborted" if status == Status.ABORTED else str(status)


def _tell_ended(store: StepStore, run: StageRun, status: Status, error: str) -> None:
    level = logging.WARNING if status == Status.FAILED else logging.INFO
    why = f": {error}" if error else "."
    _tell(store, run_ended, "%s has %s%s", run, _ended(status), why, level=level, run=run.pk,
          status=status.value, error=error)  # fmt: skip


def _tell_step(
    store: StepStore, signal: Any, level: int, text: str, step: StageStep, *args: str, **fields: Any
) -> None:
    if is_observed(signal, logger, level):
        _tell(
            store, signal, text, step, step.run_id, *args, level=level, run=step.run_id,
            step=step.pk, task=step.task, task_id=step.task_id, **fields,
        )  # fmt: skip


def _tell(
    store: StepStore,
    signal: Any,
    text: str,
    *args: Any,
    level: int = logging.INFO,
    **fields: Any,
) -> None:
    """Tell of what is done when the open transaction commits."""
    said = [str(one) for one in args]
    transaction.on_commit(
        lambda: emit(signal, logger, level, text, *said, sender=start, **fields),
        using=store.alias,
    )
