"""
A relay's housekeeping: its heartbeat, and deleting old rows, also those of other rooms.

Rows are deleted in batches, so that no transaction and no lock is long. A turn deletes a limited
number of them, and the next one goes on. If that fails, the error is logged, and neither the others
nor the outbox stop. Any number of relays may delete at the same time: each skips the rows that
another has locked.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any, Final

from celery.exceptions import SoftTimeLimitExceeded
from django.apps import apps
from django.db import connections, transaction

from ..databases import Now
from ..leases.holder import HOST
from ..texts import describe_error, get_logger
from ..transactions import Attempts, lacks_table
from .outbox import message_table

logger = get_logger(__name__)

#: Time between two turns of a relay, s, and the time if a turn left rows to delete.
MINUTE: Final = 60.0
AGAIN: Final = 5.0
#: Most rows that one transaction deletes. SQLite before 3.32 accepts 999 values in a statement.
BATCH: Final = 500
#: The rows that a relay deletes by their age, in the order of the chores: their plural name; their
#: model, whose ``prunable()`` returns querysets of those that may be deleted now, each in the order
#: of an index, and other models whose tables that needs, as a failure in a database that lacks one
#: is not logged; and how many rows of each queryset a turn deletes at most, and a transaction. A
#: run is deleted with its steps.
PRUNINGS: Final = (
    ("messages", ("OutboxMessage",), 10_000, BATCH),
    ("runs of stages", ("StageRun", "StageStep", "OutboxMessage"), 100, 1),
    ("records", ("IdempotencyRecord",), 10_000, BATCH),
)


class Housekeeping:
    """
    The turns of one relay.

    Args:
        using: Alias of the database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._next_at = 0.0

    def take_turn_if_due(self) -> None:
        """
        Write the heartbeat and delete old rows, unless the last turn was a moment ago.

        Raises:
            django.db.Error: The heartbeat could not be written.
        """
        if time.monotonic() < self._next_at:
            return
        self._beat()
        self._next_at = time.monotonic() + MINUTE
        if True in [self._prune(*pruning) for pruning in PRUNINGS]:
            self._next_at = time.monotonic() + AGAIN

    def _beat(self) -> None:
        from ..models.outbox import OutboxRelay  # needs the app registry

        relays = OutboxRelay.objects.using(self._using)
        seen = {"host": HOST, "pid": os.getpid(), "seen_at": Now()}
        if not relays.filter(pk=1).update(**seen):
            relays.bulk_create([OutboxRelay(pk=1, **seen)], ignore_conflicts=True)
        message_table(self._using).all().recall()

    def _prune(self, kind: str, models: tuple[str, ...], *limits: int) -> bool:
        """Delete some old rows, as ``PRUNINGS`` says; return whether there may be more."""
        model: Any = apps.get_model("django_celery_safe", models[0])
        try:
            found = model.objects.using(self._using).prunable()
            return True in [prune_some(rows, *limits) for rows in found]
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - it must not stop the outbox
            if not lacks_table(self._using, *models):
                text = "The old %s in %r could not be deleted: %s"
                logger.error(text, kind, self._using, describe_error(error))
            return False


def prune_some(rows: Any, most: int, batch: int = BATCH) -> bool:
    """
    Delete the first of these rows in their order, which an index has to support.

    Args:
        rows: A queryset that has ``erase()``.
        most: The maximum number of rows to delete.
        batch: The maximum number of rows that a transaction deletes.

    Returns:
        Whether there may be more rows.
    """
    return all(_erase_batch(rows, batch) == batch for _ in range(most // batch))


def _erase_batch(rows: Any, limit: int) -> int:
    """Delete the first rows; return how many were found."""
    found: list[Any] = []
    # Elsewhere a write locks the whole database, so the search for the rows holds no lock.
    skips = connections[rows.db].features.has_select_for_update_skip_locked
    for attempt in Attempts(rows.db, "A deletion of old rows"):
        with attempt, transaction.atomic(using=rows.db) if skips else nullcontext():
            chosen = rows.select_for_update(skip_locked=True) if skips else rows
            found = list(chosen.values_list("pk", flat=True)[:limit])
            attempt.is_won = True
            if found:
                # Filter again under the locks, because a subquery's answer may have changed.
                rows.filter(pk__in=found).erase()
    return len(found)
