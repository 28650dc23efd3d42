"""The table of steps, as used by workers and by the thread that renews their leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from celery.utils.time import maybe_make_aware
from django.db import router
from django.db.models import DurationField, F, Q

from ..databases import Now, refuse_untested
from ..leases.lease_table import LeaseTable, count_death
from ..statements import Param, Statement
from .entry_options import MARK
from .status import Status

if TYPE_CHECKING:
    from ..models.stages import StageRuns, StageStep
    from ..models.step_states import StageSteps


#: Steps that one statement adds or changes; every database accepts that many parameters.
BATCH: Final = 500
#: The option's name as it is written in JSON.
COUNTDOWN: Final = f'"{MARK}countdown"'


class StepTable(LeaseTable):
    """The runs and steps in one database; a step's lease is named by the step's id."""

    purpose = "hold runs of stages and their outbox"
    models = ("StageRun", "StageStep", "OutboxMessage")
    named, ends = "id", "ends_at"

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

    def all(self) -> StageSteps:
        """Return the steps."""
        return self.steps()

    def at(self, name: str) -> StageSteps:
        """Return a queryset with the step of this id: one row or none."""
        return self.steps().filter(pk=int(name))

    def find(self, name: str) -> StageStep | None:
        """Return a step, its run and the server's time as ``asked_at``; None: no such step."""
        found: StageStep | None = _FIND.find(self.alias, pk=int(name))
        return found

    def claim_step(
        self, pk: int, task_id: str, token: str, seconds: float, holder: str
    ) -> StageStep | None:
        """
        Claim a message's step, unless a process runs it.

        Returns:
            The step, with its run's fields that a worker needs; None: the claim failed.
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

    def delay(self, steps: Iterable[StageStep]) -> None:
        """Record when the messages of steps with a countdown should arrive."""
        delayed: dict[float, list[int]] = {}
        for step in steps:
            seconds = step.options.get("countdown")
            if seconds is not None:
                delayed.setdefault(seconds, []).append(step.pk)
        for seconds, pks in delayed.items():
            due_at = Now() + timedelta(seconds=seconds)
            for first in range(0, len(pks), BATCH):
                self.steps().filter(pk__in=pks[first : first + BATCH]).update(due_at=due_at)

    def await_retry(self, pk: int, task_id: str, retry: Any) -> None:
        """Record when the retried message of a waiting step should arrive."""
        when = getattr(retry, "when", None)
        if when is None:
            return
        if isinstance(when, datetime):
            when = (maybe_make_aware(when) - datetime.now(UTC)).total_seconds()
        step = self.steps().filter(pk=pk).attempt(task_id).waiting()
        step.update(due_at=Now() + timedelta(seconds=float(when)))

    def finish(self, pk: int, token: str, params: str) -> bool:
        """Record that a step succeeded; return whether the claim still held it."""
        return _FINISH.execute(self.alias, pk=pk, token=token, params=params)

    def is_complete(self, run: int, stage: int) -> bool:
        """Return whether all steps of a stage have succeeded."""
        return _FIND_UNFINISHED.find(self.alias, run=run, stage=stage) is None


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
            # The previous holder died: its lease has expired.
            **count_death(Q(status=Status.RUNNING)),
        },
    ),
    lambda quote: _of_run(quote, "status", "params"),
    changed=lambda alias: _step(alias).filter(token=Param("token")),
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
            "traceback": "",
        },
    )
)

_FIND_UNFINISHED: Final = Statement(
    lambda alias: (
        _steps(alias).filter(run=Param("run"), stage=Param("stage")).unfinished().only("pk")[:1],
        None,
    )
)


def _of_run(quote: Callable[[str], str], *columns: str) -> str:
    """Return subqueries for columns of a step's run: SQLite's RETURNING knows only one table."""
    from ..models.stages import StageRun, StageStep  # needs the app registry

    run, step = quote(StageRun._meta.db_table), quote(StageStep._meta.db_table)
    found = [f"(SELECT {name} FROM {run} r WHERE r.id = {step}.run_id)" for name in columns]  # noqa: S608
    return ", ".join(found)


def step_table() -> StepTable:
    """Return the runs and steps in the database to which the router writes them."""
    from ..models.stages import StageRun  # needs the app registry

    return _cached_table(router.db_for_write(StageRun))


@lru_cache
def _cached_table(alias: str) -> StepTable:
    refuse_untested(alias, "hold runs of stages")
    # The renewing thread identifies stores by their object identity.
    return StepTable(alias)
