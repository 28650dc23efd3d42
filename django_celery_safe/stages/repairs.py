"""
Repair of runs that are stuck, and pruning of runs that have ended.

Normal progress never depends on a sweep: sweeps repair runs after a crash. Any number of
sweeps may run at the same time, because each one locks a run's row and reads its state again
before it repairs the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.db import InterfaceError, InternalError, OperationalError, transaction

from .. import conf
from ..databases import Now
from ..events import RUN_REPAIRED, STEP_REPAIRED
from ..foreign_errors import describe_error
from ..leases.lease_table import read_holder
from ..sending.housekeeping import Chore, add_chore, add_pruning
from ..texts import get_logger
from . import engine, step_messages
from .status import Status
from .step_table import StepTable

if TYPE_CHECKING:
    from ..models.stages import StageRuns, StageStep
    from ..models.step_states import StageSteps

logger = get_logger(__name__)

#: How long a step that was sent may wait for a worker before it is re-sent. The time doubles
#: with each re-send: a long queue loses nothing, and a duplicate message does no harm.
UNSTARTED_AFTER: Final = timedelta(minutes=5)
#: How long sweeps leave a complete stage to the process of its last step, which starts the
#: next stage right after it has recorded that step.
SETTLING: Final = timedelta(seconds=5)
#: Steps that one transaction repairs at most.
BATCH: Final = 500
#: How long a relay repairs runs in one turn, s, apart from the transaction that has begun.
LONGEST_TURN: Final = 1.0
#: Errors by which the database itself is unavailable, so that no other run could be repaired.
UNAVAILABLE: Final = (OperationalError, InterfaceError, InternalError)
#: Runs that a relay deletes in one turn at most, each with its steps in a transaction.
MOST_RUNS: Final = 100


class Repair(NamedTuple):
    """
    One repair by a sweep.

    Attributes:
        run: The run's id.
        step: The step, as ``<task>[<task id>]``; "": the repair concerns the whole stage.
        reason: The fault and the repair, as a sentence.
    """

    run: int
    step: str
    reason: str


def connect() -> None:
    """Register the relays' chores: repair runs, and delete runs that ended long ago."""
    failure = "The runs of stages in %r could not be swept: %s"
    add_chore("sweep runs", Chore(failure, StepTable.models, _sweep_database))
    add_pruning("runs of stages", StepTable.models, get_prunable, most=MOST_RUNS, batch=1)


def _sweep_database(alias: str) -> bool:
    until = time.monotonic() + LONGEST_TURN
    return any(time.monotonic() > until for _ in iter_repairs(StepTable(alias)))


def get_prunable(alias: str) -> list[StageRuns]:
    """Return a queryset of the runs whose retention has expired."""
    age, runs = conf.retention("runs"), StepTable(alias).runs()
    return [] if age is None else [runs.older(age).unprotected().order_by("ended_at")]


def iter_repairs(store: StepTable, patience: timedelta = UNSTARTED_AFTER) -> Iterator[list[Repair]]:
    """
    Repair the runs that are stuck; yield the repairs of each transaction.

    A step whose process died is re-sent; if as many processes have died in it as
    ``max_deaths`` allows, the worker that receives it fails it. A step that was sent but not
    started is re-sent. A run whose stage is complete is continued. After an error, for example
    of a changed task, the rest of that run is left to the next sweep.

    Args:
        patience: How long a step that was sent may wait for a worker.
    """
    failed: set[int] = set()
    for pk, repair in _find_repairs(store, patience):
        if pk in failed:
            continue
        repairs: list[Repair] = []
        try:
            repairs = repair()
        except (*UNAVAILABLE, SoftTimeLimitExceeded):
            raise
        except Exception as error:  # noqa: BLE001 - sending a task may raise anything
            failed.add(pk)
            logger.error("Run %s can't be repaired: %s", pk, describe_error(error))
        yield repairs


def _find_repairs(
    store: StepTable, patience: timedelta
) -> Iterator[tuple[int, Callable[[], list[Repair]]]]:
    """Yield the id of each run that seems to be stuck, and a function that repairs it."""
    for pk, ids in _by_run(store.steps().orphaned().values_list("run_id", "pk")):
        yield pk, partial(_requeue_orphaned, store, pk, ids)
    for pk, ids in _by_run(_not_in_outbox(store, store.steps().overdue(patience))):
        yield pk, partial(_send_again, store, pk, ids, patience)
    for pk in store.runs().complete().values_list("pk", flat=True):
        yield pk, partial(_let_go_on, store, pk)


def _by_run(steps: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield the batches that one transaction repairs: a run's id, and ids of its steps."""
    by_run: dict[int, list[int]] = {}
    for run, step in steps:
        by_run.setdefault(run, []).append(step)
    for run, ids in by_run.items():
        for start in range(0, len(ids), BATCH):
            yield run, ids[start : start + BATCH]


def _not_in_outbox(store: StepTable, steps: StageSteps) -> Iterator[tuple[int, int]]:
    """Yield run and id of the steps, without those whose message a relay will still send."""
    from ..models.outbox import OutboxMessage  # needs the app registry

    found = list(steps.values_list("run_id", "pk", "task_id"))
    for start in range(0, len(found), BATCH):
        some = found[start : start + BATCH]
        ids = [task_id for *_, task_id in some]
        rows = OutboxMessage.objects.using(store.alias).pending().filter(task_id__in=ids)
        pending = set(rows.values_list("task_id", flat=True))
        yield from ((run, pk) for run, pk, task_id in some if task_id not in pending)


def _requeue_orphaned(store: StepTable, pk: int, ids: list[int]) -> list[Repair]:
    repairs, again = [], []
    with store.runs().locked(pk) as run:
        if run is None:
            return []
        steps = store.steps().filter(pk__in=ids)
        # A worker between finish() and its commit holds the lock of its step's row.
        orphaned = steps.orphaned().select_for_update(skip_locked=True).annotate(asked_at=Now())
        stopped = run.status in Status.STOPPED
        for step in orphaned:
            if store.at(str(step.pk)).requeue_orphan(step.token, stopped=stopped):
                done = "aborted" if stopped else "sent again"
                reason = f"{_describe_death(step)}, and it was {done}"
                repairs.append(_record_repair(store, step, reason))
                again += [] if stopped else [step]
        step_messages.send(store, again)
    return repairs


def _describe_death(step: StageStep) -> str:
    # The repair already names the step.
    process = str(read_holder("", step).holder._replace(task_id=None))
    return f"its process died ({process})" if process else "its process died"


def _send_again(store: StepTable, pk: int, ids: list[int], patience: timedelta) -> list[Repair]:
    reason = "no worker began it for long, so it was sent again"
    with store.runs().locked(pk):
        # Query again under the lock, because another sweep may have been faster.
        overdue = store.steps().filter(pk__in=ids).overdue(patience)
        steps = list(overdue.select_for_update(skip_locked=True))  # none begins meanwhile
        rows = store.steps().filter(pk__in=[step.pk for step in steps])
        rows.update(note=reason)
        rows.record_resent()
        step_messages.send(store, steps)
        return [_emit_repair(store, step, reason) for step in steps]


def _record_repair(store: StepTable, step: StageStep, reason: str) -> Repair:
    """Record why a step was repaired, and emit the event."""
    store.at(str(step.pk)).update(note=reason)
    return _emit_repair(store, step, reason)


def _emit_repair(store: StepTable, step: StageStep, reason: str) -> Repair:
    repair = Repair(step.run_id, str(step), reason)
    _emit_on_commit(store, repair, step.task, step.task_id)
    return repair


def _let_go_on(store: StepTable, pk: int) -> list[Repair]:
    if store.steps().filter(run=pk, ended_at__gt=Now() - SETTLING).exists():
        return []
    with transaction.atomic(using=store.alias):
        if not engine.go_on(store, pk):
            return []
        reason = "its stage was complete, and it did not go on; now it did"
        store.runs().filter(pk=pk).update(note=reason)
        repair = Repair(pk, "", reason)
        _emit_on_commit(store, repair, "", "")
        return [repair]


def _emit_on_commit(store: StepTable, repair: Repair, task: str, task_id: str) -> None:
    event = STEP_REPAIRED if repair.step else RUN_REPAIRED
    event.emit_on_commit(
        Repair, using=store.alias, run=repair.run, task=task, task_id=task_id, reason=repair.reason
    )
