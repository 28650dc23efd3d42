"""Warning about messages that are sent before the transaction around them commits."""

from __future__ import annotations

from ..events import SENT_IN_ATOMIC
from ..transactions import aliases_in_atomic
from ..usage import calling_line


def warn_if_in_atomic(task: str) -> None:
    """Log a send that does not wait for an open transaction, with its place in the code."""
    aliases = aliases_in_atomic()
    if not aliases:
        return
    place = calling_line()
    SENT_IN_ATOMIC.emit(warn_if_in_atomic, task=task, using=aliases[0], place=place)
