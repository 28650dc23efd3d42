"""How a carried task goes on by other messages, whose rows are written before they leave."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from .capture import Captured
from .commit import Held
from .departure import Departure
from .outbox import OutboxBatch, attempt_of, keep, keeps_sent, rewrite


def publish_again(using: str, row: Any, token: str, task_id: str, captured: Captured) -> bool:
    """
    Let a carried task go on by other messages: that of a retry, or of what replaces it.

    A message of the same id is written into its row, any other gets a row of its own. Without
    one of the same id its row ends.

    Args:
        row: The row of the task.
        token: The claim of the run.

    Returns:
        Whether the claim still held the row.
    """
    own = [one for one in captured.messages if one.task_id == task_id][:1]
    others = [one for one in captured.messages if one not in own]
    with transaction.atomic(using=using):
        departure = Departure.join(using)
        kept = rewrite(own[0], departure, row.filter(token=token)) if own else None
        if kept is None and (own or not row.end_or_erase(token, keep=keeps_sent())):
            # The answer to the commit before may have got lost.
            names = list(filter(None, map(attempt_of, captured.messages)))
            return bool(row.model.objects.using(using).filter(attempt__in=names).exists())
        if kept is not None:
            _publish_on_commit(departure, Captured(own), kept)
        if others:
            rest = Captured(others, captured.chord_calls)
            _publish_on_commit(departure, rest, keep(rest, departure))
    return True


def _publish_on_commit(departure: Departure, captured: Captured, kept: OutboxBatch) -> None:
    held = Held(departure, captured.messages[0].app, captured, None, None, kept, goes_on=True)
    transaction.on_commit(held, using=departure.using)
