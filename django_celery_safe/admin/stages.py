"""Runs of stages and their steps in the admin."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..inspection.runs import (
    ABORT,
    LONGEST_DATA,
    RESUME,
    URGENCY,
    RunRow,
    StepRow,
    with_since,
    with_steps,
)
from ..models.stages import StageRun, StageStep
from ..models.step_states import IN_ORDER
from ..texts import printable
from .pages import LEVELS, ReadOnlyAdmin, badge, columns

#: The columns by which the lists can be ordered, by their names in the lists.
ORDERINGS: Final = {"started": "created_at", "stage": "stage"}
#: Columns that no list of steps shows.
UNSEEN: Final = ("params_text", "traceback", "run__params_text")
#: Steps that a run's own page shows.
MOST_STEPS: Final = 50


class StagesAdmin(ReadOnlyAdmin):
    """Shared parts of the pages of runs and steps."""

    command = "manage.py celery_stages"

    @admin.display(description=_("status"), ordering="status")
    def status_shown(self, row: Any) -> SafeString:
        """The status as a coloured word."""
        return badge(LEVELS.get(row.status, "quiet"), row.get_status_display())


@admin.register(StageRun)
class StageRunAdmin(StagesAdmin):
    """The runs of stages and their progress."""

    kind = RunRow
    decisions = (RESUME, ABORT)
    change_form_template = "admin/django_celery_safe/stagerun/change_form.html"
    help_text = _(
        "Each stage begins when all steps of the stage before it have succeeded. A run that failed "
        "waits until you resume it, and is deleted later."
    )
    empty_text = _(
        "No run is here. Each stages.start() makes one, and it is deleted RETENTION after its end."
    )
    search_help_text = _("A part of a name or key.")
    list_display = (
        "run",
        "status_shown",
        "progress",
        *columns(RunRow, "stage_shown", "started", "took", "short_error", **ORDERINGS),
    )
    list_filter = narrowed_by = ("status",)
    search_fields = ("name", "key")
    ordering = ("-pk",)
    readonly_fields = ("progress", "about", *columns(RunRow, "key", *RunRow.details))
    fieldsets = (
        (None, {"fields": readonly_fields[:-1]}),
        (_("Params"), {"fields": readonly_fields[-1:], "classes": ("collapse",)}),
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        return with_steps(super().get_queryset(request))

    def describe_page(self, row: Any) -> dict[str, Any]:
        steps = with_since(row.steps).order_by(URGENCY, *IN_ORDER).defer("params_text", "traceback")
        return {
            "subtitle": _title(row),  # Django would use the English str()
            "stages": row.progress_by_stage(),
            "steps": [_shown(StepRow(step)) for step in steps[:MOST_STEPS]],
            "steps_left": max(0, row.total - MOST_STEPS),
            "steps_url": f"{self.get_url('stagestep_changelist')}?run__exact={row.pk}",
        }

    @admin.display(description=_("run"), ordering="pk")
    def run(self, row: Any) -> str:
        """The run's number, with its name, or its key if it has no name."""
        return _title(row)

    @admin.display(description=_("about"))
    def about(self, row: Any) -> str:
        """A link to the object that the run is about."""
        return format_html('<a href="{0}">{0}</a>', row.url) if row.url else "-"

    @admin.display(description=_("progress"))
    def progress(self, row: Any) -> str:
        """A bar of the steps that succeeded, and its figures."""
        return format_html(
            '<progress max="{}" value="{}" aria-label="{}"></progress> {}/{}',
            row.total or 1,
            row.done if row.total else 1,
            gettext("%(done)s of %(total)s steps done") % {"done": row.done, "total": row.total},
            row.done,
            row.total,
        )


def _title(run: Any) -> str:
    """Return a run's number, with its name, or its key if it has no name."""
    number, label = gettext("Run {number}").format(number=run.pk), run.name or run.key
    return f"{number} ({printable(label)})" if label else number


def _shown(step: StepRow) -> dict[str, Any]:
    """Return a step as its run's page shows it."""
    names = ("task", "status", "stage", "waiting_since", "took", "error", "data")
    level = LEVELS.get(step.status, "quiet")
    return {"pk": step.pk, "level": level, **{name: step.text(name) for name in names}}


@admin.register(StageStep)
class StageStepAdmin(StagesAdmin):
    """The steps of runs; a run's page links to its steps."""

    kind = StepRow
    help_text = _("The tasks of runs. A step that fails stops the steps that have not begun.")
    empty_text = _("No step is here. Each run of stages has some.")
    search_help_text = _("A whole task ID, or a part of a task's or run's name, or of a run's key.")
    list_display = (
        "task_shown",
        "run_shown",
        *columns(StepRow, "stage", **ORDERINGS),
        "status_shown",
        *columns(StepRow, "process", "took", "short_error"),
    )
    list_filter = ("status",)
    narrowed_by = ("status", "run", "task")
    search_fields = ("=task_id", "task", "run__name", "run__key")
    ordering = ("run", *IN_ORDER)
    fields = readonly_fields = ("run_shown", *columns(StepRow, *StepRow.details), "trace")

    def get_queryset(self, request: HttpRequest) -> Any:
        steps = with_since(super().get_queryset(request))
        return steps.select_related("run").defer(*UNSEEN)

    @admin.display(description=_("task"), ordering="task")
    def task_shown(self, row: Any) -> str:
        """The step's task, with the arguments that distinguish it from other steps of the task."""
        data = Truncator(printable(StepRow(row).data)).chars(LONGEST_DATA)
        shown = format_html("<br><code>{}</code>", data) if data else ""
        return format_html("{}{}", printable(row.task), shown)

    @admin.display(description=_("run"), ordering="run")
    def run_shown(self, row: Any) -> str:
        """A link to the step's run."""
        url = self.get_url("stagerun_change", row.run_id)
        return format_html('<a href="{}">{}</a>', url, _title(row.run))

    @admin.display(description=_("traceback"))
    def trace(self, row: Any) -> str:
        """The end of the traceback of its error."""
        lines = format_html_join("\n", "{}", ([line] for line in StepRow(row).trace))
        return format_html('<pre class="safe-trace">{}</pre>', lines) if lines else "-"
