"""
Functions and context managers for the tests of projects that use django_celery_safe.

They work with any test runner. Celery's own code makes the messages that they run or return, but
nothing reaches a broker or a result backend. For callbacks of ``on_commit`` there are Django's
``captureOnCommitCallbacks`` and pytest-django's ``django_capture_on_commit_callbacks``.
"""

from __future__ import annotations

from .deliveries import Delivery, deliver_killed, deliver_twice, drain_outbox
from .locks import hold_lock, locks_in_memory
from .messages import Sent
from .runs import run_stages

__all__ = [
    "Delivery", "Sent", "deliver_killed", "deliver_twice", "drain_outbox", "hold_lock",
    "locks_in_memory", "run_stages",
]  # fmt: skip
