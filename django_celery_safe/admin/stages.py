"""Runs of stages and their steps in the admin."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html

from ..inspection.runs import ABORT, RESUME, RunRow, StepRow, with_steps
from ..models.stages import StageRun, StageStep
from .pages import ReadOnlyAdmin, columns

#: The columns by which the lists can be ordered, by what they show of them.
ORDERINGS: Final = {"started": "created_at", "ended": "ended_at", "ran": "started_at"}


@admin.register(StageRun)
class StageRunAdmin(ReadOnlyAdmin):
    """How far runs are."""

    kind = RunRow
    decisions = (RESUME, ABORT)
    command = "manage.py celery_stages"
    change_form_template = "admin/django_celery_safe/stagerun/change_form.html"
    list_display = (
        "run",
        "status",
        "progress",
        *columns(RunRow, "stage_shown", "started", "ended", "short_error", **ORDERINGS),
    )
    list_filter = narrowed_by = ("status",)
    ordering = ("-pk",)
    fields = readonly_fields = ("progress", *columns(RunRow, *RunRow.details))

    def get_queryset(self, request: HttpRequest) -> Any:
        return with_steps(super().get_queryset(request))

    def describe_page(self, row: Any) -> dict[str, Any]:
        steps = f"{self.get_url('stagestep_changelist')}?run__exact={row.pk}"
        return {"stages": row.progress_by_stage(), "steps_url": steps}

    @admin.display(description="run", ordering="pk")
    def run(self, row: Any) -> str:
        """The run's primary key."""
        return f"Run {row.pk}"

    @admin.display(description="progress")
    def progress(self, row: Any) -> str:
        """A bar of the steps that succeeded, and its figures."""
        return format_html(
            '<progress max="{}" value="{}" aria-label="{} of {} steps done"></progress> {}/{}',
            row.total or 1,
            row.done if row.total else 1,
            *(row.done, row.total) * 2,
        )


@admin.register(StageStep)
class StageStepAdmin(ReadOnlyAdmin):
    """The steps of runs; a run's page leads to its own."""

    kind = StepRow
    command = "manage.py celery_stages"
    list_display = (
        "task",
        "run_shown",
        *columns(StepRow, "stage", stage="stage"),
        "status",
        *columns(StepRow, "process", "ran", "short_error", **ORDERINGS),
    )
    list_filter = ("status",)
    narrowed_by = ("status", "run")
    search_fields = ("=task_id",)
    search_help_text = "A whole task ID."
    ordering = ("run", "stage", "position")
    fields = readonly_fields = ("run_shown", *columns(StepRow, *StepRow.details))

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).defer("params_text", "arguments_text")

    @admin.display(description="run", ordering="run")
    def run_shown(self, row: Any) -> str:
        """A link to the step's run."""
        url = self.get_url("stagerun_change", row.run_id)
        return format_html('<a href="{}">Run {}</a>', url, row.run_id)
