"""
Functions and context managers for the tests of projects that use django_celery_safe.

They work with any test runner; ``pytest_django_celery_safe`` has pytest fixtures of the same
names. Celery's own code makes the messages that they run or return, but nothing reaches a
broker or a result backend.
"""

from __future__ import annotations

from .commits import assert_sent_on_commit, on_commit_now, waiting_for_commit
from .deliveries import Delivery, deliver_twice, drain_outbox
from .locks import hold_lock, lock_name, locks_in_memory
from .messages import Sent
from .runs import run_stages

__all__ = [
    "Delivery",
    "Sent",
    "assert_sent_on_commit",
    "deliver_twice",
    "drain_outbox",
    "hold_lock",
    "lock_name",
    "locks_in_memory",
    "on_commit_now",
    "run_stages",
    "waiting_for_commit",
]
