"""
Celery tasks in Django: one at a time, sent only after commit, done once, in the right order.

This is the door: import the public names from here. Models stay in ``models``,
since one imported here would keep ``django.setup()`` from working.
"""

from __future__ import annotations

from . import stages
from .concurrency import single_instance
from .exceptions import (
    AlreadyClaimed,
    AlreadyRunning,
    AlreadyStarted,
    CelerySafeError,
    ClaimLost,
    ConfigurationError,
    IdempotencyConflict,
    IllegalTransition,
    InvalidResult,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    NotSerializable,
    TaskPoisoned,
    WrongTransaction,
)
from .idempotency import IdempotentMixin, forget_record, idempotent
from .leases.claim import Claim, current_claim
from .locks import CacheLock, HeldLock, cache_lock, find_lock, iter_locks, release_lock
from .resuming import checkpoint, resumable, resumed_at
from .sending import SafeTask, SafeTaskMixin, send_on_commit

__all__ = [
    "AlreadyClaimed",
    "AlreadyRunning",
    "AlreadyStarted",
    "CacheLock",
    "CelerySafeError",
    "Claim",
    "ClaimLost",
    "ConfigurationError",
    "HeldLock",
    "IdempotencyConflict",
    "IdempotentMixin",
    "IllegalTransition",
    "InvalidResult",
    "LockBackendError",
    "LockLost",
    "LockNotAcquired",
    "NotSerializable",
    "SafeTask",
    "SafeTaskMixin",
    "TaskPoisoned",
    "WrongTransaction",
    "cache_lock",
    "checkpoint",
    "current_claim",
    "find_lock",
    "forget_record",
    "idempotent",
    "iter_locks",
    "release_lock",
    "resumable",
    "resumed_at",
    "send_on_commit",
    "single_instance",
    "stages",
]
