"""Runs of stages and their steps in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, Subquery
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.text import Truncator

from .. import conf
from ..locks.stores.rows import read_holder
from ..management.console import duration
from ..models import StageRun, StageStep
from ..stages import Progress, Status
from ..stages.engine import Fault
from ..texts import printable
from .pages import LONGEST_ERROR, Decision, ReadOnlyAdmin, age

RESUME = Decision(
    name="resume",
    label="Resume",
    consequence="What failed and what was not begun runs again. What succeeded does not, and what "
    "it returned stays.",
    done="was resumed",
    act=StageRun.resume,
    fits=lambda run: run.status in (Status.FAILED, Status.ABORTED),
)
ABORT = Decision(
    name="abort",
    label="Abort",
    consequence="What has not begun is stopped. Steps that run now end as they will.",
    done="was aborted",
    act=StageRun.abort,
    fits=lambda run: run.status not in Status.STOPPED,
)


@admin.register(StageRun)
class StageRunAdmin(ReadOnlyAdmin):
    """How far runs are."""

    decisions = (RESUME, ABORT)
    command = "manage.py celery_stages"
    change_form_template = "admin/django_celery_safe/stagerun/change_form.html"
    list_display = ("run", "status", "progress", "stage_shown", "started", "ended", "short_error")
    list_filter = narrowed_by = ("status",)
    ordering = ("-pk",)
    fields = readonly_fields = (
        "status",
        "progress",
        "fault",
        "created_at",
        "ended_at",
        "note",
        "shown_params",
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        rows: Any = super().get_queryset(request)
        failed = StageStep.objects.filter(run=OuterRef("pk"), status=Status.FAILED)
        first = failed.order_by("ended_at", "position")
        return rows.counted().annotate(
            step_error_type=Subquery(first.values("error_type")[:1]),
            step_error=Subquery(first.values("error")[:1]),
        )

    def describe_page(self, row: Any) -> dict[str, Any]:
        steps = f"{self.find_url('stagestep_changelist')}?run__exact={row.pk}"
        return {"stages": row.progress_by_stage(), "steps_url": steps}

    def describe(self, row: Any) -> str:
        progress = _progress(row)
        return f"{row.status}, {progress.done} of {progress.total} steps done"

    @admin.display(description="run", ordering="pk")
    def run(self, row: Any) -> str:
        """Its number."""
        return f"Run {row.pk}"

    @admin.display(description="progress")
    def progress(self, row: Any) -> str:
        """A bar of the steps that succeeded."""
        return bar(row.done, row.total)

    @admin.display(description="stage")
    def stage_shown(self, row: Any) -> str:
        """Which stage runs, or ran last."""
        return f"{row.stage + 1} of {row.stages}"

    @admin.display(description="started", ordering="created_at")
    def started(self, row: Any) -> str:
        """How long ago."""
        return f"{age(row, row.created_at)} ago"

    @admin.display(description="ended", ordering="ended_at")
    def ended(self, row: Any) -> str:
        """How long ago."""
        return f"{age(row, row.ended_at)} ago" if row.ended_at else "-"

    @admin.display(description="error")
    def fault(self, row: Any) -> str:
        """Which step failed first, and why."""
        step = row.error_step if row.status == Status.FAILED else None
        if step is None:
            return row.error or "-"
        return f"{step} failed: {Fault(step.error_type, step.error)}"

    @admin.display(description="error")
    def short_error(self, row: Any) -> str:
        """The beginning of it."""
        failed = row.status == Status.FAILED and row.step_error_type
        text = str(Fault(row.step_error_type, row.step_error)) if failed else row.error or "-"
        return Truncator(text).chars(LONGEST_ERROR)

    @admin.display(description="params")
    def shown_params(self, row: Any) -> str:
        """What was given and returned so far; nothing without ``SHOW_ARGUMENTS``."""
        return _data(row.params_text)


@admin.register(StageStep)
class StageStepAdmin(ReadOnlyAdmin):
    """The steps of runs; a run's page leads to its own."""

    command = "manage.py celery_stages"
    list_display = ("task", "run_shown", "stage_shown", "status", "process", "ran", "short_error")
    list_filter = ("status",)
    narrowed_by = ("status", "run")
    search_fields = ("=task_id",)
    search_help_text = "A whole task ID."
    ordering = ("run", "stage", "position")
    fields = readonly_fields = (
        "run_shown",
        "stage_shown",
        "task",
        "status",
        "process",
        "lease_left",
        "fault",
        "started_at",
        "ended_at",
        "starts",
        "deaths",
        "resent",
        "note",
        "task_id",
        "priority",
        "shown_arguments",
        "shown_params",
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).defer("params_text", "arguments_text")

    @admin.display(description="run", ordering="run")
    def run_shown(self, row: Any) -> str:
        """Its run, as a link."""
        url = self.find_url("stagerun_change", row.run_id)
        return format_html('<a href="{}">Run {}</a>', url, row.run_id)

    @admin.display(description="stage", ordering="stage")
    def stage_shown(self, row: Any) -> int:
        """Which stage, from 1 on."""
        return int(row.stage) + 1

    @admin.display(description="process")
    def process(self, row: Any) -> str:
        """Who runs it, or ran it last."""
        if not row.ends_at:
            return "-"
        held = read_holder("", row)
        holder = held.holder
        told = f"pid {holder.pid} on {printable(holder.host)}" if holder.host else "not known"
        return f"{told}, gone" if row.status == Status.RUNNING and not held.remaining else told

    @admin.display(description="lease left")
    def lease_left(self, row: Any) -> str:
        """How long its process may stay silent."""
        if row.status != Status.RUNNING or not row.ends_at:
            return "-"
        return duration(read_holder("", row).remaining or 0.0)

    @admin.display(description="ran", ordering="started_at")
    def ran(self, row: Any) -> str:
        """When it was begun."""
        return f"{age(row, row.started_at)} ago" if row.started_at else "-"

    @admin.display(description="error")
    def fault(self, row: Any) -> str:
        """Why it failed, or what went wrong before."""
        return str(Fault(row.error_type, row.error)) if row.error_type or row.error else "-"

    @admin.display(description="error")
    def short_error(self, row: Any) -> str:
        """The beginning of it."""
        return Truncator(self.fault(row)).chars(LONGEST_ERROR)

    @admin.display(description="arguments")
    def shown_arguments(self, row: Any) -> str:
        """Its own arguments; nothing without ``SHOW_ARGUMENTS``."""
        return _data(row.arguments_text)

    @admin.display(description="returned")
    def shown_params(self, row: Any) -> str:
        """What it gave the next stages; nothing without ``SHOW_ARGUMENTS``."""
        return _data(row.params_text)


def bar(done: int, total: int) -> str:
    """Return a bar and its figures."""
    return format_html(
        '<progress max="{}" value="{}" aria-label="{} of {} steps done"></progress> {}/{}',
        total or 1,
        done if total else 1,
        done,
        total,
        done,
        total,
    )


def _data(text: str) -> str:
    return text if text and conf.get("SHOW_ARGUMENTS") else "-"


def _progress(row: Any) -> Progress:
    return Progress(row.done, row.total, row.stage + 1, row.stages)
