"""
The app's tables, one file for each subpackage that has tables. Querysets belong to their models.

Nothing here is imported by the package's ``__init__``: a model there would keep
``django.setup()`` from working.
"""

from __future__ import annotations

from .idempotency import IdempotencyRecord
from .locks import DatabaseLock, Lock
from .outbox import OutboxMessage, OutboxRelay
from .stages import StageRun, StageStep

__all__ = [
    "DatabaseLock", "IdempotencyRecord", "Lock", "OutboxMessage", "OutboxRelay",
    "StageRun", "StageStep",
]  # fmt: skip
