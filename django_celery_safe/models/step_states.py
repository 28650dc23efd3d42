"""The states of steps, as querysets, and the transitions between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.db.models import Case, Exists, F, OuterRef, Subquery, When
from django.db.models.functions import Coalesce

from ..databases import Now
from ..sending.followed import Fault
from ..stages.status import NOT_REGISTERED, Status
from .message_states import CARRIED
from .outbox import OutboxMessage
from .text import LONGEST_TYPE, end_of_traceback, storable

if TYPE_CHECKING:
    from .stages import StageStep

#: Steps that one statement changes; every database accepts that many parameters.
BATCH: Final = 500
#: The order of a run's steps.
IN_ORDER: Final = ("stage", "position")
#: What a list shows of the message of a step. The counts are 0 when the message is gone.
OF_MESSAGE: Final = ("state", "holder", "due_at")
COUNTS: Final = ("starts", "deaths", "resent")


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
        return self.order_by(_URGENCY, *IN_ORDER)

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
        return self.update(
            status=status,
            ended_at=ended,
            error_type=fault.type[:LONGEST_TYPE],
            error=storable(fault.text),
            traceback=end_of_traceback(fault.traceback),
        )

    def restart(self, steps: Iterable[StageStep]) -> None:
        """Set steps to waiting for a new attempt, each with the task id that was set on it."""
        self.update(
            status=Status.WAITING, started_at=None, ended_at=None, params_text="",
            error_type="", error="", traceback="",
        )  # fmt: skip
        # Not self: its filter may no longer match the rows that were just changed.
        self.model.objects.using(self.db).bulk_update(steps, ["task_id"], batch_size=BATCH)


def _messages() -> Any:
    """Return the message of each step of the outer query."""
    return OutboxMessage.objects.filter(CARRIED, task_id=OuterRef("task_id"))
