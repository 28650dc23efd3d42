"""The status of a run of stages and of each of its steps, and how far a run is."""

from __future__ import annotations

from enum import nonmember
from typing import Any, Final, NamedTuple

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

#: The error type of a step whose task its worker does not know: Celery's name for it.
NOT_REGISTERED: Final = "NotRegistered"


class Status(TextChoices):
    """
    The status of a run or of a step.

    A run waits until its first step starts. A step waits for its stage, for a worker,
    or for its next retry. The process of a running step may have died. A step fails after its
    retries; a run fails with its step, or if the params of a stage are too large together.
    ``STOPPED`` is the set of the statuses of a run that has ended.
    """

    WAITING = "waiting", _("Waiting")
    RUNNING = "running", _("Running")
    SUCCEEDED = "succeeded", _("Succeeded")
    FAILED = "failed", _("Failed")
    #: Stopped by ``abort()``; also a step that had not started when another step failed.
    ABORTED = "aborted", _("Aborted")

    #: Statuses that only an operator can change.
    STOPPED = nonmember(frozenset(("succeeded", "failed", "aborted")))


class Progress(NamedTuple):
    """
    How far a run is.

    Attributes:
        done: Number of steps that have succeeded.
        total: Number of steps.
        stage: Number of the stage that runs, or ran last, counted from 1.
        stages: Number of stages.
    """

    done: int
    total: int
    stage: int
    stages: int

    @property
    def percent(self) -> int:
        """The percentage of steps that are done, rounded down: 100 means all."""
        return 100 * self.done // self.total if self.total else 100


class StageProgress(NamedTuple):
    """
    How far one stage is.

    Attributes:
        stage: The stage's number, counted from 1.
        priority: The priority of its steps.
        total: Number of its steps.
        counts: Number of its steps in each status; statuses without steps are left out.
    """

    stage: int
    priority: float
    total: int
    counts: dict[Status, int]

    @property
    def done(self) -> int:
        """The number of its steps that have succeeded."""
        return self.counts.get(Status.SUCCEEDED, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the stage as ``celery_stages show --json`` shows it."""
        counts = {str(status): self.counts.get(status, 0) for status in Status}
        return {"stage": self.stage, "priority": self.priority, "total": self.total, **counts}
