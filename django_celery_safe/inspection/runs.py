"""Runs of stages and their steps: what is known of each, and what is decided about a run."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce, Now

from .. import conf
from ..leases.holder import HeldLock
from ..leases.lease_table import read_holder
from ..models.stages import StageRun, StageStep
from ..stages import Progress, StageProgress, Status
from ..stages.engine import StepError
from ..stages.repairs import PATIENCE
from ..stages.step_table import StepTable
from .decision import Decision
from .row import LeasedRow, Row, ago, duration, seconds_between


class RunRow(Row):
    """A run, read by :func:`with_steps`; what it was given and returned is in ``data`` alone."""

    keys = (
        "id", "database", "status", *Progress._fields, "percent", "created_at", "ended_at",
        "age_s", "ended_s", "error_step", "error", "note",
    )  # fmt: skip
    details = ("status", "fault", "created_at", "ended_at", "note", "data")
    headings = {**Row.headings, "fault": "error", "data": "params", "stage_shown": "stage"}

    def __init__(self, run: Any) -> None:
        progress = Progress(run.done, run.total, run.stage + 1, run.stages)
        super().__init__(run, f"Run {run.pk}: {run.status}, {describe_progress(progress)}")
        self.stage, self.percent = progress.stage, progress.percent
        self.stage_shown = f"{self.stage} of {self.stages}"
        self.age_s = seconds_between(run.created_at, run.asked_at)
        self.ended_s = seconds_between(run.ended_at, run.asked_at)
        self.started, self.ended = ago(self.age_s), ago(self.ended_s)
        #: The step that failed first, if that is why the run did.
        self.error_step: str | None = None
        self.error = self.fault = str(run.error)
        if run.status == Status.FAILED and run.step_task:
            self.error_step = f"{run.step_task}[{run.step_task_id}]"
            self.error = str(StepError(run.step_error_type, run.step_error))
            self.fault = f"{self.error_step} failed: {self.error}"

    @property
    def data(self) -> str:
        """The params given and returned so far; nothing without ``SHOW_ARGUMENTS``."""
        return visible_data(self.params_text)

    def parts(self) -> list[str | None]:
        times = f"started {self.started}" + (f", ended {self.ended}" if self.ended else "")
        note = self.note and f"sweep: {self.note}"
        return [times, self.fault, note]

    def describe(self) -> str:
        return f"{self.status}, {self.done} of {self.total} steps done"


class StepRow(LeasedRow):
    """A step; arguments and what it returned are in ``data`` and ``returned`` alone."""

    keys = (
        "task", "task_id", "status", "stage", "host", "pid", "started_at", "ended_at", "waits_s",
        "remaining_s", "starts", "deaths", "resent", "error", "note",
    )  # fmt: skip
    details = (
        "stage", "task", "status", "process", "lease_left", "error", "started_at",
        "ended_at", "starts", "deaths", "resent", "note", "task_id", "priority", "data",
        "returned",
    )  # fmt: skip
    headings = {**Row.headings, "data": "arguments"}

    def __init__(self, step: Any) -> None:
        lease = read_holder("", step) if step.ends_at else HeldLock("")
        runs = bool(step.status == Status.RUNNING and step.ends_at)
        super().__init__(step, f"{step.status:<9} {step.task}", lease, runs=runs)
        self.task, self.task_id, self.stage = step.task, step.task_id, step.stage + 1
        if not step.ends_at:
            self.process = ""
        elif self.remaining_s == 0:
            self.process += ", gone"
        self.error = str(StepError(step.error_type, step.error))
        #: Seconds since it was begun.
        self.ran_s = seconds_between(step.started_at, step.asked_at)
        self.ran = ago(self.ran_s)

    @property
    def waits_s(self) -> float | None:
        """Seconds since its message was to be there; None: it does not wait."""
        waits = self.status == Status.WAITING
        return seconds_between(self.since, self.asked_at) if waits else None

    @property
    def data(self) -> str:
        """Its own arguments; nothing without ``SHOW_ARGUMENTS``."""
        return visible_data(self.arguments_text)

    @property
    def returned(self) -> str:
        """The params that it returned for later stages; nothing without ``SHOW_ARGUMENTS``."""
        return visible_data(self.params_text)

    def parts(self) -> list[str | None]:
        parts = [f"stage {self.stage}", str(self.task_id)]
        if self.remaining_s is not None:
            parts += [f"for {duration(self.ran_s)}", self.process]
        elif self.waits_s is not None:
            parts.append(f"for {duration(self.waits_s)}")
        if self.starts > 1:
            parts.append(f"begun {self.starts} times")
        if self.resent:
            parts.append(f"sent again {self.resent} time(s)")
        note = self.note and f"sweep: {self.note}"
        return [", ".join(parts), self.error, note]


def visible_data(text: str) -> str:
    """Return params or arguments as people may see them."""
    return text if conf.get("SHOW_ARGUMENTS") else ""


def describe_progress(progress: Progress) -> str:
    """Return how far a run is, as a clause."""
    done = f"{progress.done} of {progress.total} steps done ({progress.percent} %)"
    return f"stage {progress.stage} of {progress.stages}, {done}"


def stage_as_json(stage: StageProgress) -> dict[str, Any]:
    """Return a stage as ``show --json`` shows it."""
    counts = {str(status): stage.counts.get(status, 0) for status in Status}
    return {"stage": stage.stage, "priority": stage.priority, "total": stage.total, **counts}


def with_steps(runs: Any) -> Any:
    """Return runs as :class:`RunRow` takes them: with counts of their steps, and what failed."""
    failed = StageStep.objects.filter(run=OuterRef("pk"), status=Status.FAILED)
    first = failed.order_by("ended_at", "position")
    names = ("task", "task_id", "error_type", "error")
    of_first = {f"step_{name}": Subquery(first.values(name)[:1]) for name in names}
    return runs.annotate(asked_at=Now(), **of_first).counted()


def runs_in(alias: str) -> Any:
    """Return the runs in a database as :class:`RunRow` takes them, the newest first."""
    return with_steps(StepTable(alias).runs().defer("params_text")).order_by("-pk")


def steps_to_look_at(run: StageRun) -> Any:
    """Return the steps that run, failed, wait for long or were repaired."""
    waits = Q(status=Status.WAITING, stage=run.stage)
    late = Q(pk__in=run.steps.overdue(PATIENCE).order_by().values("pk"))
    failed_before = ~Q(note="") | ~Q(error="") | ~Q(error_type="")
    chosen = Q(status__in=[Status.RUNNING, Status.FAILED]) | late | (waits & failed_before)
    steps = run.steps.filter(chosen).defer("params_text", "arguments_text")
    return steps.annotate(asked_at=Now(), since=Coalesce("due_at", F("run__stage_at")))


RESUME: Final = Decision(
    name="resume",
    label="Resume",
    consequence="Steps that failed or did not begin run again. Steps that succeeded do not, and "
    "their results stay.",
    done="was resumed",
    act=lambda run, force: run.resume(),
    fits=lambda run: run.status in (Status.FAILED, Status.ABORTED),
)
ABORT: Final = Decision(
    name="abort",
    label="Abort",
    consequence="Steps that did not begin are stopped. Steps that run now end as they will.",
    done="was aborted",
    act=lambda run, force: run.abort(),
    fits=lambda run: run.status not in Status.STOPPED,
)
