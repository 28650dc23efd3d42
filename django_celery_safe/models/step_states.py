"""The states of steps, as querysets, and the transitions between them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from django.db import models
from django.db.models import Case, F, Q, When
from django.db.models.functions import Coalesce

from ..databases import Now
from ..leases.lease_table import DIED
from ..sending.outbox import MOST_DOUBLINGS
from ..stages.status import NOT_REGISTERED, Status
from .text import LONGEST_TYPE, end_of_traceback, storable

if TYPE_CHECKING:
    from .stages import StageStep

#: Steps that one statement changes; every database accepts that many parameters.
BATCH: Final = 500
#: The order of a run's steps.
IN_ORDER: Final = ("stage", "position")


_URGENCY: Final = Case(
    When(status=Status.FAILED, then=0),
    When(status=Status.WAITING, error_type=NOT_REGISTERED, then=1),
    When(status=Status.RUNNING, then=2),
    When(status=Status.WAITING, stage=F("run__stage"), then=3),
    default=4,
)


class StageSteps(models.QuerySet["StageStep"]):
    """The states of steps, and the transitions between them."""

    def listed(self) -> StageSteps:
        """Steps as lists show them: see :class:`ListedRow`, and ``since`` when they wait."""
        sent = Q(run__status__in=[Status.WAITING, Status.RUNNING], stage=F("run__stage"))
        waits = When(sent, status=Status.WAITING, then=Coalesce("due_at", "run__stage_at"))
        return self.annotate(asked_at=Now(), since=Case(waits)).defer("params_text", "traceback")

    def by_urgency(self) -> StageSteps:
        """Steps in the order in which an operator looks at those of a run: failed ones first."""
        return self.order_by(_URGENCY, *IN_ORDER)

    def in_order(self) -> StageSteps:
        """Steps ordered by stage and by position in the plan."""
        return self.order_by(*IN_ORDER)

    def waiting(self) -> StageSteps:
        """Steps that wait for their stage, for a worker or for a retry."""
        return self.filter(status=Status.WAITING)

    def running(self) -> StageSteps:
        """Steps that a worker runs now, or ran when its process died."""
        return self.filter(status=Status.RUNNING)

    def alive(self) -> StageSteps:
        """Steps that a worker runs now: their lease has not expired."""
        return self.running().filter(ends_at__gte=Now())

    def orphaned(self) -> StageSteps:
        """Steps whose process died: the lease has expired."""
        return self.running().filter(ends_at__lt=Now())

    def failed(self) -> StageSteps:
        """Steps that failed, after their retries."""
        return self.filter(status=Status.FAILED)

    def unfinished(self) -> StageSteps:
        """Steps that have not succeeded, and so keep their stage open."""
        return self.exclude(status=Status.SUCCEEDED)

    def overdue(self, patience: timedelta) -> StageSteps:
        """
        Steps that were sent, but not started within ``patience``, which doubles at each re-send.

        Unless it was re-sent, a step counts as sent when its stage started.
        """
        sent = self.waiting().filter(
            run__status__in=[Status.WAITING, Status.RUNNING], stage=F("run__stage")
        )
        late = Q(pk__in=[])
        for resent in range(MOST_DOUBLINGS):
            late |= Q(resent=resent, since__lt=Now() - patience * 2**resent)
        late |= Q(resent__gte=MOST_DOUBLINGS, since__lt=Now() - patience * 2**MOST_DOUBLINGS)
        return sent.alias(since=Coalesce("due_at", "run__stage_at")).filter(late)

    def attempt(self, task_id: str) -> StageSteps:
        """Steps that messages with this task id run."""
        return self.filter(task_id=task_id)

    def claimed(self, *tokens: str) -> StageSteps:
        """Steps still held by the claims with these tokens."""
        return self.running().filter(token__in=tokens)

    def is_done_by(self, token: str) -> bool:
        """Return whether the claim with this token finished the step."""
        return self.filter(status=Status.SUCCEEDED, token=token).exists()

    def put_back(
        self,
        token: str,
        status: Status,
        error_type: str,
        error: str,
        traceback: str = "",
        *,
        died: bool = False,
    ) -> bool:
        """Set a step to waiting or aborted after an error; True if the claim still held it."""
        ended = status in Status.STOPPED
        return bool(
            self.claimed(token).update(
                status=status,
                due_at=None if ended else Now(),
                ended_at=Now() if ended else None,
                error_type=error_type[:LONGEST_TYPE],
                error=storable(error),
                traceback=end_of_traceback(traceback),
                **(DIED if died else {}),
            )
        )

    def fail(self, error_type: str, error: str, traceback: str = "") -> int:
        """Record that the steps failed; return how many."""
        return self.update(
            status=Status.FAILED,
            ended_at=Now(),
            error_type=error_type[:LONGEST_TYPE],
            error=storable(error),
            traceback=end_of_traceback(traceback),
        )

    def abort(self) -> int:
        """Abort the steps that wait; return how many."""
        return self.waiting().update(status=Status.ABORTED, ended_at=Now())

    def requeue_orphan(self, token: str, *, stopped: bool) -> bool:
        """Set an orphaned step to waiting, or abort it; True if its lease had expired."""
        return bool(
            self.orphaned()
            .filter(token=token)
            .update(
                status=Status.ABORTED if stopped else Status.WAITING,
                due_at=None if stopped else Now(),
                ended_at=Now() if stopped else None,
                **DIED,
            )
        )

    def record_resent(self) -> int:
        """Record a re-send of the messages of steps that no worker has started."""
        return self.waiting().update(due_at=Now(), resent=F("resent") + 1)

    def restart(self, steps: Iterable[StageStep]) -> None:
        """Set steps to waiting for a new attempt, each with the task id that was set on it."""
        self.update(
            status=Status.WAITING,
            due_at=None,
            resent=0,
            deaths=0,
            started_at=None,
            ended_at=None,
            params_text="",
            error_type="",
            error="",
            traceback="",
        )
        # Not self: its filter may no longer match the rows that were just changed.
        self.model.objects.using(self.db).bulk_update(steps, ["task_id"], batch_size=BATCH)
