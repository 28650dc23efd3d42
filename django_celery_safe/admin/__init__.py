"""
The admin pages: locks, messages, records and runs, and the actions on them.

``pages`` is their base: pages are read-only, and each change is an action with its own
permission, a log entry and, if it can't be undone, a confirmation. The first page stands in
``templatetags``.
"""

from __future__ import annotations

from .locks import LockAdmin as LockAdmin
from .tables import IdempotencyRecordAdmin as IdempotencyRecordAdmin
from .tables import OutboxMessageAdmin as OutboxMessageAdmin
from .tables import StageRunAdmin as StageRunAdmin
from .tables import StageStepAdmin as StageStepAdmin
