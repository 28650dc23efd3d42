"""Records of work that is done once, in the admin."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..inspection.records import FORGET, RecordRow
from ..models.idempotency import IdempotencyRecord
from .pages import LEVELS, ReadOnlyAdmin, badge, columns

#: The columns by which the list can be ordered, by their names in the list.
ORDERINGS: Final = {"key": "key", "claimed": "claimed_at"}
NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    """The records of work that is done, failed or running, by key."""

    kind = RecordRow
    decisions = (FORGET,)
    command = "manage.py celery_idempotency"
    help_text = _(
        "Work under a key of idempotent: finished work is not done again until its record expires."
    )
    empty_text = _("No record is here. Each piece of work that idempotent guards will have one.")
    search_help_text = _("The beginning of a key, or part of it; a task's name or id.")
    list_display = (
        *columns(RecordRow, "key", **ORDERINGS),
        "state_shown",
        *columns(RecordRow, "task", "claimed", **ORDERINGS),
        "claims",
        *columns(RecordRow, "expires_at", expires_at="expires_at"),
    )
    list_filter = narrowed_by = ("state",)
    search_fields = ("^key", "holder")
    ordering = ("-claimed_at",)
    fields = readonly_fields = columns(RecordRow, "key", *RecordRow.details)

    @admin.display(description=pgettext_lazy("heading", "state"), ordering="state")
    def state_shown(self, row: Any) -> SafeString:
        """The state as a coloured word, which also says if the record's process has died."""
        described = RecordRow(row)
        level = "look" if described.remaining_s == 0 else LEVELS.get(row.state, "quiet")
        return badge(level, described.text("shown_state"))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        # A key with such characters is hashed, and stands in ``holder`` as JSON.
        term = NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], search_term)
        return super().get_search_results(request, queryset, term)

    def version_of(self, row: Any) -> str:
        # The decision is not meant for a later claim of the same key.
        return str(row.token)
