"""
Runs of stages and their steps.

``stage_states`` has their querysets.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

from celery._state import get_current_task
from django.db import models, router
from django.db.models import Count, Q
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..exceptions import WrongTransaction
from ..leases.holder import HeldLock, decode_holder
from ..stages import engine
from ..stages.plan import read_entry
from ..stages.status import Progress, StageProgress, Status
from ..stages.step_messages import runs_eagerly
from ..texts import LONGEST_TYPE
from ..transactions import in_atomic
from ..values import decode
from .columns import ExactCharField, ExactTextField, partial_index
from .listing import ListedRow, seconds_between, shown
from .outbox import OutboxMessage
from .stage_states import IN_ORDER, StageRuns, StageSteps

#: Time between two looks of a process that waits for the end of a run, s.
LOOK: Final = 0.25


class StageRun(ListedRow):
    """
    One run of a plan, made by ``stages.start``.

    Its values date from when it was read; ``refresh_from_db()`` reads them again. All moments
    are by the database server's clock.
    """

    json_keys = (
        "id", "key", "name", "url", "database", "status", "done", "total", "stage", "stages",
        "created_at", "ended_at", "age_s", "duration_s", "reason",
    )  # fmt: skip

    #: The caller's labels of the run; "": none. See ``stages.start``.
    key = ExactCharField(_("key"), max_length=255, default="", blank=True)
    name = ExactCharField(max_length=255, default="", blank=True)
    url = ExactTextField(default="", blank=True)
    #: The key of an active run, which must be unique; None: the run has no key, or has ended.
    active_key = ExactCharField(max_length=255, null=True)  # type: ignore[misc]
    status = ExactCharField(_("status"), max_length=9, choices=Status.choices, default="waiting")
    #: Number of the stage that runs, or ran last, counted from 1.
    stage = models.PositiveIntegerField(default=1)
    #: Number of stages.
    stages = models.PositiveIntegerField()
    #: The run's params and the params that its stages returned, as JSON; see :attr:`params`.
    params_text = ExactTextField(default="{}", db_column="params")
    created_at = models.DateTimeField(_("created at"))
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: Why it failed, unless a step's error is the reason.
    error = ExactTextField(default="", blank=True)
    #: The last time that a row of the project prevented its deletion; None: never.
    protected_at = models.DateTimeField(null=True)

    objects = StageRuns.as_manager()

    class Meta:
        verbose_name = _("run of stages")
        verbose_name_plural = _("runs of stages")
        default_permissions = ("view",)
        permissions = (
            ("resume_stagerun", "Can resume run of stages"),
            ("abort_stagerun", "Can abort run of stages"),
        )
        indexes = (
            partial_index("safe_run_active", Q(status__in=["waiting", "running"]), "id", "status"),
            partial_index("safe_run_ended", Q(ended_at__isnull=False), "ended_at"),
            models.Index(fields=["key"], name="safe_run_key"),
        )
        # A unique constraint allows any number of rows with NULL.
        constraints = (models.UniqueConstraint(fields=("active_key",), name="safe_run_active_key"),)

    def __str__(self) -> str:
        known = self.__dict__  # reading a deferred field would be a query
        label = known.get("name") or known.get("key")
        return f"run {self.pk} ({label})" if label else f"run {self.pk}"

    @property
    def title(self) -> str:
        """The run's number and its name (or its key), as a heading."""
        return f"R{str(self)[1:]}"

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return self.seconds_since(self.created_at) or 0.0

    @property
    def duration_s(self) -> float | None:
        """Seconds from its start to its end, or until now."""
        return seconds_between(self.created_at, self.ended_at or self.asked)

    @property
    def reason(self) -> str:
        """The error that stopped it, or that keeps a step waiting; "": none."""
        run: Any = self  # as listed() has annotated it
        if run.step_task is None or self.status in (Status.SUCCEEDED, Status.ABORTED):
            return self.error
        error = f"{run.step_error_type}: {run.step_error}".strip(": ")
        return f"{run.step_task}[{run.step_task_id}]: {error}"

    @property
    def shown_params(self) -> str:
        """The params given and returned so far, as JSON; "" without ``SHOW_ARGUMENTS``."""
        return shown(self.params_text)

    @property
    def params(self) -> dict[str, Any]:
        """The params of the next stage: from the start and from all finished stages."""
        return dict(decode(self.params_text))

    @property
    def steps(self) -> StageSteps:
        """The run's steps, ordered by stage and by position in the plan."""
        return StageStep.objects.using(self._state.db).filter(run=self.pk).order_by(*IN_ORDER)

    @property
    def error_step(self) -> StageStep | None:
        """The step that failed first; None: no step failed."""
        return self.steps.failed().order_by("ended_at", "position").first()

    @property
    def progress(self) -> Progress:
        """How far the run is; one query."""
        succeeded = Count("pk", filter=Q(status=Status.SUCCEEDED))
        found = self.steps.aggregate(done=succeeded, total=Count("pk"))
        return Progress(found["done"], found["total"], self.stage, self.stages)

    def progress_by_stage(self) -> list[StageProgress]:
        """Return how far each stage is, in the order of the stages; one query."""
        found: dict[int, tuple[float, dict[Status, int]]] = {}
        rows = self.steps.order_by("stage", "status").values_list("stage", "priority", "status")
        for stage, priority, status, count in rows.annotate(count=Count("pk")):
            found.setdefault(stage, (priority, {}))[1][Status(status)] = count
        return [
            StageProgress(stage, priority, sum(counts.values()), counts)
            for stage, (priority, counts) in sorted(found.items())
        ]

    def is_aborted(self) -> bool:
        """
        Return whether the run was stopped, by ``abort()`` or because a step failed; one query.

        Long steps can check it.
        """
        return not StageRun.objects.using(self._state.db).filter(pk=self.pk).active().exists()

    def wait(self, timeout: float | timedelta | None = None, *, idle: bool = False) -> StageRun:
        """
        Wait until the run has succeeded, failed or been aborted; return it with fresh values.

        For scripts and tests, because it queries four times a second; a web page reads
        :attr:`progress` now and then.

        Args:
            timeout: Seconds or timedelta; None waits for ever.
            idle: Whether to wait also until no step of the run is running: when a step fails,
                other steps of its stage may still run, and :meth:`resume` would refuse.

        Raises:
            TimeoutError: The run has not ended.
            WrongTransaction: Inside ``atomic()``, where the run may not even have started.
            RuntimeError: Inside a task, which would occupy a worker that the steps need.
        """
        task = get_current_task()
        if task is not None and (not task.request.is_eager or runs_eagerly()):
            raise RuntimeError(
                f"{self} is waited for inside the task {task.name}, which would keep a worker's "
                f"slot from its steps, for ever if it is the last. Start a run that goes on by "
                f"itself."
            )
        alias = str(self._state.db)
        if in_atomic(alias):
            raise WrongTransaction(
                f"{self} is waited for inside atomic() on {alias!r}: what was started in it begins "
                f"when it commits, and so would never end. Wait after the block."
            )
        seconds = conf.WAIT.seconds_or_none(timeout, "timeout")
        give_up_at = None if seconds is None else time.monotonic() + seconds
        while True:
            self.refresh_from_db(using=alias)
            has_ended = self.status in Status.STOPPED
            if has_ended and not (idle and self.steps.alive().exists()):
                return self
            left = LOOK if give_up_at is None else give_up_at - time.monotonic()
            if left <= 0:
                shown = self.progress
                what = "still has running steps" if has_ended else "goes on"
                raise TimeoutError(
                    f"{self} {what} after {timeout}: {shown.done} of {shown.total} steps are done, "
                    f"and stage {shown.stage} of {shown.stages} is {self.status}."
                )
            time.sleep(min(LOOK, left))

    def resume(self) -> StageRun:
        """
        Run the steps that failed or have not started; return the run with fresh values.

        Steps that succeeded are not run again, unless the params of their stage were too large
        together: then those of them that returned params are.

        Raises:
            IllegalTransition: The run has not ended, has succeeded or still has running steps,
                or another run with its key has not ended.
        """
        engine.resume(self)
        return self

    def abort(self) -> StageRun:
        """
        Abort the steps that have not started; return the run with fresh values.

        Running steps continue to their end; they may check :meth:`is_aborted`.

        Raises:
            IllegalTransition: The run has already ended.
        """
        engine.abort(self)
        return self

    def find_database(self) -> str:
        """Return the alias of the database where the run can be changed, not of a replica."""
        return router.db_for_write(StageRun, instance=self)

    def refresh_from_db(self, using: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Reload the run, like Django's, but from its own database: a replica may be behind."""
        super().refresh_from_db(self._state.db if using is None else using, *args, **kwargs)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Delete the run and its steps, like Django's; the run is locked before its steps."""
        rows = StageRun.objects.using(using or self.find_database()).filter(pk=self.pk)
        deleted, self.pk = rows.delete(), None
        return deleted


class StageStep(ListedRow):
    """
    One task of a run, with its arguments, its state and its outcome.

    Change a step only through its run.
    """

    json_keys = (
        "task", "task_id", "status", "stage", "process", "started_at", "ended_at", "duration_s",
        "waits_s", "remaining_s", "starts", "deaths", "resent", "reason",
    )  # fmt: skip

    run = models.ForeignKey(StageRun, models.CASCADE, related_name="+", verbose_name=_("run"))
    #: Number of its stage, and its position in that stage, both counted from 1.
    stage = models.PositiveIntegerField(_("stage"))
    position = models.PositiveIntegerField()
    priority = models.FloatField(_("priority"))
    task = ExactCharField(_("task"), max_length=255)
    #: The entry's arguments and options, as JSON; "": none; see :attr:`arguments`, :attr:`options`.
    arguments_text = ExactTextField(default="", blank=True, db_column="arguments")
    status = ExactCharField(_("status"), max_length=9, choices=Status.choices, default="waiting")
    #: The task id of the message that runs the step. A resumed step gets a new task id.
    task_id = ExactCharField(_("task id"), max_length=36)
    started_at = models.DateTimeField(_("started at"), null=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: The params that the step returned for the next stages, as JSON; "": none.
    params_text = ExactTextField(default="", blank=True, db_column="params")
    error_type = ExactCharField(_("error type"), max_length=LONGEST_TYPE, default="", blank=True)
    error = ExactTextField(_("error"), default="", blank=True)
    #: The end of the error's traceback; "": it has none.
    traceback = ExactTextField(_("traceback"), default="", blank=True)

    #: Its starts, how many of its processes died, and how often its message was sent again because
    #: no worker had started it; as :meth:`StageSteps.listed` has annotated them.
    starts: int
    deaths: int
    resent: int

    objects = StageSteps.as_manager()

    class Meta:
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(fields=["run", "stage", "position"], name="safe_step_place"),
        )
        indexes = (
            partial_index(
                "safe_step_unfinished", ~Q(status="succeeded"), "run stage", "run stage status"
            ),
            models.Index(fields=["task_id"], name="safe_step_task_id"),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def process(self) -> str:
        """The process that runs it, or ran it last; "": none, or not known any more."""
        return decode_holder(vars(self)["message_holder"] or "", HeldLock("")).holder.process

    @property
    def remaining_s(self) -> float | None:
        """Seconds until its lease ends; 0: its process has died; None: it does not run."""
        if self.status != Status.RUNNING:
            return None
        is_held = vars(self)["message_state"] == OutboxMessage.State.RUNNING
        over = self.seconds_since(vars(self)["message_due_at"]) if is_held else None
        return 0.0 if over is None else max(0.0, -over)

    @property
    def waits_s(self) -> float | None:
        """Seconds since its message was sent; None: it does not wait for a worker."""
        return self.seconds_since(vars(self)["since"])

    @property
    def duration_s(self) -> float | None:
        """Seconds for which it ran, or has run so far; None: not started, or waiting again."""
        if self.status == Status.WAITING:
            return None
        return seconds_between(self.started_at, self.ended_at or self.asked)

    @property
    def reason(self) -> str:
        """The error that stopped it, or with which it waits to be retried; "": none."""
        return f"{self.error_type}: {self.error}".strip(": ")

    @property
    def shown_arguments(self) -> str:
        """The arguments of the plan's entry, as JSON; "" without ``SHOW_ARGUMENTS``."""
        return shown(self.arguments_text)

    @property
    def shown_params(self) -> str:
        """The params that it returned for later stages, as JSON; "" without ``SHOW_ARGUMENTS``."""
        return shown(self.params_text)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the plan's entry."""
        return read_entry(self.arguments_text).arguments

    @property
    def options(self) -> dict[str, Any]:
        """The options of the plan's entry, without their @."""
        return read_entry(self.arguments_text).options

    @property
    def params(self) -> dict[str, Any]:
        """The params that the step returned for later stages; empty until it has ended."""
        return decode(self.params_text) if self.params_text else {}
