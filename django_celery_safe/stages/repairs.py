"""
Finding runs that do not go on, and pruning those that have ended.

Normal progress never depends on this: it is for what a crash has left. Any number of
sweeps may look at the same time, since each repairs under the lock of the run's row what
it finds there then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models.functions import Now

from .. import conf
from ..events import RUN_REPAIRED, STEP_REPAIRED
from ..exceptions import describe_error
from ..leases.lease_table import read_holder
from ..texts import get_logger
from ..transactions import lacks_table
from . import engine, step_messages
from .engine import MOST_DEATHS
from .status import Status
from .step_table import StepTable

if TYPE_CHECKING:
    from ..models.stages import StageRuns, StageStep
    from ..models.step_states import StageSteps

logger = get_logger(__name__)

#: For how long a step that was sent may wait to be begun before it is sent again. It doubles
#: each time: a long queue is no loss, and the same message once more does no harm.
PATIENCE: Final = timedelta(minutes=5)
#: For how long a complete stage is left to the process of its last step, which begins the
#: next one right after it has recorded that step.
SETTLING: Final = timedelta(seconds=5)
#: Steps that are looked at in one go.
BATCH: Final = 500


class Repair(NamedTuple):
    """
    What a sweep did.

    Attributes:
        run: The run's id.
        step: The step, as ``<task>[<task id>]``; "": all of its stage.
        reason: What it found, and what it did about it, as a sentence.
    """

    run: int
    step: str
    reason: str


def sweep(store: StepTable, patience: timedelta = PATIENCE) -> list[Repair]:
    """
    Find what does not go on, and repair it; return what was done, in order.

    A step whose process died is sent again, and fails when that was so twenty times. A step
    that was sent and that nobody began is sent again. A run whose stage is complete goes on.

    Args:
        patience: How long a step that was sent may wait to be begun.
    """
    repairs: list[Repair] = []
    for pk, ids in _by_run(store.steps().silent()):
        repairs += _repaired(pk, partial(_mend_silent, store, pk, ids))
    for pk, ids in _by_run(_not_in_outbox(store, store.steps().overdue(patience))):
        repairs += _repaired(pk, partial(_send_again, store, pk, ids, patience))
    for pk in store.runs().complete().values_list("pk", flat=True):
        repairs += _repaired(pk, partial(_let_go_on, store, pk))
    return repairs


def sweep_housekeeping(alias: str) -> None:
    """
    Sweep the runs in a database, as a relay does beside its own work.

    A database without their tables is left alone; any other failure is logged.
    """
    from ..models.stages import StageRun, StageStep  # needs the app registry

    try:
        sweep(StepTable(alias))
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - what runs need must not stop the outbox
        if not lacks_table(alias, StageRun, StageStep):
            logger.error(
                "The runs of stages in %r could not be swept: %s", alias, describe_error(error)
            )


def get_prunable(store: StepTable, older_than: timedelta | None = None) -> StageRuns:
    """
    Return the runs that can be deleted.

    Args:
        older_than: Those that ended so long ago; None: ``STAGES_RETENTION`` ago.
    """
    age = conf.retention("STAGES_RETENTION") if older_than is None else older_than
    return store.runs().older(age)


def _repaired(pk: int, repair: Callable[[], list[Repair]]) -> list[Repair]:
    """Repair a run; one that can't be, such as for a task that changed, keeps no other from it."""
    try:
        return repair()
    except (DatabaseError, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - sending a task may raise anything
        logger.error("Run %s can't be repaired: %s", pk, describe_error(error))
        return []


def _by_run(steps: Iterable[StageStep]) -> Iterator[tuple[int, list[int]]]:
    """Yield what one transaction repairs: a run, and some of its steps."""
    by_run: dict[int, list[int]] = {}
    for step in steps:
        by_run.setdefault(step.run_id, []).append(step.pk)
    for run, ids in by_run.items():
        for start in range(0, len(ids), BATCH):
            yield run, ids[start : start + BATCH]


def _not_in_outbox(store: StepTable, steps: StageSteps) -> list[StageStep]:
    """Leave out those whose message a relay will send."""
    from ..models.outbox import OutboxMessage  # needs the app registry

    found = list(steps)
    pending: set[str] = set()
    for start in range(0, len(found), BATCH):
        ids = [step.task_id for step in found[start : start + BATCH]]
        rows = OutboxMessage.objects.using(store.alias).pending().filter(task_id__in=ids)
        pending.update(rows.values_list("task_id", flat=True))
    return [step for step in found if step.task_id not in pending]


def _mend_silent(store: StepTable, pk: int, ids: list[int]) -> list[Repair]:
    repairs, again = [], []
    with store.runs().locked(pk) as run:
        if run is None:
            return []
        steps = store.steps().filter(pk__in=ids)
        silent = list(steps.silent().annotate(asked_at=Now()))
        stopped = run.status in Status.STOPPED
        for step in silent:
            reason = _told_of_death(step)
            if not stopped and step.deaths + 1 >= MOST_DEATHS:
                reason = f"its process died {MOST_DEATHS} times, and it failed"
                ours = engine.fail_silent(store, run, step, reason)
                stopped = stopped or ours
            else:
                ours = store.at(str(step.pk)).requeue_orphan(step.token, stopped=stopped)
                reason += ", and it was aborted" if stopped else ", and it was sent again"
                again += [step] if ours and not stopped else []
            repairs += [_record_repair(store, step, reason)] if ours else []
        # One that failed has aborted those that were to be sent.
        step_messages.send(store, [] if stopped else again)
    return repairs


def _told_of_death(step: StageStep) -> str:
    # The step is named beside it.
    process = str(read_holder("", step).holder._replace(task_id=None))
    return f"its process died ({process})" if process else "its process died"


def _send_again(store: StepTable, pk: int, ids: list[int], patience: timedelta) -> list[Repair]:
    reason = "it was sent, nobody began it for long, and it was sent again"
    with store.runs().locked(pk):
        # Anew, since another sweep may have been first.
        steps = list(store.steps().filter(pk__in=ids).overdue(patience))
        rows = store.steps().filter(pk__in=[step.pk for step in steps])
        rows.update(note=reason)
        rows.record_resent()
        step_messages.send(store, steps)
        return [_emit_repair(store, step, reason) for step in steps]


def _record_repair(store: StepTable, step: StageStep, reason: str) -> Repair:
    """Keep why a step was repaired, and tell of it."""
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
        sweep,
        using=store.alias,
        run=repair.run,
        task=task,
        task_id=task_id,
        reason=repair.reason,
    )
