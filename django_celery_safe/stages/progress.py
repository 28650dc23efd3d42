"""A run's progress, and waiting for its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery._state import get_current_task
from django.db.models import Count, Q

from .. import conf
from ..exceptions import WrongTransaction
from ..transactions import in_atomic
from .status import Status
from .step_messages import runs_eagerly

if TYPE_CHECKING:
    from ..models.stages import StageRun

#: Time between two looks of a waiting process, s.
LOOK: Final = 0.25


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


def progress(run: StageRun) -> Progress:
    """Return how far a run is now; one query for its steps."""
    succeeded = Count("pk", filter=Q(status=Status.SUCCEEDED))
    found = run.steps.aggregate(done=succeeded, total=Count("pk"))
    return Progress(found["done"], found["total"], run.stage, run.stages)


def progress_by_stage(run: StageRun) -> list[StageProgress]:
    """Return how far each stage of a run is, in the order of the stages; one query."""
    stages: dict[int, tuple[float, dict[Status, int]]] = {}
    rows = run.steps.order_by("stage", "status").values_list("stage", "priority", "status")
    for stage, priority, status, count in rows.annotate(count=Count("pk")):
        stages.setdefault(stage, (priority, {}))[1][Status(status)] = count
    return [
        StageProgress(stage, priority, sum(counts.values()), counts)
        for stage, (priority, counts) in sorted(stages.items())
    ]


def wait(run: StageRun, timeout: conf.Duration | None, idle: bool) -> StageRun:
    """Wait for the end of a run; see :meth:`StageRun.wait`."""
    task = get_current_task()
    if task is not None and (not task.request.is_eager or runs_eagerly()):
        raise RuntimeError(
            f"{run} is waited for inside the task {task.name}, which would keep a worker's slot "
            f"from its steps, for ever if it is the last. Start a run that goes on by itself."
        )
    alias = str(run._state.db)
    if in_atomic(alias):
        raise WrongTransaction(
            f"{run} is waited for inside atomic() on {alias!r}: what was started in it begins when "
            f"it commits, and so would never end. Wait after the block."
        )
    seconds = conf.WAIT.seconds_or_none(timeout, "timeout")
    give_up_at = None if seconds is None else time.monotonic() + seconds
    while True:
        run.refresh_from_db(using=alias)
        has_ended = run.status in Status.STOPPED
        if has_ended and not (idle and run.steps.alive().exists()):
            return run
        left = LOOK if give_up_at is None else give_up_at - time.monotonic()
        if left <= 0:
            shown = progress(run)
            what = "still has running steps" if has_ended else "goes on"
            raise TimeoutError(
                f"{run} {what} after {timeout}: {shown.done} of {shown.total} steps are done, and "
                f"stage {shown.stage} of {shown.stages} is {run.status}."
            )
        time.sleep(min(LOOK, left))
