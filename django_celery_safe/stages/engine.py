"""
The changes of a run, from its start to its end, and what a run of a message means for its step.

One statement records that a step succeeded. After its commit, the step's process checks
whether the stage is complete. The last step to be recorded sees all the others, so at least
one process tries to start the next stage; the lock on the run's row makes sure that only one
does. The message of a step ends last: in the transaction that begins the next stage, if the stage
is complete. So whoever dies in between leaves a message that comes back, finds its step succeeded,
and goes on without calling anything.

Every other change is one transaction that locks the run's row first, then the message
that ends, then the rows of steps. That transaction also writes the messages of the next steps
into the outbox. No result backend is involved.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.apps import apps
from django.db import Error as DatabaseError
from django.db import IntegrityError, connections, router, transaction

from .. import queries
from ..databases import Now, refuse_untested
from ..emitting import Event
from ..events import RUN_ENDED, RUN_FAILED, RUN_RESUMED, RUN_STARTED, STEP_FAILED
from ..exceptions import AlreadyStarted, IllegalTransition, InvalidResult
from ..sending.commit import must_wait
from ..sending.followed import NOTHING, Fault, Held
from ..texts import describe_error
from ..transactions import MOST_KEYS, Attempts, refuse_unmigrated
from ..values import NotPlain, decode, encode
from .plan import LONGEST_PARAMS, Plan, encode_named, make_labels, make_plan, read_entry
from .status import Status
from .step_messages import send

if TYPE_CHECKING:
    from ..models.stage_states import StageRuns, StageSteps
    from ..models.stages import StageRun, StageStep

#: The models of the tables.
MODELS: Final = ("StageRun", "StageStep", "OutboxMessage")
#: Fields that are read when a run is locked; the others are read when they are used.
LOCKED: Final = ("id", "key", "name", "status", "stage", "stages", "params_text")
#: The fields of a step that one stage hands over to the next, in the order of the model.
HANDED_OVER: Final = (
    "id", "run_id", "stage", "task", "arguments_text", "task_id", "params_text",
)  # fmt: skip
#: The error type of a step that failed without an exception, so that lists can filter by it.
RETURNED_FALSE: Final = "ReturnedFalse"
#: Advice on the value that a step returns.
STEP_RESULT: Final = (
    "Return a dict of plain data for the next stages, None, True, False, or (success, dict)."
)
NOT_CALLED: Final = Fault(
    InvalidResult.__name__,
    "Its function was not called: what is above @stages.step returned something instead.",
)
#: Why a step whose message comes back after the end of its run is aborted.
DIED: Final = Fault("", "Its process died before the run ended.")


class Found(NamedTuple):
    """The columns of a step and of its run that the step's message needs."""

    status: str
    run: int
    stage: int
    arguments: str
    run_status: str
    params: str


#: The same columns, as the ORM names them.
FOUND: Final = ("status", "run_id", "stage", "arguments_text", "run__status", "run__params_text")


class StepTable:
    """The runs and steps in one database, and the outbox that carries them; see ``table_in``."""

    #: Managers, which have the methods of these querysets.
    runs: StageRuns
    steps: StageSteps
    messages: Any

    def __init__(self, alias: str) -> None:
        refuse_untested(alias, "hold runs of stages")
        self.alias = alias
        managers = [_model(name).objects.db_manager(alias) for name in MODELS]
        self.runs, self.steps, self.messages = managers

    def at(self, pk: int, task_id: str) -> StageSteps:
        """Return a queryset of the step that messages with this task id run: one row or none."""
        return self.steps.filter(pk=pk, task_id=task_id)


def _model(name: str) -> Any:
    return apps.get_model("django_celery_safe", name)


def step_table() -> StepTable:
    """Return the runs and steps in the database to which the router writes them."""
    return table_in(router.db_for_write(_model("StageRun")))


#: Returns the table in the database with this alias.
table_in = lru_cache(StepTable)


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


@contextmanager
def _locked(store: StepTable, pk: int) -> Iterator[StageRun | None]:
    """
    Lock a run for the block, in a transaction; None: it was deleted.

    The lock is an UPDATE, which works on every database. Under a stricter isolation an
    UPDATE fails, where a SELECT would get the lock and continue with outdated values.
    """
    for attempt in Attempts(store.alias, f"A change of run {pk}"):
        with attempt, transaction.atomic(using=store.alias):
            rows = queries.fetch(store.alias, "lock_run", pk=pk)
            attempt.is_won = True
            yield store.runs.model.from_db(store.alias, LOCKED, rows[0]) if rows else None


def leave(store: StepTable, pk: int, write: Callable[[], bool]) -> bool:
    """
    Continue a run whose stage seems to be complete, and end the message of its last step.

    ``write`` ends the message, and returns whether its claim still held it.
    """
    with _locked(store, pk) as run:
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
    with _locked(store, step.run_id) as run:
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
    with _locked(store, pk) as run:
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
    texts = [step.params_text for step in ended if step.params_text]
    if not texts:
        return run.params_text
    params: dict[str, Any] = decode(run.params_text)
    for text in texts:
        params |= decode(text)
    return encode(params, LONGEST_PARAMS)


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
    with _locked(store, run.pk) as now:
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


class StepFollower:
    """
    The step of one message, or of one eager call.

    Args:
        pk: The step.
        alias: The database with its row and that of its message.
    """

    def __init__(self, pk: int, alias: str) -> None:
        self.pk, self.table = pk, table_in(alias)
        #: The step as it was begun; None: it was not, or there is none.
        self.found: Found | None = None
        #: The run's params, for the step's function.
        self.params: dict[str, Any] = {}
        #: Whether the success is recorded, so that nothing later changes it.
        self.is_recorded = False
        #: Why a run that has returned is no success; None: it is one.
        self.fault: Fault | None = NOT_CALLED
        #: Where the step's function was called: the messages of the next stage bring along what
        #: was set there, such as the acting user of a project's task class.
        self.context = copy_context()
        #: What it returned for the next stages, as JSON; "": nothing.
        self._params = self._task_id = ""

    def begin(self, task_id: str) -> str:
        """Set the step to running; return why its function must not be called, or ""."""
        self._task_id = task_id
        rows: Any = queries.fetch(self.table.alias, "begin_step", pk=self.pk, task_id=task_id)
        rows = rows or self._row().values_list(*FOUND)
        if not rows:
            return self._go_without("its step is gone, or has another message")
        self.found = found = Found(*rows[0])
        if found.status != Status.RUNNING:
            return self._go_without(f"its step is {found.status}")
        if found.run_status in Status.STOPPED:
            put_back(self.table, self._row(), found.run, DIED)
            return self._go_without(f"its run is {found.run_status}")
        self.params = decode(found.params)
        if found.run_status == Status.WAITING:
            queries.execute(self.table.alias, "begin_run", pk=found.run)
        return ""

    def _go_without(self, why: str) -> str:
        self.is_recorded, self.fault = True, None
        return why

    @property
    def options(self) -> dict[str, Any]:
        """The options of the plan's entry."""
        return read_entry("" if self.found is None else self.found.arguments).options

    def read(self) -> StageStep:
        """Return the row of the step, with its run; one query."""
        return self._row().select_related("run").get()

    def take(self, outcome: Outcome, task: str) -> None:
        """
        Take what the step's function returned.

        Raises:
            InvalidResult: It can't be kept for the next stages.
        """
        self._params = self.encode(outcome.params, task)
        self.fault = None if outcome.success else Fault(RETURNED_FALSE, outcome.error)

    def encode(self, result: Any, work: str) -> str:
        """
        Return the text that is stored for a step's params.

        Raises:
            InvalidResult: They are no dict of plain data, or too long.
        """
        try:
            return "" if result is None else encode_named(result)
        except NotPlain as error:
            raise InvalidResult(work, str(error), STEP_RESULT) from error

    def finish(self, text: str) -> None:
        """Take the argument of ``finish()``, as the message has it."""
        self._params, self.fault = "" if text == NOTHING else text, None

    def end(self, held: Held | None, write: Callable[[], bool]) -> bool:
        """Record the success, and end the message together with what follows in the run."""
        if not self.is_recorded:
            # If the claim was lost, this changes nothing, and write() says so.
            succeed(self.table, self.pk, self._task_id, self._params, held)
            self.is_recorded = True
        if self.found is None or self._is_stage_open(self.found):
            return write()
        return self.context.run(leave, self.table, self.found.run, write)

    def end_eagerly(self) -> None:
        """Record the outcome of an eager run, which has no message."""
        if self.fault is None:
            self.end(None, lambda: True)
        else:
            self.fail(self._task_id, lambda: True, self.fault)

    def _is_stage_open(self, found: Found) -> bool:
        place = {"run": found.run, "stage": found.stage}
        return bool(queries.fetch(self.table.alias, "find_unfinished_step", **place))

    def wait(self, held: Held, fault: Fault) -> None:
        """Let the step wait for the message that is sent again, unless its run has stopped."""
        if self.found is not None:
            put_back(self.table, self._row().held(*held), self.found.run, fault)

    def fail(self, task_id: str, write: Callable[[], bool], fault: Fault) -> bool:
        """Fail the step together with its message, and stop its run; see :func:`fail`."""
        return fail(self.table, self.table.at(self.pk, task_id), write, fault)

    def note(self, task_id: str, fault: Fault) -> None:
        """Show why a worker did not take the message of a step that waits."""
        self.table.at(self.pk, task_id).waiting().record(Status.WAITING, fault)

    def _row(self) -> StageSteps:
        return self.table.at(self.pk, self._task_id)
