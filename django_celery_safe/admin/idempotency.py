"""Records of work that is done once, in the admin."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin

from ..inspection.records import FORGET, RecordRow
from ..models.idempotency import IdempotencyRecord
from .pages import ReadOnlyAdmin, columns

#: The columns by which the list can be ordered, by what it shows of them.
ORDERINGS: Final = {"key": "key", "shown_state": "state", "claimed": "claimed_at"}


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    """The records of work that is done, failed or running, by key."""

    kind = RecordRow
    decisions = (FORGET,)
    command = "manage.py celery_idempotency"
    list_display = (
        *columns(RecordRow, "key", "shown_state", "task", "claimed", **ORDERINGS),
        "claims",
        "expires_at",
    )
    list_filter = narrowed_by = ("state",)
    search_fields = ("^key", "holder")
    search_help_text = "The beginning of a key, or part of it; a task's name or id."
    ordering = ("-claimed_at",)
    fields = readonly_fields = columns(RecordRow, "key", *RecordRow.details)

    def version_of(self, row: Any) -> str:
        # A claim of the same key that came after is not what was asked about.
        return str(row.token)
