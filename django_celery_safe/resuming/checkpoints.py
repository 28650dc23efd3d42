"""Cursors that a task sets itself, for what has no key and no index, such as a file."""

from __future__ import annotations

from typing import Any, Final

from django.db import transaction

from ..transactions import in_atomic
from .cursor import Cursor, begin_walk, record
from .handing_over import HandedOver, hand_over_if_told

#: Says in a row that its cursor was set by :func:`checkpoint`.
OF: Final = "checkpoint()"


def checkpoint(cursor: Any) -> None:
    """
    Record how far the running task got, where :func:`resumable` can't, such as in a file.

    Inside ``atomic()`` on the database of the task's row, the block's writes and the cursor are
    committed together. Outside of a block it is committed at once, and what was done since the last
    checkpoint may be done twice.

    A worker that shuts down hands the task over here; what the open block has written is rolled
    back.

    Args:
        cursor: A little plain data, such as the offset in a file.

    Raises:
        ClaimLost: Another process does the work now; leave the block with this error.
        ConfigurationError: The code has no claim, or the cursor is no plain data.

    Example:
        >>> from django.db import transaction
        >>> from django_celery_safe import checkpoint, resumed_at
        >>> def read_log(path):
        ...     with open(path) as file:
        ...         file.seek(resumed_at() or 0)
        ...         while lines := file.readlines(100_000):
        ...             with transaction.atomic():
        ...                 save_all(lines)
        ...                 checkpoint(file.tell())
    """
    claim, _ = begin_walk(OF, "checkpoint()")
    if claim.table is None:
        return
    alias, place = claim.table.alias, Cursor(OF, cursor)
    if in_atomic(alias):
        try:
            hand_over_if_told()
        except HandedOver:
            transaction.set_rollback(True, using=alias)  # even if the block does not see the error
            raise
        if (lost := record(alias, place)) is not None:
            transaction.set_rollback(True, using=alias)  # as above
    else:
        lost = claim.ask(lambda: record(alias, place))
    if lost is not None:
        lost.raise_lost()
    hand_over_if_told()


def resumed_at() -> Any:
    """
    Return the last cursor that :func:`checkpoint` recorded in an earlier run; None: there is none.

    Raises:
        ConfigurationError: The code has no claim, or its cursor is one of ``resumable()``.
    """
    _, cursor = begin_walk(OF, "resumed_at()")
    return None if cursor is None else cursor.at
