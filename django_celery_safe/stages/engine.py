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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import IntegrityError, connections, transaction

from .. import queries
from ..databases import Now
from ..emitting import Event
from ..events import RUN_ENDED, RUN_FAILED, RUN_RESUMED, RUN_STARTED, STEP_FAILED
from ..exceptions import AlreadyStarted, IllegalTransition
from ..sending.commit import must_wait
from ..sending.followed import NOTHING, Fault, Held
from ..texts import describe_error
from ..transactions import MOST_KEYS, Attempts, refuse_unmigrated
from ..values import NotPlain, decode, encode
from .entries import LONGEST_PARAMS
from .plan import Plan, make_labels, make_plan
from .status import Status
from .step_messages import send
from .step_table import HANDED_OVER, MODELS, StepTable, step_table, table_in

if TYPE_CHECKING:
    from ..models.stage_states import StageSteps
    from ..models.stages import StageRun, StageStep


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
        # When the start that holds a key is rolled back, MySQL reports a deadlock to all but one
        # of the starts that waited for the key.
        for attempt in Attempts(store.alias, "The start of a run"):
            with attempt, transaction.atomic(using=store.alias):
                run = _write(store, plan, labels)
                attempt.is_written = True
        return run
    except IntegrityError as error:
        if not key:
            raise
        # That run may have ended since, or this transaction's isolation may hide it.
        raise AlreadyStarted(key, store.runs.filter(active_key=key).first()) from error
    except DatabaseError as error:
        refuse_unmigrated(store.alias, "hold runs of stages and their outbox", MODELS, error)
        raise


def _write(store: StepTable, plan: Plan, labels: dict[str, str]) -> StageRun:
    run = store.runs.create(
        **labels,
        active_key=labels["key"] or None,  # type: ignore[misc]
        stages=len(plan.stages),
        params_text=plan.params,
        created_at=Now(),
    )
    steps = [
        store.steps.model(
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
    store.steps.bulk_create(steps, batch_size=MOST_KEYS)
    if steps[0].pk is None:  # MySQL returns no keys
        steps = list(run.steps)
    run.refresh_from_db(using=store.alias)
    _emit(store, RUN_STARTED, run, stages=run.stages)
    send(store, [step for step in steps if step.stage == run.stage])
    return run


def leave(store: StepTable, pk: int, write: Callable[[], bool]) -> bool:
    """
    Continue a run whose stage seems to be complete, and end the message of its last step.

    ``write`` ends the message, and returns whether its claim still held it.
    """
    with store.runs.locked(pk) as run:
        if run is not None and run.status not in Status.STOPPED:
            go_on(store, run)
        return write()


def fail(store: StepTable, row: StageSteps, write: Callable[[], bool], fault: Fault) -> bool:
    """
    Fail a step together with its message, unless it has succeeded, and stop its run.

    ``write`` ends the message, and returns whether its claim still held it: so does this.
    """
    if (step := row.first()) is None:
        return write()
    with store.runs.locked(step.run_id) as run:
        settle(store, row)
        ours = write()
        active = None if run is None or run.status in Status.STOPPED else run
        if ours and row.open().record(Status.FAILED, fault):
            facts = {"run": step.run_id, "step": step.pk, "task": step.task}
            facts |= {"task_id": step.task_id, "error": str(fault)}
            STEP_FAILED.emit_on_commit(start, using=store.alias, **facts)
            if active is not None:
                stop(store, active, Status.FAILED)
        elif ours and active is not None:
            go_on(store, active)  # the process died before it began the next stage
    return ours


def succeed(store: StepTable, pk: int, task_id: str, text: str, held: Held | None = None) -> None:
    """Record that a step succeeded with these params, if it is open and its message is held."""
    attempt, token = held or ("", "")
    step = {"pk": pk, "task_id": task_id, "params": text}
    claim = {"attempt": attempt, "token": token, "is_sure": held is None}
    queries.execute(store.alias, "succeed_step", **step, **claim)


def settle(store: StepTable, steps: StageSteps) -> None:
    """Record what finish() has committed of steps of a locked run, before they end otherwise."""
    found = {step.task_id: step.pk for step in steps.open().only("task_id")}
    ids = [*found]
    for first in range(0, len(ids), MOST_KEYS):
        rows = store.messages.carried(*ids[first : first + MOST_KEYS]).exclude(result="")
        for task_id, text in rows.values_list("task_id", "result"):
            succeed(store, found[task_id], task_id, "" if text == NOTHING else text)


def put_back(store: StepTable, row: StageSteps, pk: int, fault: Fault) -> None:
    """Let a running step wait for its message again; where its run has stopped, abort it."""
    with store.runs.locked(pk) as run:
        stopped = run is None or run.status in Status.STOPPED
        if stopped:
            settle(store, row)
        row.running().record(Status.ABORTED if stopped else Status.WAITING, fault)


def go_on(store: StepTable, run: StageRun) -> None:
    """Start the next stage of a locked run, or end the run, if its stage is complete."""
    found = queries.fetch(store.alias, "hand_over", run=run.pk, stage=run.stage)
    if not found:
        return
    rows = [store.steps.model.from_db(store.alias, HANDED_OVER, row) for row in found]
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
        _end(store, run, Status.SUCCEEDED, params_text=run.params_text)
        return
    run.stage += 1
    store.runs.filter(pk=run.pk).update(stage=run.stage, params_text=run.params_text)
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
    Return a run's params with the values that these steps returned, as JSON; later steps win.

    Raises:
        NotPlain: They are too large.
    """
    params: dict[str, Any] = decode(run.params_text)
    for step in ended:
        params |= decode(step.params_text or "{}")
    return encode(params, LONGEST_PARAMS) if params else "{}"


def stop(store: StepTable, run: StageRun, status: Status, error: str = "") -> None:
    """End a locked run that is active, and abort its steps that have not started."""
    _end(store, run, status, error)
    settle(store, store.steps.filter(run=run.pk, stage=run.stage))
    waiting = store.steps.filter(run=run.pk).waiting()
    drop_messages(store, waiting.filter(stage=run.stage))
    waiting.update(status=Status.ABORTED, ended_at=Now())


def _end(store: StepTable, run: StageRun, status: Status, error: str = "", **sets: Any) -> None:
    """Record the end of a locked run, and emit its event."""
    sets |= {"status": status, "error": error, "ended_at": Now(), "active_key": None}
    store.runs.filter(pk=run.pk).update(**sets)
    event = RUN_FAILED if status == Status.FAILED else RUN_ENDED
    _emit(store, event, run, status=status.value, error=error)


def drop_messages(store: StepTable, steps: StageSteps, *, claimed: bool = False) -> None:
    """Delete the messages of steps of a locked run, but those that a statement has locked."""
    ids = list(steps.values_list("task_id", flat=True))
    skip = connections[store.alias].features.has_select_for_update_skip_locked
    for first in range(0, len(ids), MOST_KEYS):
        rows = store.messages.carried(*ids[first : first + MOST_KEYS])
        if not claimed:
            rows = rows.exclude(state="running")
        found = list(rows.select_for_update(skip_locked=skip).values_list("pk", flat=True))
        store.messages.filter(pk__in=found).erase()


def _emit(store: StepTable, event: Event, run: StageRun, **fields: Any) -> None:
    """Emit a run's event when the open transaction commits."""
    fields |= {"run": run.pk, "key": run.key, "name": run.name or run.key}
    event.emit_on_commit(start, using=store.alias, **fields)


def resume(run: StageRun) -> None:
    """Run the failed steps and all later ones again; see :meth:`StageRun.resume`."""
    store = table_in(run.find_database())
    try:
        with _deciding(store, run, "resume", (Status.FAILED, Status.ABORTED)) as now:
            if (busy := now.steps.alive().first()) is not None:
                raise IllegalTransition(str(run), "resume", f"its step {busy} still runs")
            # This update comes first because it fails if another run holds the key.
            store.runs.filter(pk=run.pk).update(
                status=Status.RUNNING, ended_at=None, error="", active_key=now.key or None
            )
            settle(store, now.steps.filter(stage=now.stage))
            left = [step for rows in _find_unsettled(now) for step in _restart(store, rows)]
            _emit(store, RUN_RESUMED, now, steps=len(left))
            if again := [step for step in left if step.stage == now.stage]:
                send(store, again)
            else:
                go_on(store, now)  # the run was stopped while the stage's last step ran
    except IntegrityError as error:
        if not run.key:
            raise
        reason = f"another run has its key {run.key!r} and has not ended"
        raise IllegalTransition(str(run), "resume", reason) from error


def abort(run: StageRun) -> None:
    """Abort the steps that have not started; see :meth:`StageRun.abort`."""
    store = table_in(run.find_database())
    with _deciding(store, run, "abort", (Status.WAITING, Status.RUNNING)) as now:
        stop(store, now, Status.ABORTED)


@contextmanager
def _deciding(
    store: StepTable, run: StageRun, action: str, allowed: Collection[str]
) -> Iterator[StageRun]:
    """Lock a run for an operator's decision, if its status allows that; refresh it afterwards."""
    with store.runs.locked(run.pk) as now:
        if now is None or now.status not in allowed:
            reason = "it was deleted" if now is None else f"its status is {now.status}"
            raise IllegalTransition(str(run), action, reason)
        yield now
    run.refresh_from_db(using=store.alias)


def _find_unsettled(run: StageRun) -> list[StageSteps]:
    """Return the steps that a resumed run still has to run, or to run again."""
    unfinished, ended = run.steps.unfinished(), run.steps.filter(stage=run.stage)
    if not ended.unfinished().exists():
        try:
            encode_params(run, ended)
        except NotPlain:
            # Without this, the run would fail again even if the tasks have been fixed.
            return [ended.exclude(params_text=""), unfinished]
    return [unfinished]


def _restart(store: StepTable, rows: StageSteps) -> list[StageStep]:
    steps = list(rows)
    drop_messages(store, rows, claimed=True)  # so that no earlier run of them counts any more
    if store.messages.carried(*[step.task_id for step in steps]).exists():
        run = steps[0].run
        raise IllegalTransition(str(run), "resume", "a step of it is about to commit its work")
    for step in steps:
        step.task_id = str(uuid.uuid4())
    rows.restart(steps)
    return steps
