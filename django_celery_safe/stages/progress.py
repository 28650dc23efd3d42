"""A run's progress."""

from __future__ import annotations

from typing import Any, NamedTuple

from .status import Status


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
