"""The admin's pages of messages, records, runs and steps."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from ..models.idempotency import IdempotencyRecord
from ..models.outbox import OutboxMessage
from ..models.stages import StageRun, StageStep
from .pages import ReadOnlyAdmin, columns, permission, row_action


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """The messages of the outbox and their states."""

    search_help_text = _("The beginning of a task's name, or a whole task ID.")
    list_display = ("task", *columns(OutboxMessage, "state age_s reason"))
    list_filter = ("state",)
    search_fields = ("^task", "=task_id")
    ordering = ("pk",)
    fields = readonly_fields = (
        *columns(OutboxMessage, "task task_id state attempts starts deaths resent created_at"),
        *columns(OutboxMessage, "due_at sent_at started_at ended_at checkpoint_at"),
        *columns(OutboxMessage, "progress process arguments", longest=None),
        *("error_type", "error", "traceback"),
    )
    actions = ("retry", "discard")
    has_retry_permission = permission("retry")
    has_discard_permission = permission("discard")

    @row_action(
        pgettext_lazy("action", "Retry"),
        _("Made due"),
        refused=_("it did not fail, or was sent meanwhile: there is nothing to retry"),
    )
    def retry(self, row: Any) -> int:
        """Make a message due at once, with as many attempts as a new one."""
        return OutboxMessage.objects.using(row._state.db).filter(pk=row.pk).revive()

    @row_action(
        pgettext_lazy("action", "Discard"),
        _("Discarded"),
        refused=_("it was sent meanwhile, or runs now"),
        ask=_("These messages are deleted, and their tasks never run. This can't be undone."),
    )
    def discard(self, row: Any) -> int:
        """Delete a message, so that its task never runs."""
        return OutboxMessage.objects.using(row._state.db).filter(pk=row.pk).discard()


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    """The records of work that is done, failed or running, by key."""

    search_help_text = _("A part of a key; a task's name or id.")
    list_display = columns(IdempotencyRecord, "claim.name state claim.holder.task age_s expires_at")
    list_filter = ("state",)
    search_fields = ("holder",)
    ordering = ("-claimed_at",)
    fields = readonly_fields = (
        *list_display,
        *columns(IdempotencyRecord, "claim.holder.task_id claim.holder.process claim.remaining"),
        *columns(IdempotencyRecord, "claimed_at ended_at"),
        *("claims", "result", "error"),
    )
    actions = ("forget",)
    has_forget_permission = permission("forget")

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        # The key, the task and its id stand in ``holder`` as JSON.
        return super().get_search_results(request, queryset, json.dumps(search_term)[1:-1])

    @row_action(
        pgettext_lazy("action", "Forget"),
        _("Forgotten"),
        refused=_("it is gone, or is being worked on: wait until that ends"),
        ask=_("The work of these records is done again when it is asked for the next time."),
    )
    def forget(self, row: Any) -> int:
        """Delete a record, so that its work is done again; not while it is being done."""
        records = IdempotencyRecord.objects.using(row._state.db)
        return records.filter(pk=row.pk, token=row.token).idle().forget()


@admin.register(StageRun)
class StageRunAdmin(ReadOnlyAdmin):
    """The runs of stages and their progress."""

    change_form_template = "admin/django_celery_safe/stagerun/change_form.html"
    search_help_text = _("A part of a name or key.")
    list_display = ("__str__", "progress", *columns(StageRun, "status age_s duration_s reason"))
    list_filter = ("status",)
    search_fields = ("name", "key")
    ordering = ("-pk",)
    fields = readonly_fields = (
        *("progress", "steps", "key", "about"),
        *columns(StageRun, "status created_at ended_at duration_s"),
        *columns(StageRun, "reason shown_params", longest=None),
    )
    actions = ("resume", "abort")
    has_resume_permission = permission("resume")
    has_abort_permission = permission("abort")

    @admin.display(description=_("about"))
    def about(self, row: Any) -> str:
        """A link to the object that the run is about."""
        return format_html('<a href="{0}">{0}</a>', row.url) if row.url else "-"

    @admin.display(description=_("progress"))
    def progress(self, row: Any) -> str:
        """A bar of the steps that succeeded, and its figures."""
        bar = '<progress max="{1}" value="{0}" aria-label="{2}"></progress> {0}/{1}'
        return format_html(bar, row.done, row.total, gettext("progress"))

    @admin.display(description=_("steps"))
    def steps(self, row: Any) -> str:
        """A link to the run's steps."""
        link = '<a href="../../../stagestep/?run__exact={}">{}</a>'
        return format_html(link, row.pk, row.total)

    @row_action(pgettext_lazy("action", "Resume"), _("Resumed"))
    def resume(self, row: Any) -> Any:
        """Run the steps that failed or did not begin."""
        return row.resume()

    @row_action(
        pgettext_lazy("action", "Abort"),
        _("Aborted"),
        ask=_("Steps that did not begin are stopped. Steps that run now end as they will."),
    )
    def abort(self, row: Any) -> Any:
        """Stop the steps that did not begin."""
        return row.abort()


@admin.register(StageStep)
class StageStepAdmin(ReadOnlyAdmin):
    """The steps of runs; a run's page links to its steps."""

    search_help_text = _("A whole task ID, or a part of a task's or run's name, or of a run's key.")
    list_display = ("task", "run", "stage", *columns(StageStep, "status reason shown_arguments"))
    list_select_related = ("run",)
    list_filter = ("status",)
    search_fields = ("=task_id", "task", "run__name", "run__key")
    ordering = ("-run", "stage", "position")
    fields = readonly_fields = (
        *("run", "stage", "task", "task_id", "priority"),
        *columns(StageStep, "status starts deaths resent process duration_s waits_s started_at"),
        *columns(StageStep, "ended_at shown_arguments shown_params", longest=None),
        *("error_type", "error", "traceback"),
    )
