"""
Runs of stages and their steps: the states, and the steps from one to the next.

Who changes a run locks its row first, and its steps after that: then no two that do so
wait for each other. :mod:`django_celery_safe.stages.engine` puts the steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from django.db import models, router, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce, Now

from ..stages.status import Status
from ..statements import Param, Statement
from ..texts import get_logger
from ..transactions import attempts
from ..values import decode
from .step_states import IN_ORDER, LONGEST_TYPE, StageSteps

if TYPE_CHECKING:
    from ..stages.progress import Progress, StageProgress

logger = get_logger(__name__)


class StageRuns(models.QuerySet["StageRun"]):
    """The states of runs."""

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

    def complete(self) -> StageRuns:
        """Runs whose stage is finished but whose next stage was never started."""
        steps = StageStep.objects.filter(run=OuterRef("pk"), stage=OuterRef("stage"))
        return self.active().filter(~Exists(steps.unfinished()))

    def counted(self) -> StageRuns:
        """Runs with the number of their steps as ``total`` and of succeeded ones as ``done``."""
        steps = StageStep.objects.filter(run=OuterRef("pk")).order_by().values("run")
        total = steps.annotate(total=Count("pk")).values("total")
        done = steps.filter(status=Status.SUCCEEDED).annotate(done=Count("pk")).values("done")
        return self.annotate(total=Coalesce(Subquery(total), 0), done=Coalesce(Subquery(done), 0))

    def lock(self, pk: int) -> StageRun | None:
        """
        Lock a run until the open transaction ends, and return it; None: it is gone.

        By an UPDATE, which every database has, and which fails under a stricter isolation
        where a SELECT would get the lock and go on with what was true before.
        """
        row = _LOCK.update_returning(self.db, pk=pk)
        return None if row is None else StageRun.from_db(self.db, _LOCKED, row)

    @contextmanager
    def locked(self, pk: int) -> Iterator[StageRun | None]:
        """Lock a run for the block, in a transaction."""
        for attempt in attempts(self.db, f"A change of run {pk}"):
            with attempt, transaction.atomic(using=self.db):
                run = self.lock(pk)
                attempt.win()
                yield run

    def delete(self) -> tuple[int, dict[str, int]]:
        """
        Delete them and their steps, as Django's; each run is locked before its steps.

        What they are is asked again under the locks: one may have been resumed meanwhile.
        """
        self._for_write = True  # what it was read from may be a replica
        found = list(self.order_by("pk").values_list("pk", flat=True))
        with transaction.atomic(using=self.db):
            for pk in found:
                self.lock(pk)
            return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]

    def prune(self) -> int:
        """
        Delete them one by one; return how many.

        One that a row of the project protects stays, and keeps no other from it.
        """
        self._for_write = True
        return sum(map(self._try_prune, list(self.order_by("pk").values_list("pk", flat=True))))

    def _try_prune(self, pk: int) -> int:
        try:
            return self.filter(pk=pk).delete()[1].get(StageRun._meta.label, 0)
        except (models.ProtectedError, models.RestrictedError) as error:
            logger.warning("Run %s is not pruned: %s", pk, error.args[0])
            return 0


#: What is known of a run that was locked; the rest is read when it is asked for.
_LOCKED: Final = ("id", "status", "stage", "stages", "params_text")
_LOCKED_COLUMNS: Final = (*_LOCKED[:-1], "params")
_LOCK: Final = Statement(
    lambda alias: (
        StageRun.objects.using(alias).filter(pk=Param("pk")),
        {"stage": F("stage")},
    ),
    lambda quote: (
        ", ".join(quote(column) for column in _LOCKED_COLUMNS),
        [],
    ),
)


class RunRoom(NamedTuple):
    """The operations on a run that ``stages`` provides, which imports this module."""

    progress: Callable[[StageRun], Progress]
    progress_by_stage: Callable[[StageRun], list[StageProgress]]
    wait: Callable[[StageRun, float | timedelta | None], StageRun]
    resume: Callable[[StageRun], None]
    abort: Callable[[StageRun], None]


class StageRun(models.Model):
    """
    One run of a plan, made by ``stages.start``.

    What it shows is as of when it was read: ``refresh_from_db()`` reads it anew. Every
    moment is the database server's.
    """

    status = models.CharField(max_length=9, choices=Status.choices, default=Status.WAITING)
    #: Number of the stage that runs, or ran last, from 0 on.
    stage = models.PositiveIntegerField(default=0)
    #: How many there are.
    stages = models.PositiveIntegerField()
    #: What was given and returned so far, as JSON; see :attr:`params`.
    params_text = models.TextField(default="{}", db_column="params")
    created_at = models.DateTimeField()
    #: When its stage began, or was begun anew.
    stage_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    #: Why it failed, if not by a step's error.
    error = models.TextField(default="", blank=True)
    #: What a sweep did to it last, and why.
    note = models.TextField(default="", blank=True)

    objects = StageRuns.as_manager()

    #: Put here when the app is ready.
    room: ClassVar[RunRoom]

    class Meta:
        verbose_name = "run of stages"
        verbose_name_plural = "runs of stages"
        default_permissions = ("view",)
        permissions = (
            ("resume_stagerun", "Can resume run of stages"),
            ("abort_stagerun", "Can abort run of stages"),
        )
        indexes = (
            models.Index(
                "id", name="safe_run_active", condition=Q(status__in=["waiting", "running"])
            ),
            models.Index("ended_at", name="safe_run_ended", condition=Q(ended_at__isnull=False)),
        )

    def __str__(self) -> str:
        return f"run {self.pk}"

    @property
    def params(self) -> dict[str, Any]:
        """The params of the next stage: those of the start and of all finished stages."""
        params: dict[str, Any] = decode(self.params_text)
        return params

    @property
    def steps(self) -> StageSteps:
        """The run's steps, ordered by stage and by their place in the plan."""
        ours = StageStep.objects.using(self._state.db).filter(run=self.pk)
        return ours.order_by(*IN_ORDER)

    @property
    def error_step(self) -> StageStep | None:
        """The step that failed first; None: none did."""
        return self.steps.failed().order_by("ended_at", "position").first()

    @property
    def progress(self) -> Progress:
        """How far it is; one query."""
        return self.room.progress(self)

    def progress_by_stage(self) -> list[StageProgress]:
        """Return how far each stage is, the first first; one query."""
        return self.room.progress_by_stage(self)

    def is_aborted(self) -> bool:
        """
        Return whether the run was stopped, by ``abort()`` or because a step failed; one query.

        For steps that take long: what they do is not needed any more.
        """
        ours = StageRun.objects.using(self._state.db).filter(pk=self.pk)
        return not ours.active().exists()

    def wait(self, timeout: float | timedelta | None = None) -> StageRun:
        """
        Wait until the run has ended, well or not, and return it, read anew.

        It looks four times a second. For scripts and tests: a page asks
        :attr:`progress` now and then instead.

        Args:
            timeout: Seconds or timedelta; None waits for ever.

        Raises:
            TimeoutError: It goes on.
            WrongTransaction: Inside ``atomic()``, where it may not even begin.
            RuntimeError: Inside a task, which would keep a worker from its steps.
        """
        return self.room.wait(self, timeout)

    def resume(self) -> StageRun:
        """
        Run again what failed and what was not begun, and return the run, read anew.

        What succeeded is not run again, and its params stay.

        Raises:
            IllegalTransition: It goes on, succeeded, or some of its steps still run.
        """
        self.room.resume(self)
        return self

    def abort(self) -> StageRun:
        """
        Stop what has not begun, and return the run, read anew.

        Running steps end as they will; they may ask :meth:`is_aborted`.

        Raises:
            IllegalTransition: It has ended.
        """
        self.room.abort(self)
        return self

    def find_database(self) -> str:
        """Return the alias of the database in which it can be changed: a replica can't."""
        alias = self._state.db
        if alias is None or alias == router.db_for_read(StageRun):
            return router.db_for_write(StageRun)
        return alias

    def refresh_from_db(
        self,
        using: str | None = None,
        fields: Iterable[str] | None = None,
        from_queryset: models.QuerySet[Any] | None = None,
    ) -> None:
        """Read it anew, as Django's, but from where it was: a replica may be behind."""
        using = self._state.db if using is None else using
        super().refresh_from_db(using, fields, from_queryset)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Delete it and its steps, as Django's; it is locked before they are."""
        using = using or self.find_database()
        with transaction.atomic(using=using):
            StageRun.objects.using(using).lock(self.pk)
            return super().delete(using=using, keep_parents=keep_parents)


class StageStep(models.Model):
    """One task of a run, with its arguments, and what became of it."""

    run = models.ForeignKey(StageRun, models.CASCADE, related_name="+")
    #: Number of its stage, from 0 on, and its place in the plan.
    stage = models.PositiveIntegerField()
    position = models.PositiveIntegerField()
    priority = models.FloatField()
    task = models.CharField(max_length=255)
    #: Its own arguments, as JSON; "": none; see :attr:`arguments`.
    arguments_text = models.TextField(default="", blank=True, db_column="arguments")
    status = models.CharField(max_length=9, choices=Status.choices, default=Status.WAITING)
    #: Of the message that is to run it: which attempt this is. A resumed one gets another.
    task_id = models.CharField(max_length=36)
    #: Which of the deliveries of that message runs it, or ran it last.
    token = models.CharField(max_length=32, default="", blank=True)
    #: End of its lease.
    ends_at = models.DateTimeField(null=True)
    #: Who runs it, as JSON; see ``encode_holder``.
    holder = models.TextField(default="", blank=True)
    #: When its message was to be there; None: when the stage began.
    due_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    #: How often it was begun, how often its process died, and how often its message was
    #: sent again since nobody had begun it.
    starts = models.PositiveIntegerField(default=0)
    deaths = models.PositiveIntegerField(default=0)
    resent = models.PositiveIntegerField(default=0)
    #: What it returned for the next stages, as JSON; "": nothing; see :attr:`params`.
    params_text = models.TextField(default="", blank=True, db_column="params")
    error_type = models.CharField(max_length=LONGEST_TYPE, default="", blank=True)
    error = models.TextField(default="", blank=True)
    #: What a sweep did to it last, and why.
    note = models.TextField(default="", blank=True)

    objects = StageSteps.as_manager()

    class Meta:
        verbose_name = "step"
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint("run", "stage", "position", name="safe_step_place"),)
        indexes = (
            models.Index(
                "run", "stage", name="safe_step_unfinished", condition=~Q(status="succeeded")
            ),
            models.Index("task_id", name="safe_step_task_id"),
            models.Index("ends_at", name="safe_step_running", condition=Q(status="running")),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the plan's entry."""
        return decode(self.arguments_text) or {}

    @property
    def params(self) -> dict[str, Any]:
        """The params that the step returned for later stages; empty until it has ended."""
        return decode(self.params_text) or {}
