"""Runs of stages and their steps: the rows that operators see, and the decisions about runs."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import Celery, current_app
from django.db.models import Case, F, OuterRef, Q, Subquery, When
from django.db.models.functions import Coalesce
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..databases import Now
from ..delivery.call import load_tasks
from ..foreign_errors import describe_error
from ..leases.holder import HeldLock
from ..leases.lease_table import read_holder
from ..models.stages import StageRun, StageStep
from ..models.step_states import IN_ORDER
from ..stages import Progress, StageProgress, Status
from ..stages.engine import StepError
from ..stages.status import NOT_REGISTERED
from ..stages.step_table import StepTable
from ..texts import get_logger, printable
from .decision import Decision
from .row import LeasedRow, Row, ago, duration, seconds_between
from .words import translate_state

logger = get_logger(__name__)

#: Characters of a step's arguments, and lines of its traceback, that a list shows.
LONGEST_DATA: Final = 200
LAST_LINES: Final = 6
NO_TASK: Final = gettext_lazy(
    "This project has no task of this name, so that no worker of this release can run it: it was "
    "renamed or removed, or its module is not imported."
)


class RunRow(Row):
    """A run, read by :func:`with_steps`; only ``data`` has its params and results."""

    keys = (
        "id", "key", "name", "url", "database", "status", *Progress._fields, "percent",
        "created_at", "ended_at", "age_s", "ended_s", "duration_s", "error_step", "error", "note",
    )  # fmt: skip
    details = ("status", "fault", "created_at", "ended_at", "took", "note", "data")
    headings = {
        **Row.headings, "fault": "error", "data": "params", "stage_shown": "stage",
        "took": "duration",
    }  # fmt: skip

    def __init__(self, run: Any) -> None:
        progress = Progress(run.done, run.total, run.stage, run.stages)
        super().__init__(run, f"{run.title}: {run.status}, {describe_progress(progress)}")
        self.percent = progress.percent
        self.stage_shown = _("{number} of {total}").format(number=run.stage, total=run.stages)
        self.age_s = seconds_between(run.created_at, run.asked_at)
        self.ended_s = seconds_between(run.ended_at, run.asked_at)
        self.started, self.ended = ago(self.age_s), ago(self.ended_s)
        #: Seconds from the start of the run to its end, or until now.
        self.duration_s = seconds_between(run.created_at, run.ended_at or run.asked_at)
        self.took = duration(self.duration_s)
        #: The step that failed first, if the run failed because of it.
        self.error_step: str | None = None
        self.error = self.fault = str(run.error)
        if not run.step_task:
            return
        step = f"{run.step_task}[{run.step_task_id}]"
        error = str(StepError(run.step_error_type, run.step_error))
        if run.status == Status.FAILED:
            self.error_step, self.error = step, error
            self.fault = _("{step} failed: {error}").format(step=step, error=error)
        elif run.status not in Status.STOPPED:
            self.fault = _("{step} waits: {error}").format(step=step, error=error)

    @property
    def data(self) -> str:
        """The params given and returned so far; "" without ``SHOW_ARGUMENTS``."""
        return visible_data(self.params_text)

    def parts(self) -> list[str | None]:
        times = f"started {self.started}"
        if self.ended:
            times += f", ended {self.ended}, took {self.took}"
        # The title already shows the name, or the key if there is no name.
        about = filter(None, [self.key if self.name else "", self.url])
        note = self.note and f"sweep: {self.note}"
        return [", ".join(about), times, self.fault, note]

    def describe(self) -> str:
        return _("{status}, {done} of {total} steps done").format(
            status=translate_state(self.status), done=self.done, total=self.total
        )


class StepRow(LeasedRow):
    """A step; only ``data`` has its arguments, and only ``returned`` what it returned."""

    keys = (
        "task", "task_id", "status", "stage", "host", "pid", "started_at", "ended_at",
        "duration_s", "waits_s", "remaining_s", "starts", "deaths", "resent", "error", "traceback",
        "note",
    )  # fmt: skip
    details = (
        "stage", "task", "data", "status", "error", "took", "waiting_since", "process",
        "lease_left", "started_at", "ended_at", "starts", "deaths", "resent", "note", "task_id",
        "priority", "returned",
    )  # fmt: skip
    headings = {**Row.headings, "data": "arguments", "took": "duration"}

    def __init__(self, step: Any) -> None:
        lease = read_holder("", step) if step.ends_at else HeldLock("")
        runs = bool(step.status == Status.RUNNING and step.ends_at)
        super().__init__(step, f"{step.status:<9} {step.task}", lease, runs=runs)
        self.task, self.task_id = step.task, step.task_id
        if not step.ends_at:
            self.process = ""
        elif self.remaining_s == 0:
            self.process = _("{process}, gone").format(process=self.process)
        self.error = str(StepError(step.error_type, step.error))
        #: When its message should have arrived; None: it does not wait for a message.
        self.waiting_since = step.since if step.status == Status.WAITING else None
        if self.waiting_since is not None and not self.error and not is_task(step.task):
            self.error = f"{NOT_REGISTERED}: {NO_TASK}"
        #: Seconds since its message should have arrived.
        self.waits_s = seconds_between(self.waiting_since, step.asked_at)
        #: Seconds for which it ran, or has run so far; None: not started, or waiting again.
        self.duration_s = None
        if step.status != Status.WAITING:
            self.duration_s = seconds_between(step.started_at, step.ended_at or step.asked_at)
        self.took = None if self.duration_s is None else duration(self.duration_s)

    @property
    def trace(self) -> list[str]:
        """The last lines of its error's traceback."""
        return [printable(line) for line in self.source.traceback.splitlines()]

    @property
    def data(self) -> str:
        """The arguments of the plan's entry; "" without ``SHOW_ARGUMENTS``."""
        return visible_data(self.arguments_text)

    @property
    def returned(self) -> str:
        """The params that it returned for later stages; "" without ``SHOW_ARGUMENTS``."""
        return visible_data(self.params_text)

    def parts(self) -> list[str | None]:
        parts = [f"stage {self.stage}", str(self.task_id)]
        if self.remaining_s is not None:
            parts += [f"for {self.took}", self.process]
        elif self.waits_s is not None:
            parts.append(f"for {duration(self.waits_s)}")
        elif self.took is not None:
            parts.append(f"took {self.took}")
        if self.starts > 1:
            parts.append(f"begun {self.starts} times")
        if self.resent:
            parts.append(f"sent again {self.resent} time(s)")
        note = self.note and f"sweep: {self.note}"
        data = Truncator(self.data).chars(LONGEST_DATA)
        # The line above already shows the error itself.
        trace = self.trace[:-1][-LAST_LINES:] if self.status == Status.FAILED else []
        return [", ".join(parts), data, self.error, *trace, note]


def is_task(name: str) -> bool:
    """Return whether the project has a task of this name; True if that can't be determined."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if name not in app.tasks and app not in _loaded:
        _loaded[app] = _try_load_tasks(app)  # a command or a web server may not have loaded them
    return name in app.tasks or not _loaded.get(app, True)


def _try_load_tasks(app: Celery) -> bool:
    try:
        load_tasks(app)
    except Exception as error:  # noqa: BLE001 - a project's task modules may raise anything
        logger.warning("The project's tasks can't be loaded: %s", describe_error(error))
        return False
    return True


#: The apps whose tasks were loaded here (once, even for a long list), and whether that worked.
_loaded: Final[WeakKeyDictionary[Celery, bool]] = WeakKeyDictionary()


def visible_data(text: str) -> str:
    """Return params or arguments; "" without ``SHOW_ARGUMENTS``."""
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
    """Annotate runs for :class:`RunRow`: with the counts of their steps, and the first failure."""
    dropped = Q(status=Status.WAITING, error_type=NOT_REGISTERED)
    faulty = StageStep.objects.filter(Q(status=Status.FAILED) | dropped, run=OuterRef("pk"))
    first = faulty.order_by("ended_at", "position")
    names = ("task", "task_id", "error_type", "error")
    of_first = {f"step_{name}": Subquery(first.values(name)[:1]) for name in names}
    return runs.annotate(asked_at=Now(), **of_first).counted()


def runs_in(alias: str) -> Any:
    """Return the runs in a database, annotated for :class:`RunRow`, newest first."""
    return with_steps(StepTable(alias).runs().defer("params_text")).order_by("-pk")


def steps_to_look_at(run: StageRun) -> Any:
    """Return the steps that failed, run or wait for a worker; failed steps come first."""
    waits = Q(status=Status.WAITING, stage=run.stage)
    steps = run.steps.filter(Q(status__in=[Status.RUNNING, Status.FAILED]) | waits)
    return with_since(steps).order_by(URGENCY, *IN_ORDER).defer("params_text")


def with_since(steps: Any) -> Any:
    """Annotate steps for :class:`StepRow`: with the moment since which they wait."""
    sent = Q(run__status__in=[Status.WAITING, Status.RUNNING], stage=F("run__stage"))
    since = Case(When(sent, then=Coalesce("due_at", "run__stage_at")))
    return steps.annotate(asked_at=Now(), since=since)


#: The order in which an operator looks at the steps of a run.
URGENCY: Final = Case(
    When(status=Status.FAILED, then=0),
    When(status=Status.WAITING, error_type=NOT_REGISTERED, then=1),
    When(status=Status.RUNNING, then=2),
    When(status=Status.WAITING, stage=F("run__stage"), then=3),
    default=4,
)


RESUME: Final = Decision(
    name="resume",
    act=lambda run, force: run.resume(),
    consequence=gettext_lazy(
        "Steps that failed or did not begin run again. Steps that succeeded do not, and their "
        "results stay, unless a stage returned too much: then those that returned something run "
        "again."
    ),
    done=gettext_lazy("was resumed"),
    fits=lambda run: run.status in (Status.FAILED, Status.ABORTED),
)
ABORT: Final = Decision(
    name="abort",
    act=lambda run, force: run.abort(),
    consequence=gettext_lazy(
        "Steps that did not begin are stopped. Steps that run now end as they will."
    ),
    done=gettext_lazy("was aborted"),
    fits=lambda run: run.status not in Status.STOPPED,
)
