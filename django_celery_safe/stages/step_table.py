"""The table of steps, as those who run them and the thread that renews their leases see it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import router
from django.db.models import Case, DurationField, F, IntegerField, Q, When
from django.db.models.functions import Now

from ..databases import refuse_untested
from ..leases.lease_table import LeaseTable
from ..leases.row_claim import RowClaim
from ..statements import Param, Statement
from .status import Status

if TYPE_CHECKING:
    from ..models.stages import StageRuns, StageStep
    from ..models.step_states import StageSteps


class StepTable(LeaseTable):
    """The runs and steps in one database; a step's lease has its id for a name."""

    purpose = "hold runs of stages and their outbox"
    models = ("StageRun", "StageStep", "OutboxMessage")

    def __init__(self, alias: str) -> None:
        super().__init__("steps", alias)

    def runs(self) -> StageRuns:
        """Return the runs."""
        from ..models.stages import StageRun  # needs the app registry

        return StageRun.objects.using(self.alias)

    def steps(self) -> StageSteps:
        """Return the steps."""
        from ..models.stages import StageStep  # needs the app registry

        return StageStep.objects.using(self.alias)

    def at(self, name: str) -> StageSteps:
        """Return the step with this id, one or none."""
        return self.steps().filter(pk=int(name))

    def find(self, name: str) -> StageStep | None:
        """Return a step and its run, with the server's time as ``asked_at``; None: it is gone."""
        found: StageStep | None = _FIND.find(self.alias, pk=int(name))
        return found

    def claim_step(
        self, pk: int, task_id: str, token: str, seconds: float, holder: str
    ) -> StageStep | None:
        """
        Let a message run its step, if nobody does.

        Returns:
            The step, and its run with what a worker needs of it; None: it may not.
        """
        from ..models.stages import StageRun  # needs the app registry

        values = {"pk": pk, "task_id": task_id, "token": token, "holder": holder}
        row = _CLAIM.update_returning(self.alias, lease=timedelta(seconds=seconds), **values)
        if row is None:
            return None
        step: StageStep = row[0]
        step.run = StageRun.from_db(
            self.alias, ("id", "status", "params_text"), (step.run_id, *row[1:])
        )
        return step

    def finish(self, pk: int, token: str, params: str) -> bool:
        """Record that a step succeeded; return whether the claim still held it."""
        return _FINISH.execute(self.alias, pk=pk, token=token, params=params)

    def is_complete(self, run: int, stage: int) -> bool:
        """Return whether all steps of a stage have succeeded."""
        return _FIND_UNFINISHED.find(self.alias, run=run, stage=stage) is None


class ClaimedStep(NamedTuple):
    """A step that this process runs now."""

    claim: RowClaim[StepTable]
    step: StageStep


def _steps(alias: str) -> StageSteps:
    return _cached_table(alias).steps()


def _step(alias: str) -> StageSteps:
    return _steps(alias).filter(pk=Param("pk"))


_FIND: Final = Statement(
    lambda alias: (_step(alias).select_related("run").annotate(asked_at=Now()), None)
)

_CLAIM: Final = Statement(
    lambda alias: (
        _step(alias)
        .filter(task_id=Param("task_id"))
        .filter(Q(status=Status.WAITING) | Q(status=Status.RUNNING, ends_at__lt=Now())),
        {
            "status": Status.RUNNING,
            "token": Param("token"),
            "ends_at": Now() + Param("lease", DurationField()),
            "holder": Param("holder"),
            "started_at": Now(),
            "starts": F("starts") + 1,
            # The process that had it before died, and let the lease end.
            "deaths": Case(
                When(status=Status.RUNNING, then=F("deaths") + 1),
                default=F("deaths"),
                output_field=IntegerField(),
            ),
        },
    ),
    lambda quote: _of_run(quote, "status", "params"),
    whole=True,
)

_FINISH: Final = Statement(
    lambda alias: (
        _step(alias).filter(status=Status.RUNNING, token=Param("token")),
        {
            "status": Status.SUCCEEDED,
            "params_text": Param("params"),
            "ended_at": Now(),
            "error_type": "",
            "error": "",
        },
    ),
)

_FIND_UNFINISHED: Final = Statement(
    lambda alias: (
        _steps(alias).filter(run=Param("run"), stage=Param("stage")).unfinished().only("pk")[:1],
        None,
    )
)


def _of_run(quote: Callable[[str], str], *columns: str) -> tuple[str, list[Param]]:
    """Return columns of a step's run; SQLite's RETURNING knows no table but the changed one."""
    from ..models.stages import StageRun, StageStep  # needs the app registry

    run, step = quote(StageRun._meta.db_table), quote(StageStep._meta.db_table)
    found = [f"(SELECT {name} FROM {run} r WHERE r.id = {step}.run_id)" for name in columns]  # noqa: S608
    return ", ".join(found), []


def step_table() -> StepTable:
    """Return the runs and steps in the database that the router has them written to."""
    from ..models.stages import StageRun  # needs the app registry

    return _cached_table(router.db_for_write(StageRun))


@lru_cache
def _cached_table(alias: str) -> StepTable:
    refuse_untested(alias, "hold runs of stages")
    # The renewing thread knows stores by their identity.
    return StepTable(alias)
