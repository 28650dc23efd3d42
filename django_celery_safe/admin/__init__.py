"""
The admin pages: locks, messages, records and runs, and the decisions about them.

``pages`` is their base: pages are read-only, and each change is a ``Decision`` with a
confirmation, its own permission and a log entry. Each other file holds one kind of page.
"""

from __future__ import annotations

from .idempotency import IdempotencyRecordAdmin
from .locks import LockAdmin
from .outbox import OutboxMessageAdmin
from .stages import StageRunAdmin, StageStepAdmin

__all__ = [
    "IdempotencyRecordAdmin",
    "LockAdmin",
    "OutboxMessageAdmin",
    "StageRunAdmin",
    "StageStepAdmin",
]
