"""The table of steps, as those who run them and the thread that renews their leases see it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from django.db import Error, router
from django.db.models.functions import Now

from ..exceptions import ConfigurationError
from ..locks.stores.rows import RowStore
from ..transactions import lacks_table

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
        return self.at(name).select_related("run").annotate(asked_at=Now()).first()

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


def step_store() -> StepStore:
    """Return the runs and steps in the database that the router has them written to."""
    from ..models import StageRun  # needs the app registry

    return _kept_store(router.db_for_write(StageRun))


@lru_cache
def _kept_store(alias: str) -> StepStore:
    # The renewing thread knows stores by their identity.
    return StepStore(alias)
