"""Records of work that is done once, in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from ..idempotency.records import read_claim, record_store
from ..management.console import duration
from ..models import IdempotencyRecord, IdempotencyRecords
from ..texts import printable
from .pages import Decision, ReadOnlyAdmin, Refused, age, visible


def forget(row: IdempotencyRecord) -> None:
    """Delete a record that nobody works on now."""
    if _at(row).busy().exists():
        raise Refused(
            f"The record {row} is being worked on: forgotten now, what it stands for would be "
            f"done twice. Wait until that ends; or choose it again, and tick the box on the page "
            f"that asks."
        )
    if not _at(row).idle().forget():
        raise Refused(f"The record {row} is gone, or was claimed just now.")


def forget_busy(row: IdempotencyRecord) -> None:
    """Delete a record, whoever works on it."""
    if not _at(row).forget():
        raise Refused(f"The record {row} is gone.")


def _at(row: IdempotencyRecord) -> IdempotencyRecords:
    return record_store(str(row._state.db)).all().filter(pk=row.pk)


FORGET = Decision(
    name="forget",
    label="Forget",
    consequence="What these records stand for will be done again when it is asked for the next "
    "time.",
    done="was forgotten",
    act=forget,
    force="Also what is being done now: then it may be done twice.",
    forced=forget_busy,
    deletes=True,
)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    """What is done, or being done, under which key."""

    decisions = (FORGET,)
    command = "manage.py celery_idempotency"
    list_display = ("whole_key", "shown_state", "holder_task", "claimed", "claims", "expires_at")
    list_filter = narrowed_by = ("state",)
    search_fields = ("^key", "holder")
    search_help_text = "The beginning of a key, or part of it; a task's name or id."
    ordering = ("-claimed_at",)
    fields = readonly_fields = (
        "whole_key",
        "shown_state",
        "process",
        "claimed_at",
        "lease_left",
        "holder_task",
        "task_id",
        "claims",
        "ended_at",
        "expires_at",
        "error",
        "result",
    )

    def describe(self, row: Any) -> str:
        told = [self.shown_state(row)]
        if (key := self.whole_key(row)) != row.key:
            told.insert(0, key)
        if row.state == row.State.RUNNING:
            told.append(self.process(row))
        return ", ".join(told)

    @admin.display(description="key", ordering="key")
    def whole_key(self, row: Any) -> str:
        """The key, also where it is hashed in the table."""
        return printable(read_claim(row).name)

    @admin.display(description="state", ordering="state")
    def shown_state(self, row: Any) -> str:
        """The state; of one that runs, whether its process is gone."""
        gone = row.state == row.State.RUNNING and not read_claim(row).remaining
        return f"{row.state}, its process is gone" if gone else str(row.state)

    @admin.display(description="task")
    def holder_task(self, row: Any) -> str:
        """The task that claimed it last."""
        return visible(read_claim(row).holder.task)

    @admin.display(description="task ID")
    def task_id(self, row: Any) -> str:
        """Its id."""
        return visible(read_claim(row).holder.task_id)

    @admin.display(description="process")
    def process(self, row: Any) -> str:
        """The process that claimed it last."""
        holder = read_claim(row).holder
        return f"pid {holder.pid} on {printable(holder.host)}" if holder.host else "not known"

    @admin.display(description="claimed", ordering="claimed_at")
    def claimed(self, row: Any) -> str:
        """How long ago that was."""
        return f"{age(row, row.claimed_at)} ago"

    @admin.display(description="lease left")
    def lease_left(self, row: Any) -> str:
        """How long its process may stay silent."""
        if row.state != row.State.RUNNING:
            return "-"
        return duration(read_claim(row).remaining or 0.0)
