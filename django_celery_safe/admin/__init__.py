"""
The admin's pages: what is held, waits, was done and runs, and what an operator may do about it.

``pages`` has what all of them share: they only show, and each change is a
``Decision`` with a confirmation, a permission of its own and a log entry. Then one
file for each floor that has something to show.
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
