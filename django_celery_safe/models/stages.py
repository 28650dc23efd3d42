"""
Runs of stages and their steps: their states, and the transitions between them.

Code that changes a run locks the run's row first and its steps after that, so that changes
can't deadlock. :mod:`django_celery_safe.stages.engine` combines the transitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from .. import queries
from ..databases import Now
from ..leases.holder import HeldLock, decode_holder
from ..stages import decisions, progress
from ..stages.entry_options import EntryParts, read_entry
from ..stages.progress import Progress, StageProgress
from ..stages.status import NOT_REGISTERED, Status
from ..texts import get_logger
from ..transactions import attempts
from ..values import decode
from .columns import ExactCharField, ExactTextField, PartialIndex
from .listing import ListedRow, seconds_between, shown
from .outbox import OutboxMessage
from .step_states import IN_ORDER, StageSteps
from .text import LONGEST_TYPE

logger = get_logger(__name__)

#: How long relays do not try again to delete a run that a row of the project protects.
PROTECTED_FOR: Final = timedelta(days=1)


class StageRuns(models.QuerySet["StageRun"]):
    """The states of runs."""

    def listed(self) -> StageRuns:
        """Runs as lists show them: see :class:`ListedRow`, with the step to look at first."""
        dropped = Q(status=Status.WAITING, error_type=NOT_REGISTERED)
        steps = StageStep.objects.filter(Q(status=Status.FAILED) | dropped, run=OuterRef("pk"))
        first = steps.order_by("ended_at", "position")
        names = ("task", "task_id", "error_type", "error")
        of_first = {f"step_{name}": Subquery(first.values(name)[:1]) for name in names}
        return self.counted().annotate(asked_at=Now(), **of_first).defer("params_text")

    def active(self) -> StageRuns:
        """Runs that have not ended and continue without an operator."""
        return self.filter(status__in=[Status.WAITING, Status.RUNNING])

    def stopped(self) -> StageRuns:
        """Runs that ended, successfully or not."""
        return self.exclude(status__in=[Status.WAITING, Status.RUNNING])

    def older(self, age: timedelta) -> StageRuns:
        """Runs that ended more than ``age`` ago and have no running step."""
        alive = StageStep.objects.filter(run=OuterRef("pk")).alive()
        return self.stopped().filter(~Exists(alive), ended_at__lt=Now() - age)

    def unprotected(self) -> StageRuns:
        """Runs that no row of the project has protected from deletion in the last day."""
        long_ago = Q(protected_at__lt=Now() - PROTECTED_FOR)
        return self.filter(Q(protected_at__isnull=True) | long_ago)

    def counted(self) -> StageRuns:
        """Runs with the number of their steps as ``total``, and of succeeded steps as ``done``."""
        steps = StageStep.objects.filter(run=OuterRef("pk")).order_by().values("run")
        total = steps.annotate(total=Count("pk")).values("total")
        done = steps.filter(status=Status.SUCCEEDED).annotate(done=Count("pk")).values("done")
        return self.annotate(total=Coalesce(Subquery(total), 0), done=Coalesce(Subquery(done), 0))

    def lock(self, pk: int) -> StageRun | None:
        """
        Lock a run until the open transaction ends, and return it; None: it was deleted.

        The lock is an UPDATE, which works on every database. Under a stricter isolation an
        UPDATE fails, where a SELECT would get the lock and continue with outdated values.
        """
        rows = queries.fetch(self.db, "lock_run", pk=pk)
        return StageRun.from_db(self.db, _LOCKED, rows[0]) if rows else None

    @contextmanager
    def locked(self, pk: int) -> Iterator[StageRun | None]:
        """Lock a run for the block, in a transaction."""
        for attempt in attempts(self.db, f"A change of run {pk}"):
            with attempt, transaction.atomic(using=self.db):
                run = self.lock(pk)
                attempt.is_won = True
                yield run

    def delete(self) -> tuple[int, dict[str, int]]:
        """
        Delete the runs and their steps, like Django's; each run is locked before its steps.

        Their state is read again under the locks, because a run may have been resumed.
        """
        self._for_write = True  # the rows may have been read from a replica
        found = list(self.order_by("pk").values_list("pk", flat=True))
        with transaction.atomic(using=self.db):
            for pk in found:
                self.lock(pk)
            return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]

    def erase(self) -> int:
        """Delete the runs and their steps; return how many: 0 if the project protects one."""
        connection = connections[self.db]
        try:
            with transaction.atomic(using=self.db):
                erased = self.delete()[1].get(StageRun._meta.label, 0)
                if connection.vendor == "postgresql":
                    # A DO_NOTHING reference would fail only at the outer commit, for all runs.
                    connection.check_constraints()
            return erased
        except (models.ProtectedError, models.RestrictedError, IntegrityError) as error:
            pks = list(self.values_list("pk", flat=True))
            self.update(protected_at=Now())
            logger.warning("Run %s is not pruned: %s", ", ".join(map(str, pks)), error.args[0])
            return 0


#: Fields that are read when a run is locked; the others are read when they are used.
_LOCKED: Final = ("id", "key", "name", "status", "stage", "stages", "params_text")


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
    status = ExactCharField(
        _("status"), max_length=9, choices=Status.choices, default=Status.WAITING
    )
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
            PartialIndex(
                fields=["id"],
                name="safe_run_active",
                rows=Q(status__in=["waiting", "running"]),
                whole_fields=["status"],
            ),
            PartialIndex(
                fields=["ended_at"], name="safe_run_ended", rows=Q(ended_at__isnull=False)
            ),
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
        params: dict[str, Any] = decode(self.params_text)
        return params

    @property
    def steps(self) -> StageSteps:
        """The run's steps, ordered by stage and by position in the plan."""
        ours = StageStep.objects.using(self._state.db).filter(run=self.pk)
        return ours.order_by(*IN_ORDER)

    @property
    def error_step(self) -> StageStep | None:
        """The step that failed first; None: no step failed."""
        return self.steps.failed().order_by("ended_at", "position").first()

    @property
    def progress(self) -> Progress:
        """How far the run is; one query."""
        return progress.progress(self)

    def progress_by_stage(self) -> list[StageProgress]:
        """Return how far each stage is, in the order of the stages; one query."""
        return progress.progress_by_stage(self)

    def is_aborted(self) -> bool:
        """
        Return whether the run was stopped, by ``abort()`` or because a step failed; one query.

        Long steps can check it: the work of a stopped run is no longer needed.
        """
        ours = StageRun.objects.using(self._state.db).filter(pk=self.pk)
        return not ours.active().exists()

    def wait(self, timeout: float | timedelta | None = None, *, idle: bool = False) -> StageRun:
        """
        Wait until the run has succeeded, failed or been aborted; return it with fresh values.

        The run is queried four times a second. For scripts and tests; a web page should read
        :attr:`progress` now and then instead.

        Args:
            timeout: Seconds or timedelta; None waits for ever.
            idle: Whether to wait also until no step of the run is running: when a step fails,
                other steps of its stage may still run, and :meth:`resume` would refuse.

        Raises:
            TimeoutError: The run has not ended.
            WrongTransaction: Inside ``atomic()``, where the run may not even have started.
            RuntimeError: Inside a task, which would occupy a worker that the steps need.
        """
        return progress.wait(self, timeout, idle)

    def resume(self) -> StageRun:
        """
        Run the steps that failed or have not started; return the run with fresh values.

        Steps that succeeded are not run again, and their params stay. The exception: if the
        params of a stage were too large together, its steps that returned params run again.

        Raises:
            IllegalTransition: The run has not ended, has succeeded or still has running steps,
                or another run with its key has not ended.
        """
        decisions.resume(self)
        return self

    def abort(self) -> StageRun:
        """
        Abort the steps that have not started; return the run with fresh values.

        Running steps continue to their end; they may check :meth:`is_aborted`.

        Raises:
            IllegalTransition: The run has already ended.
        """
        decisions.abort(self)
        return self

    def find_database(self) -> str:
        """Return the alias of the database where the run can be changed, not of a replica."""
        alias = self._state.db
        if alias is None or alias == router.db_for_read(StageRun):
            return router.db_for_write(StageRun)
        return alias

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Delete the run and its steps, like Django's; the run is locked before its steps."""
        using = using or self.find_database()
        with transaction.atomic(using=using):
            StageRun.objects.using(using).lock(self.pk)
            return super().delete(using=using, keep_parents=keep_parents)


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
    status = ExactCharField(
        _("status"), max_length=9, choices=Status.choices, default=Status.WAITING
    )
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

    objects = StageSteps.as_manager()

    class Meta:
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(fields=["run", "stage", "position"], name="safe_step_place"),
        )
        indexes = (
            PartialIndex(
                fields=["run", "stage"],
                name="safe_step_unfinished",
                rows=~Q(status="succeeded"),
                whole_fields=["run", "stage", "status"],
            ),
            models.Index(fields=["task_id"], name="safe_step_task_id"),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def process(self) -> str:
        """The process that runs it, or ran it last; "": none, or not known any more."""
        holder = vars(self)["message_holder"] or ""
        return decode_holder(holder, HeldLock("")).holder.process

    @property
    def remaining_s(self) -> float | None:
        """Seconds until its lease ends; 0: its process has died; None: it does not run."""
        if self.status != Status.RUNNING:
            return None
        is_held = vars(self)["message_state"] == OutboxMessage.State.RUNNING
        over = self.seconds_since(vars(self)["message_due_at"]) if is_held else None
        return 0.0 if over is None else max(0.0, -over)

    @property
    def starts(self) -> int:
        """How many times it was started, as long as its message is there."""
        return vars(self)["message_starts"] or 0

    @property
    def deaths(self) -> int:
        """How many of its processes died, as long as its message is there."""
        return vars(self)["message_deaths"] or 0

    @property
    def resent(self) -> int:
        """How many times its message was sent again because no worker had started it."""
        return vars(self)["message_resent"] or 0

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
        return self.parts.arguments

    @property
    def options(self) -> dict[str, Any]:
        """The options of the plan's entry, without their @."""
        return self.parts.options

    @property
    def parts(self) -> EntryParts:
        """The arguments and the options."""
        return read_entry(self.arguments_text)

    @property
    def params(self) -> dict[str, Any]:
        """The params that the step returned for later stages; empty until it has ended."""
        return decode(self.params_text) if self.params_text else {}
