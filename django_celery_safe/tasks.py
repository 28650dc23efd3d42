"""The app's own Celery tasks, for beat."""

from __future__ import annotations

import time
from typing import Final

from celery import Task, shared_task

from .idempotency.record_table import get_prunable, record_table
from .sending.outbox import outbox_aliases
from .sending.relay import Relay, drain_all
from .stages import repairs
from .stages.step_table import step_table

#: Longest that one run relays, s; the next goes on.
LONGEST_RUN: Final = 50.0


@shared_task(base=Task, ignore_result=True)
def relay_outbox() -> int:
    """
    Send what is due in the outboxes of all databases, and return how many messages that was.

    As a relay does, it repairs runs of stages, too. For projects that run beat and no
    ``manage.py celery_outbox relay``; any number may run at once.
    """
    ends_at = time.monotonic() + LONGEST_RUN
    relays = [Relay(alias, housekeeping=repairs.sweep_housekeeping) for alias in outbox_aliases()]
    drain_all(relays, lambda: time.monotonic() > ends_at)
    return sum(relay.count for relay in relays)


@shared_task(base=Task, ignore_result=True)
def prune_idempotency() -> int:
    """Delete the records of idempotent work that say nothing any more; return how many."""
    return get_prunable(record_table().all()).erase()


@shared_task(base=Task, ignore_result=True)
def sweep_stages() -> int:
    """Repair the runs of stages that do not go on after a crash; return how many repairs."""
    return len(repairs.sweep(step_table()))


@shared_task(base=Task, ignore_result=True)
def prune_stages() -> int:
    """Delete the runs of stages that ended ``STAGES_RETENTION`` ago; return how many."""
    return repairs.get_prunable(step_table()).prune()
