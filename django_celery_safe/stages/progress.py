"""How far a run is, and waiting for its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from celery._state import get_current_task
from django.db.models import Count, Q

from .. import conf
from ..exceptions import WrongTransaction
from ..transactions import in_atomic
from .status import Status
from .step_messages import runs_eagerly

if TYPE_CHECKING:
    from ..models.stages import StageRun

#: How often a waiting process looks, s.
LOOK: Final = 0.25


class Progress(NamedTuple):
    """
    How far a run is.

    Attributes:
        done: How many of its steps have succeeded.
        total: How many there are.
        stage: Which stage runs, or ran last, from 1 on.
        stages: How many there are.
    """

    done: int
    total: int
    stage: int
    stages: int

    @property
    def percent(self) -> int:
        """How many of a hundred steps are done, rounded down: 100 means all."""
        return 100 * self.done // self.total if self.total else 100


class StageProgress(NamedTuple):
    """
    How far one stage is.

    Attributes:
        stage: Which one, from 1 on.
        priority: That of its steps.
        total: How many they are.
        counts: How many of them stand where; statuses of none are missing.
    """

    stage: int
    priority: float
    total: int
    counts: dict[Status, int]

    @property
    def done(self) -> int:
        """How many have succeeded."""
        return self.counts.get(Status.SUCCEEDED, 0)


def progress(run: StageRun) -> Progress:
    """Return how far a run is, as of now; one query for its steps."""
    succeeded = Count("pk", filter=Q(status=Status.SUCCEEDED))
    found = run.steps.aggregate(done=succeeded, total=Count("pk"))
    return Progress(found["done"], found["total"], run.stage + 1, run.stages)


def progress_by_stage(run: StageRun) -> list[StageProgress]:
    """Return how far each stage of a run is, the first first; one query."""
    stages: dict[int, tuple[float, dict[Status, int]]] = {}
    rows = run.steps.order_by("stage", "status").values_list("stage", "priority", "status")
    for stage, priority, status, count in rows.annotate(count=Count("pk")):
        stages.setdefault(stage, (priority, {}))[1][Status(status)] = count
    return [
        StageProgress(stage + 1, priority, sum(counts.values()), counts)
        for stage, (priority, counts) in sorted(stages.items())
    ]


def wait(run: StageRun, timeout: conf.Duration | None) -> StageRun:
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
    seconds = conf.wait_seconds(timeout, "timeout")
    give_up_at = None if seconds is None else time.monotonic() + seconds
    while True:
        run.refresh_from_db()
        if run.status in Status.STOPPED:
            return run
        left = LOOK if give_up_at is None else give_up_at - time.monotonic()
        if left <= 0:
            shown = progress(run)
            raise TimeoutError(
                f"{run} goes on after {timeout}: {shown.done} of {shown.total} steps are done, and "
                f"stage {shown.stage} of {shown.stages} is {run.status}."
            )
        time.sleep(min(LOOK, left))
