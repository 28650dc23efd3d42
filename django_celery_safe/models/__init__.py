"""
The app's tables, one file for each room that has some.

Nothing here is imported by the package's ``__init__``: a model there would keep
``django.setup()`` from working.
"""

from __future__ import annotations

from .idempotency import IdempotencyRecord, IdempotencyRecords
from .locks import DatabaseLock, Fence, Lock
from .outbox import OutboxMessage, OutboxMessages, OutboxRelay
from .stages import StageRun, StageRuns, StageStep
from .step_states import StageSteps

__all__ = [
    "DatabaseLock",
    "Fence",
    "IdempotencyRecord",
    "IdempotencyRecords",
    "Lock",
    "OutboxMessage",
    "OutboxMessages",
    "OutboxRelay",
    "StageRun",
    "StageRuns",
    "StageStep",
    "StageSteps",
]
