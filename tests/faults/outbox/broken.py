"""
Relays and a retry with one deliberate fault each.

The relays are put in the place of the right one in the process that relays.
"""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask
from django_celery_safe.models import OutboxMessage
from django_celery_safe.models.outbox import OutboxMessages
from django_celery_safe.sending import relay
from django_celery_safe.sending.task import SafeTaskMixin
from tests.faults.outbox.work import RETRIED, greet


class CursorRelay(relay.Relay):
    """Remembers the last id that it sent, in a file, and looks only at higher ones."""

    cursor: Path

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows = OutboxMessagesByCursor(OutboxMessage, using=self.using)

    def _settle(self) -> None:
        if sent := [pk for pk, then in self._next.items() if then.how == "keep_sent"]:
            note = self.cursor.with_name(f"cursor-{os.getpid()}")
            note.write_text(str(max(sent)))
            note.replace(self.cursor)
        super()._settle()


class OutboxMessagesByCursor(OutboxMessages):
    """Forgets rows that are committed, or given back, after higher ids were sent."""

    def claim(
        self, limit: int, lease: timedelta, token: str, *, since: datetime | None = None
    ) -> list[OutboxMessage]:
        """Claim rows that are due, as far as they come after the last."""
        path = CursorRelay.cursor
        last = int(path.read_text()) if path.exists() else 0
        return OutboxMessages.claim(self.filter(pk__gt=last), limit, lease, token, since=since)


class DeletingRelay(relay.Relay):
    """Deletes what it will send before it sends it."""

    def _publish(self, app: Any, claimed: list[relay.ClaimedMessage], stop_at: float) -> None:
        self._rows.filter(pk__in=[one.row.pk for one in claimed]).erase()
        super()._publish(app, claimed, stop_at)


class DeferringTask(SafeTask):
    """Holds its retries back until the transaction commits, as any other send."""

    abstract = True

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry as Celery's task does, through our ``apply_async``."""
        return super(SafeTaskMixin, self).retry(*args, **kwargs)


@shared_task(base=DeferringTask, **RETRIED)
def welcome_at_last(self: Any, name: str) -> None:
    """Welcome somebody, once, at the second try."""
    greet(self, name, retries=1)


def break_relay(fault: str, folder: Path) -> None:
    """Let this process relay with a fault, if that is one of relays."""
    CursorRelay.cursor = folder / "cursor"
    broken: dict[Any, Callable[..., Any]] = {"last-id": CursorRelay, "delete-first": DeletingRelay}
    if fault in broken:
        from django_celery_safe.management.commands import celery_outbox

        celery_outbox.Relay = broken[fault]  # type: ignore[assignment,attr-defined]
