"""The outbox in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.http import HttpRequest
from django.utils.text import Truncator

from ..management.console import duration
from ..models import OutboxMessage, OutboxMessages
from ..sending.rows import find_arguments
from .pages import LONGEST_ERROR, Decision, ReadOnlyAdmin, Refused, age, visible


def retry(row: OutboxMessage) -> None:
    """Let a message that failed be tried again now."""
    if not _at(row).revive():
        raise Refused(
            f"The message {row} did not fail, or was sent meanwhile: there is nothing to retry."
        )


def discard(row: OutboxMessage) -> None:
    """Delete a message that was not sent."""
    if not _at(row).discard():
        raise Refused(f"The message {row} was sent meanwhile.")


def _at(row: OutboxMessage) -> OutboxMessages:
    return OutboxMessage.objects.using(row._state.db).filter(pk=row.pk)


RETRY = Decision(
    name="retry",
    label="Retry",
    consequence="These messages are due at once, and are tried as often as new ones. A relay "
    "sends them; without one they stay here.",
    done="was made due",
    act=retry,
    fits=lambda row: row.sent_at is None and row.attempts > 0,
)
DISCARD = Decision(
    name="discard",
    label="Discard",
    consequence="These messages are deleted, and their tasks never run. This can't be undone.",
    done="was discarded",
    act=discard,
    fits=lambda row: row.sent_at is None,
    deletes=True,
)


class StateFilter(SimpleListFilter):
    """Narrows the list by what became of the messages."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("pending", "Pending"), ("dead", "Dead"), ("sent", "Sent")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        # By name, and not by what the request calls: a method may also delete.
        states = {"pending": queryset.pending, "dead": queryset.dead, "sent": queryset.sent}
        state = self.value()
        if state is None:
            return queryset
        if state not in states:
            raise IncorrectLookupParameters
        return states[state]()


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """What waits to be sent, could not be sent, or was."""

    decisions = (RETRY, DISCARD)
    command = "manage.py celery_outbox"
    list_display = ("task", "task_id", "state", "waits", "due", "attempts", "short_error")
    list_filter = (StateFilter,)
    narrowed_by = (StateFilter.parameter_name,)
    search_fields = ("^task", "=task_id")
    search_help_text = "The beginning of a task's name, or a whole task ID."
    ordering = ("pk",)
    fields = readonly_fields = (
        "task",
        "task_id",
        "state",
        "error",
        "attempts",
        "due_at",
        "created_at",
        "dead_at",
        "sent_at",
        "arguments",
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        # Arguments may be large, and no list shows them.
        return super().get_queryset(request).defer("body", "properties", "chord_calls")

    def describe(self, row: Any) -> str:
        told = f"{row.state}, {age(row, row.created_at)} old"
        return f"{told}: {row.error}" if row.error else told

    @admin.display(description="age", ordering="created_at")
    def waits(self, row: Any) -> str:
        """How long ago it was written."""
        return age(row, row.created_at)

    @admin.display(description="due", ordering="due_at")
    def due(self, row: Any) -> str:
        """When a relay may send it."""
        if row.due_at is None:
            return "-"
        left = (row.due_at - row.asked_at).total_seconds()
        return f"in {duration(left)}" if left > 0 else "now"

    @admin.display(description="error")
    def short_error(self, row: Any) -> str:
        """The beginning of what was wrong the last time."""
        return Truncator(row.error).chars(LONGEST_ERROR)

    @admin.display(description="arguments")
    def arguments(self, row: Any) -> str:
        """The arguments as Celery shows them; nothing without ``SHOW_ARGUMENTS``."""
        return visible(find_arguments(row))
