"""The outbox in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.http import HttpRequest

from ..inspection.messages import DISCARD, RETRY, STATES, UNSEEN, MessageRow
from ..models.outbox import OutboxMessage
from .pages import ReadOnlyAdmin, columns


class StateFilter(SimpleListFilter):
    """Narrows the list by what became of the messages."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, state.capitalize()) for state in STATES]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        state = self.value()
        if state is None:
            return queryset
        if state not in STATES:  # a method may also delete
            raise IncorrectLookupParameters
        return getattr(queryset, state)()


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """The messages of the outbox, in every state."""

    kind = MessageRow
    decisions = (RETRY, DISCARD)
    command = "manage.py celery_outbox"
    list_display = (
        "task",
        "task_id",
        "state",
        *columns(MessageRow, "age", "due", age="created_at", due="due_at"),
        "attempts",
        *columns(MessageRow, "short_error"),
    )
    list_filter = (StateFilter,)
    narrowed_by = (StateFilter.parameter_name,)
    search_fields = ("^task", "=task_id")
    search_help_text = "The beginning of a task's name, or a whole task ID."
    ordering = ("pk",)
    fields = readonly_fields = columns(MessageRow, *MessageRow.details, "trace")

    def get_queryset(self, request: HttpRequest) -> Any:
        # Arguments may be large, and no list shows them.
        return super().get_queryset(request).defer(*UNSEEN)
