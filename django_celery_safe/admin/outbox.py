"""The outbox in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..inspection.messages import DISCARD, RETRY, STATES, UNSEEN, MessageRow
from ..inspection.overview import find_relay
from ..inspection.words import translate_state
from ..models.outbox import OutboxMessage
from .overview import relay_card
from .pages import LEVELS, ReadOnlyAdmin, badge, columns


class StateFilter(SimpleListFilter):
    """Filters the list by the state of the messages."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, capfirst(translate_state(state))) for state in STATES]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        state = self.value()
        if state is None:
            return queryset
        if state not in STATES:  # other methods may delete rows
            raise IncorrectLookupParameters
        return getattr(queryset, state)()


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """The messages of the outbox, in every state."""

    kind = MessageRow
    decisions = (RETRY, DISCARD)
    command = "manage.py celery_outbox"
    help_text = _(
        "Messages that were sent through the outbox. A relay sends pending messages; failed and "
        "dead ones wait for you."
    )
    empty_text = _(
        "No message is here. Messages that wait, failed or are carried until done will be here. A "
        "message that a broker has is deleted, unless RETENTION keeps it."
    )
    search_help_text = _("The beginning of a task's name, or a whole task ID.")
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
    ordering = ("pk",)
    fields = readonly_fields = columns(MessageRow, *MessageRow.details, "trace")

    @admin.display(description=pgettext_lazy("heading", "state"))
    def state(self, row: Any) -> SafeString:
        """The state as a coloured word."""
        return badge(LEVELS.get(row.state, "quiet"), translate_state(row.state))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list below a line that says whether a relay is running."""
        context = dict(extra_context or {})
        if request.method == "GET" and self.has_view_permission(request):
            messages = OutboxMessage.objects.using(router.db_for_write(OutboxMessage))
            is_needed = messages.due().exists()
            context["card"] = relay_card(find_relay(messages.db), "", is_needed=is_needed)
        return super().changelist_view(request, context)

    def get_queryset(self, request: HttpRequest) -> Any:
        # Arguments may be large, and no list shows them.
        return super().get_queryset(request).defer(*UNSEEN)
