"""An operator's decisions about a run: resume it or abort it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from django.db import IntegrityError

from ..events import RUN_RESUMED
from ..exceptions import IllegalTransition
from ..values import NotPlain
from .engine import drop_messages, emit_of_run, encode_params, go_on, settle, stop
from .status import Status
from .step_messages import send
from .step_table import StepTable, table_in

if TYPE_CHECKING:
    from ..models.stages import StageRun, StageStep
    from ..models.step_states import StageSteps


def resume(run: StageRun) -> None:
    """Run the failed steps and all later ones again; see :meth:`StageRun.resume`."""
    store = table_in(run.find_database())
    try:
        _resume(store, run)
    except IntegrityError as error:
        if not run.key:
            raise
        reason = f"another run has its key {run.key!r} and has not ended"
        raise IllegalTransition(str(run), "resume", reason) from error
    run.refresh_from_db(using=store.alias)


def _resume(store: StepTable, run: StageRun) -> None:
    with store.runs().locked(run.pk) as now:
        if now is None:
            raise IllegalTransition(str(run), "resume", "it was deleted")
        if now.status not in (Status.FAILED, Status.ABORTED):
            raise IllegalTransition(str(run), "resume", f"it is {now.status}")
        if (busy := now.steps.alive().first()) is not None:
            raise IllegalTransition(str(run), "resume", f"its step {busy} still runs")
        # This update comes first because it fails if another run holds the key.
        store.runs().filter(pk=run.pk).update(
            status=Status.RUNNING, ended_at=None, error="", active_key=now.key or None
        )
        settle(store, now.steps.filter(stage=now.stage))
        left = [each for rows in _find_unsettled(now) for each in _restart(store, rows)]
        emit_of_run(store, RUN_RESUMED, now, steps=len(left))
        again = [step for step in left if step.stage == now.stage]
        if again:
            send(store, again)
        else:
            go_on(store, now)  # the run was stopped while the stage's last step ran


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
    if store.messages().carried(*[step.task_id for step in steps]).exists():
        run = steps[0].run
        raise IllegalTransition(str(run), "resume", "a step of it is about to commit its work")
    for step in steps:
        step.task_id = str(uuid.uuid4())
    rows.restart(steps)
    return steps


def abort(run: StageRun) -> None:
    """Abort the steps that have not started; see :meth:`StageRun.abort`."""
    store = table_in(run.find_database())
    with store.runs().locked(run.pk) as now:
        if now is None:
            raise IllegalTransition(str(run), "abort", "it was deleted")
        if now.status in Status.STOPPED:
            ended = "been aborted" if now.status == Status.ABORTED else now.status
            raise IllegalTransition(str(run), "abort", f"it has {ended}")
        stop(store, now, Status.ABORTED)
    run.refresh_from_db(using=store.alias)
