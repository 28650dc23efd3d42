"""
The states of runs of stages, as querysets, and what locks and deletes them.

Code that changes a run locks the run's row first and its steps after that, so that changes
can't deadlock. :mod:`django_celery_safe.stages.engine` combines the transitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.db import IntegrityError, connections, models, transaction
from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from .. import queries
from ..databases import Now
from ..stages.status import NOT_REGISTERED, Status
from ..texts import get_logger
from ..transactions import Attempts

if TYPE_CHECKING:
    from .stages import StageRun

logger = get_logger(__name__)

#: How long relays do not try again to delete a run that a row of the project protects.
PROTECTED_FOR: Final = timedelta(days=1)


class StageRuns(models.QuerySet["StageRun"]):
    """The states of runs."""

    def listed(self) -> StageRuns:
        """Runs as lists show them: see :class:`ListedRow`, with counts and a step to look at."""
        dropped = Q(status=Status.WAITING, error_type=NOT_REGISTERED)
        steps = _steps().filter(Q(status=Status.FAILED) | dropped, run=OuterRef("pk"))
        first = steps.order_by("ended_at", "position")
        names = ("task", "task_id", "error_type", "error")
        of_first = {f"step_{name}": Subquery(first.values(name)[:1]) for name in names}
        all_steps = _steps().filter(run=OuterRef("pk")).order_by().values("run")
        total = all_steps.annotate(total=Count("pk")).values("total")
        succeeded = all_steps.filter(status=Status.SUCCEEDED)
        done = succeeded.annotate(done=Count("pk")).values("done")
        counts = {"total": Coalesce(Subquery(total), 0), "done": Coalesce(Subquery(done), 0)}
        return self.annotate(asked_at=Now(), **of_first, **counts).defer("params_text")

    def active(self) -> StageRuns:
        """Runs that have not ended and continue without an operator."""
        return self.filter(status__in=[Status.WAITING, Status.RUNNING])

    def stopped(self) -> StageRuns:
        """Runs that ended, successfully or not."""
        return self.exclude(status__in=[Status.WAITING, Status.RUNNING])

    def older(self, age: timedelta) -> StageRuns:
        """Runs that ended more than ``age`` ago and have no running step."""
        alive = _steps().filter(run=OuterRef("pk")).alive()
        return self.stopped().filter(~Exists(alive), ended_at__lt=Now() - age)

    def unprotected(self) -> StageRuns:
        """Runs that no row of the project has protected from deletion in the last day."""
        long_ago = Q(protected_at__lt=Now() - PROTECTED_FOR)
        return self.filter(Q(protected_at__isnull=True) | long_ago)

    def lock(self, pk: int) -> StageRun | None:
        """
        Lock a run until the open transaction ends, and return it; None: it was deleted.

        The lock is an UPDATE, which works on every database. Under a stricter isolation an
        UPDATE fails, where a SELECT would get the lock and continue with outdated values.
        """
        rows = queries.fetch(self.db, "lock_run", pk=pk)
        return self.model.from_db(self.db, _LOCKED, rows[0]) if rows else None

    @contextmanager
    def locked(self, pk: int) -> Iterator[StageRun | None]:
        """Lock a run for the block, in a transaction."""
        for attempt in Attempts(self.db, f"A change of run {pk}"):
            with attempt, transaction.atomic(using=self.db):
                run = self.lock(pk)
                attempt.is_won = True
                yield run

    def delete(self) -> tuple[int, dict[str, int]]:
        """
        Delete the runs and their steps, like Django's; each run is locked before its steps.

        Their state is read again under the locks, because a run may have been resumed.
        """
        self._for_write = True  # the rows may have been read from a replica
        found = list(self.order_by("pk").values_list("pk", flat=True))
        with transaction.atomic(using=self.db):
            for pk in found:
                self.lock(pk)
            return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]

    def erase(self) -> int:
        """Delete the runs and their steps; return how many: 0 if the project protects one."""
        connection = connections[self.db]
        try:
            with transaction.atomic(using=self.db):
                erased = self.delete()[1].get(self.model._meta.label, 0)
                if connection.vendor == "postgresql":
                    # A DO_NOTHING reference would fail only at the outer commit, for all runs.
                    connection.check_constraints()
            return erased
        except (models.ProtectedError, models.RestrictedError, IntegrityError) as error:
            pks = list(self.values_list("pk", flat=True))
            self.update(protected_at=Now())
            logger.warning("Run %s is not pruned: %s", ", ".join(map(str, pks)), error.args[0])
            return 0


#: Fields that are read when a run is locked; the others are read when they are used.
_LOCKED: Final = ("id", "key", "name", "status", "stage", "stages", "params_text")


def _steps() -> Any:
    """Return all steps."""
    return apps.get_model("django_celery_safe", "StageStep").objects
