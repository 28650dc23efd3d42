"""
The changes of a run, from its start to its end.

One statement records that a step succeeded. After its commit, the step's process checks
whether the stage is complete. The last step to be recorded sees all the others, so at least
one process tries to start the next stage; the lock on the run's row makes sure that only one
does. Every other change is one transaction that locks the run's row first, then the message
that ends, then the rows of steps. That transaction also writes the messages of the next steps
into the outbox. No result backend is involved.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import IntegrityError, connections, transaction

from .. import queries
from ..databases import Now
from ..emitting import Event
from ..events import RUN_ENDED, RUN_FAILED, RUN_STARTED, STEP_FAILED
from ..exceptions import AlreadyStarted
from ..sending.commit import must_wait
from ..sending.followed import NOTHING, Fault
from ..texts import describe_error, get_logger
from ..transactions import Attempts, refuse_unmigrated
from ..values import NotPlain, decode, encode
from .labels import make_labels
from .plan import LONGEST_PARAMS, Plan, make_plan
from .status import Status
from .step_messages import send
from .step_table import BATCH, MODELS, StepTable, step_table

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep
    from ..models.step_states import StageSteps

logger = get_logger(__name__)

#: How many times a start tries to write its run while other runs with its key are ending.
MOST_STARTS: Final = 3
#: The fields of a step that one stage hands over to the next, in the order of the model.
HANDED_OVER: Final = (
    "id", "run_id", "stage", "task", "arguments_text", "task_id", "params_text",
)  # fmt: skip


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
    plan, labels = make_plan(plan, params), make_labels(key, name, url)
    store = step_table()
    must_wait(store.alias)  # the run could not wait for a commit on another database
    try:
        return _write_once(store, plan, labels)
    except DatabaseError as error:
        refuse_unmigrated(store.alias, "hold runs of stages and their outbox", MODELS, error)
        raise


def _write_once(store: StepTable, plan: Plan, labels: dict[str, str]) -> StageRun:
    for last in range(1, MOST_STARTS + 1):
        try:
            # When the start that holds a key is rolled back, MySQL reports a deadlock to all
            # but one of the starts that waited for the key.
            for attempt in Attempts(store.alias, "The start of a run"):
                with attempt, transaction.atomic(using=store.alias):
                    run = _write(store, plan, labels)
                    attempt.is_written = True
            return run
        except IntegrityError as error:
            if not (key := labels["key"]):
                raise
            active = store.runs().filter(active_key=key).first()
            # That run may have ended since, or this transaction's isolation may hide it.
            if active is not None or last == MOST_STARTS:
                raise AlreadyStarted(key, active) from error
    raise AssertionError  # pragma: no cover


def _write(store: StepTable, plan: Plan, labels: dict[str, str]) -> StageRun:
    rows = store.steps()
    run: StageRun = store.run(
        **labels,
        active_key=labels["key"] or None,
        stages=len(plan.stages),
        params_text=plan.params,
        created_at=Now(),
    )
    run.save(using=store.alias, force_insert=True)
    steps = [
        store.step(
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
    rows.bulk_create(steps, batch_size=BATCH)
    if steps[0].pk is None:  # MySQL returns no keys
        steps = list(run.steps)
    run.refresh_from_db(using=store.alias)
    emit_of_run(store, RUN_STARTED, run, stages=run.stages)
    send(store, [step for step in steps if step.stage == run.stage])
    return run


def leave(store: StepTable, pk: int, write: Callable[[], bool]) -> bool:
    """
    Continue a run whose stage seems to be complete, and end the message of its last step.

    Args:
        pk: The run.
        write: Ends the message; returns whether its claim still held it.
    """
    with store.runs().locked(pk) as run:
        if run is not None and run.status not in Status.STOPPED:
            go_on(store, run)
        return write()


def fail(store: StepTable, run: StageRun | None, step: StageStep, fault: Fault) -> None:
    """Record that a step of a locked run failed, unless it has ended, and stop the run."""
    goes_on = run is not None and run.status not in Status.STOPPED
    if not store.at(step.pk, step.task_id).open().record(Status.FAILED, fault):
        if run is not None and goes_on:
            go_on(store, run)  # it has succeeded, and its process died before that
        return
    facts = {"run": step.run_id, "step": step.pk, "task": step.task, "task_id": step.task_id}
    STEP_FAILED.emit_on_commit(start, using=store.alias, **facts, error=str(fault))
    if run is not None and goes_on:
        stop(store, run, Status.FAILED)


def settle(store: StepTable, steps: StageSteps) -> None:
    """Record what finish() has committed of steps of a locked run, before they end otherwise."""
    ids = list(steps.open().values_list("task_id", flat=True))
    for first in range(0, len(ids), BATCH):
        rows = store.messages().carried(*ids[first : first + BATCH]).exclude(result="")
        for task_id, text in rows.values_list("task_id", "result"):
            steps.filter(task_id=task_id).open().update(
                status=Status.SUCCEEDED,
                params_text="" if text == NOTHING else text,
                ended_at=Now(),
                error_type="",
                error="",
                traceback="",
            )


def put_back(store: StepTable, row: StageSteps, pk: int, fault: Fault) -> None:
    """Let a running step wait for its message again; where its run has stopped, abort it."""
    with store.runs().locked(pk) as run:
        stopped = run is None or run.status in Status.STOPPED
        if stopped:
            settle(store, row)
        row.running().record(Status.ABORTED if stopped else Status.WAITING, fault)


def go_on(store: StepTable, run: StageRun) -> None:
    """Start the next stage of a locked run, or end the run, if its stage is complete."""
    found = queries.fetch(store.alias, "hand_over", run=run.pk, stage=run.stage)
    if not found:
        return
    rows = [store.step.from_db(store.alias, HANDED_OVER, row) for row in found]
    ended = [step for step in rows if step.stage == run.stage]
    following = rows[len(ended) :]
    try:
        run.params_text = encode_params(run, ended)
    except NotPlain as error:
        what = (
            f"The results of stage {run.stage} can't be kept for the next one: {error}. Let its "
            f"steps return less and resume: those that returned something run again."
        )
        stop(store, run, Status.FAILED, what)
        return
    if not following:
        store.runs().filter(pk=run.pk).update(
            status=Status.SUCCEEDED, params_text=run.params_text, ended_at=Now(), active_key=None
        )
        _emit_ended(store, run, Status.SUCCEEDED, "")
        return
    run.stage += 1
    values = {"pk": run.pk, "stage": run.stage, "params": run.params_text}
    queries.execute(store.alias, "begin_stage", **values)
    try:
        send(store, following)
    except (DatabaseError, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - sending a task may raise anything
        # The step that has just ended is not to blame, so it stays a success.
        what = f"Stage {run.stage} can't be begun: {describe_error(error)}."
        stop(store, run, Status.FAILED, what)


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
    params: dict[str, Any] = decode(run.params_text)
    by = dict[str, Any]()
    for step in steps:
        for key, value in (decode(step.params_text) if step.params_text else {}).items():
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


def stop(store: StepTable, run: StageRun, status: Status, error: str = "") -> None:
    """End a locked run that is active, and abort its steps that have not started."""
    store.runs().filter(pk=run.pk).update(
        status=status, ended_at=Now(), error=error, active_key=None
    )
    settle(store, store.steps().filter(run=run.pk, stage=run.stage))
    waiting = store.steps().filter(run=run.pk).waiting()
    drop_messages(store, waiting.filter(stage=run.stage))
    waiting.update(status=Status.ABORTED, ended_at=Now())
    _emit_ended(store, run, status, error)


def drop_messages(store: StepTable, steps: StageSteps, *, claimed: bool = False) -> None:
    """Delete the messages of steps of a locked run, but those that a statement has locked."""
    ids = list(steps.values_list("task_id", flat=True))
    skip = connections[store.alias].features.has_select_for_update_skip_locked
    for first in range(0, len(ids), BATCH):
        rows = store.messages().carried(*ids[first : first + BATCH])
        if not claimed:
            rows = rows.exclude(state="running")
        found = list(rows.select_for_update(skip_locked=skip).values_list("pk", flat=True))
        store.messages().filter(pk__in=found).erase()


def _emit_ended(store: StepTable, run: StageRun, status: Status, error: str) -> None:
    event = RUN_FAILED if status == Status.FAILED else RUN_ENDED
    emit_of_run(store, event, run, status=status.value, error=error)


def emit_of_run(store: StepTable, event: Event, run: StageRun, **fields: Any) -> None:
    """Emit a run's event when the open transaction commits."""
    event.emit_on_commit(
        start, using=store.alias, run=run.pk, key=run.key, name=run.name or run.key, **fields
    )
