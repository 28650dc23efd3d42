"""
The states of runs of stages and of their steps, as querysets, and the transitions between them.

Code that changes a run locks the run's row first and its steps after that, so that changes
can't deadlock. :mod:`django_celery_safe.stages.engine` combines the transitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.db import IntegrityError, connections, models, transaction
from django.db.models import Case, Count, Exists, F, OuterRef, Q, Subquery, When
from django.db.models.functions import Coalesce

from .. import conf, queries
from ..databases import Now
from ..sending.followed import Fault
from ..stages.status import NOT_REGISTERED, Status
from ..texts import error_columns, get_logger
from ..transactions import MOST_KEYS
from .outbox import CARRIED, OutboxMessage

if TYPE_CHECKING:
    from .stages import StageRun, StageStep  # noqa: F401 - the rows of a queryset

logger = get_logger(__name__)

#: How long relays do not try again to delete a run that a row of the project protects.
PROTECTED_FOR: Final = timedelta(days=1)
#: The order of a run's steps.
IN_ORDER: Final = ("stage", "position")
#: What a list shows of the message of a step. The counts are 0 when the message is gone.
OF_MESSAGE: Final = ("state", "holder", "due_at")
COUNTS: Final = ("starts", "deaths", "resent")
#: Places of steps in the order in which an operator looks at them.
URGENCY: Final = Case(
    When(status=Status.FAILED, then=0),
    When(status=Status.WAITING, error_type=NOT_REGISTERED, then=1),
    When(status=Status.RUNNING, then=2),
    When(status=Status.WAITING, stage=F("run__stage"), then=3),
    default=4,
)


class StageRuns(models.QuerySet["StageRun"]):
    """The states of runs."""

    def listed(self) -> StageRuns:
        """Runs as lists show them: see :class:`ListedRow`, with counts and a step to look at."""
        dropped = Q(status=Status.WAITING, error_type=NOT_REGISTERED)
        steps = _steps().filter(run=OuterRef("pk"))
        to_see = steps.filter(Q(status=Status.FAILED) | dropped).order_by("ended_at", "position")
        names = ("task", "task_id", "error_type", "error")
        of_first = {f"step_{name}": Subquery(to_see.values(name)[:1]) for name in names}
        total, done = _count(steps), _count(steps.filter(status=Status.SUCCEEDED))
        shown = self.annotate(asked_at=Now(), total=total, done=done, **of_first)
        return shown.defer("params_text")

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

    def prunable(self) -> list[StageRuns]:
        """Return the runs whose retention has expired, unless a row protects them from that."""
        age = conf.retention("runs")
        unprotected = self.exclude(protected_at__gte=Now() - PROTECTED_FOR)
        return [] if age is None else [unprotected.older(age).order_by("ended_at")]

    def delete(self) -> tuple[int, dict[str, int]]:
        """
        Delete the runs and their steps, like Django's; each run is locked before its steps.

        Their state is read again under the locks, because a run may have been resumed.
        """
        self._for_write = True  # the rows may have been read from a replica
        found = list(self.order_by("pk").values_list("pk", flat=True))
        with transaction.atomic(using=self.db):
            for pk in found:
                queries.execute(self.db, "lock_run", pk=pk)
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


class StageSteps(models.QuerySet["StageStep"]):
    """The states of steps, and the transitions between them."""

    def listed(self) -> StageSteps:
        """Steps as lists show them: see :class:`ListedRow`, with columns of their messages."""
        message = _messages()
        shown: dict[str, Any] = {
            f"message_{name}": Subquery(message.values(name)[:1]) for name in OF_MESSAGE
        }
        shown |= {name: Coalesce(Subquery(message.values(name)[:1]), 0) for name in COUNTS}
        since = Subquery(message.values(at=Coalesce("sent_at", "created_at"))[:1])
        waits = Case(When(status=Status.WAITING, then=since))
        return self.annotate(asked_at=Now(), since=waits, **shown).defer("params_text", "traceback")

    def by_urgency(self) -> StageSteps:
        """Steps in the order in which an operator looks at those of a run: failed ones first."""
        return self.order_by(URGENCY, *IN_ORDER)

    def waiting(self) -> StageSteps:
        """Steps that wait for their stage, for a worker or for a retry."""
        return self.filter(status=Status.WAITING)

    def running(self) -> StageSteps:
        """Steps that a worker runs now, or ran when its process died."""
        return self.filter(status=Status.RUNNING)

    def alive(self) -> StageSteps:
        """Steps that a worker runs now: the lease of their message has not expired."""
        running = OutboxMessage.State.RUNNING
        return self.running().filter(Exists(_messages().filter(state=running, due_at__gte=Now())))

    def held(self, attempt: str, token: str) -> StageSteps:
        """Steps whose message this claim still holds."""
        messages = OutboxMessage.objects.filter(attempt=attempt, token=token)
        return self.filter(Exists(messages))

    def open(self) -> StageSteps:
        """Steps that wait or run."""
        return self.filter(status__in=[Status.WAITING, Status.RUNNING])

    def failed(self) -> StageSteps:
        """Steps that failed, after their retries."""
        return self.filter(status=Status.FAILED)

    def unfinished(self) -> StageSteps:
        """Steps that have not succeeded, and so keep their stage open."""
        return self.exclude(status=Status.SUCCEEDED)

    def overdue(self) -> StageSteps:
        """Steps whose message was sent again because no worker began it in time."""
        sent = self.waiting().filter(
            run__status__in=[Status.WAITING, Status.RUNNING], stage=F("run__stage")
        )
        return sent.filter(Exists(_messages().filter(resent__gt=0)))

    def record(self, status: Status, fault: Fault) -> int:
        """Set the steps to a status after an error, or while it keeps them waiting; count them."""
        ended = Now() if status in Status.STOPPED else None
        return self.update(status=status, ended_at=ended, **error_columns(*fault))

    def restart(self, steps: Iterable[StageStep]) -> None:
        """Set steps to waiting for a new attempt, each with the task id that was set on it."""
        self.update(
            status=Status.WAITING, started_at=None, ended_at=None, params_text="",
            error_type="", error="", traceback="",
        )  # fmt: skip
        # Not self: its filter may no longer match the rows that were just changed.
        self.model.objects.using(self.db).bulk_update(steps, ["task_id"], batch_size=MOST_KEYS)


def _messages() -> Any:
    """Return the message of each step of the outer query."""
    return OutboxMessage.objects.filter(CARRIED, task_id=OuterRef("task_id"))


def _count(steps: Any) -> Coalesce:
    """Return how many steps of the run of the outer query there are, as an expression."""
    return Coalesce(Subquery(steps.values("run").annotate(n=Count("pk")).values("n")), 0)


def _steps() -> Any:
    """Return all steps."""
    return apps.get_model("django_celery_safe", "StageStep").objects
