"""The table of steps, as those who run them and the thread that renews their leases see it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from django.db import Error, router
from django.db.models import Case, DurationField, F, IntegerField, Q, When
from django.db.models.functions import Now

from ..databases import refuse_untested
from ..exceptions import ConfigurationError
from ..locks.stores.rows import RowStore
from ..statements import Slot, Statement
from ..transactions import lacks_table
from .status import Status

if TYPE_CHECKING:
    from ..models import StageRuns, StageStep, StageSteps


class StepStore(RowStore):
    """The runs and steps in one database; a step's lease has its id for a name."""

    def __init__(self, alias: str) -> None:
        super().__init__("steps", alias)

    def runs(self) -> StageRuns:
        """Return the runs."""
        from ..models import StageRun  # needs the app registry

        return StageRun.objects.using(self.alias)

    def steps(self) -> StageSteps:
        """Return the steps."""
        from ..models import StageStep  # needs the app registry

        return StageStep.objects.using(self.alias)

    def at(self, name: str) -> StageSteps:
        """Return the step with this id, one or none."""
        return self.steps().filter(pk=int(name))

    def find(self, name: str) -> StageStep | None:
        """Return a step and its run, with the server's time as ``asked_at``; None: it is gone."""
        found: StageStep | None = _FIND.find(self.alias, pk=int(name))
        return found

    def try_claim(
        self, pk: int, task_id: str, token: str, seconds: float, holder: str
    ) -> StageStep | None:
        """
        Let a message run its step, if nobody does.

        Returns:
            The step, and its run with what a worker needs of it; None: it may not.
        """
        from ..models import StageRun  # needs the app registry

        values = {"pk": pk, "task_id": task_id, "token": token, "holder": holder}
        row = _CLAIM.update_returning(self.alias, lease=timedelta(seconds=seconds), **values)
        if row is None:
            return None
        step: StageStep = row[0]
        step.run = StageRun.from_db(
            self.alias, ("id", "status", "params_text"), (step.run_id, *row[1:])
        )
        return step

    def finish(self, pk: int, token: str, params: str) -> bool | None:
        """
        Note that a claimed step succeeded.

        Returns:
            Whether all of its stage have, if its run is locked; None: the claim had it no more.
        """
        row = _FINISH.update_returning(self.alias, pk=pk, token=token, params=params)
        return None if row is None else bool(row[0])

    def check_migrated(self, error: Error) -> None:
        """
        Say what an error of the database means, if it is that a table is missing.

        Raises:
            ConfigurationError: It is.
        """
        from ..models import OutboxMessage, StageRun, StageStep  # needs the app registry

        if lacks_table(self.alias, StageRun, StageStep, OutboxMessage):
            raise ConfigurationError(
                f'DATABASES["{self.alias}"] is to hold runs of stages and their outbox, and has no '
                f"tables for them. Run: manage.py migrate django_celery_safe "
                f"--database={self.alias}"
            ) from error


def _steps(alias: str) -> StageSteps:
    return _kept_store(alias).steps().filter(pk=Slot("pk"))


_FIND: Final = Statement(
    lambda alias: (_steps(alias).select_related("run").annotate(asked_at=Now()), None)
)

_CLAIM: Final = Statement(
    lambda alias: (
        _steps(alias)
        .filter(task_id=Slot("task_id"))
        .filter(Q(status=Status.WAITING) | Q(status=Status.RUNNING, ends_at__lt=Now())),
        {
            "status": Status.RUNNING,
            "token": Slot("token"),
            "ends_at": Now() + Slot("lease", DurationField()),
            "holder": Slot("holder"),
            "started_at": Now(),
            "starts": F("starts") + 1,
            # Of the process that had it before, and let the lease end.
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
        _steps(alias).filter(status=Status.RUNNING, token=Slot("token")),
        {
            "status": Status.SUCCEEDED,
            "params_text": Slot("params"),
            "ended_at": Now(),
            "error_type": "",
            "error": "",
        },
    ),
    lambda quote: _no_other_is_left(quote),
)


def _of_run(quote: Callable[[str], str], *columns: str) -> tuple[str, list[Slot]]:
    """Return columns of a step's run; SQLite's RETURNING knows no table but the changed one."""
    from ..models import StageRun, StageStep  # needs the app registry

    run, step = quote(StageRun._meta.db_table), quote(StageStep._meta.db_table)
    found = [f"(SELECT {name} FROM {run} r WHERE r.id = {step}.run_id)" for name in columns]  # noqa: S608
    return ", ".join(found), []


def _no_other_is_left(quote: Callable[[str], str]) -> tuple[str, list[Slot]]:
    """Return what tells that no other step of the stage is unfinished, in the same statement."""
    from ..models import StageStep  # needs the app registry

    table = quote(StageStep._meta.db_table)
    # Itself left out: what a RETURNING sees of its own row differs between databases.
    others = f"o.run_id = {table}.run_id AND o.stage = {table}.stage AND o.id <> %s"
    left = f"SELECT 1 FROM {table} o WHERE {others} AND o.status <> 'succeeded'"  # noqa: S608
    return f"NOT EXISTS ({left})", [Slot("pk")]


def step_store() -> StepStore:
    """Return the runs and steps in the database that the router has them written to."""
    from ..models import StageRun  # needs the app registry

    return _kept_store(router.db_for_write(StageRun))


@lru_cache
def _kept_store(alias: str) -> StepStore:
    refuse_untested(alias, "hold runs of stages")
    # The renewing thread knows stores by their identity.
    return StepStore(alias)
