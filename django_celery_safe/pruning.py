"""
Deletion of old rows, in batches, so that no transaction and no lock is long.

Messages, records and runs of stages are all deleted here, from querysets that have ``erase()``.
Any number of processes may prune at the same time: each skips the rows that another process
has locked.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import connections, transaction

from .transactions import Attempts

#: Most rows that one transaction deletes. SQLite before 3.32 accepts 999 values in a statement.
BATCH: Final = 500


def prune_some(rows: Any, most: int, batch: int = BATCH) -> bool:
    """
    Delete the first of these rows in their order, which an index has to support.

    Args:
        most: The maximum number of rows to delete.
        batch: The maximum number of rows that a transaction deletes.

    Returns:
        Whether there may be more rows.
    """
    return all(_erase_batch(rows, batch) == batch for _ in range(most // batch))


def _erase_batch(rows: Any, limit: int) -> int:
    """Delete the first rows; return how many were found."""
    found: list[Any] = []
    if not connections[rows.db].features.has_select_for_update_skip_locked:
        # A write locks the whole database, so the search for the rows holds no lock.
        found = list(rows.values_list("pk", flat=True)[:limit])
        if found:
            rows.filter(pk__in=found).erase()
        return len(found)
    for attempt in Attempts(rows.db, "A deletion of old rows"):
        with attempt, transaction.atomic(using=rows.db):
            locked = rows.select_for_update(skip_locked=True)
            found = list(locked.values_list("pk", flat=True)[:limit])
            attempt.is_won = True
            if found:
                # Filter again under the locks, because a subquery's answer may have changed.
                rows.filter(pk__in=found).erase()
    return len(found)
