"""The app's own Celery task, for beat."""

from __future__ import annotations

import time
from typing import Final

from celery import Task, shared_task

from .sending.outbox import outbox_aliases
from .sending.relay import Relay, drain_all

#: Longest time that one run of the task relays, s; the next run continues.
LONGEST_RUN: Final = 50.0


@shared_task(base=Task, ignore_result=True)
def relay_outbox() -> int:
    """
    Send the due messages in the outboxes of all databases; return how many were sent.

    It also deletes old rows, is for projects with beat but without a relay, and any number of it
    may run at once.
    """
    ends_at = time.monotonic() + LONGEST_RUN
    relays = [Relay(alias) for alias in outbox_aliases()]
    drain_all(relays, lambda: time.monotonic() > ends_at)
    return sum(relay.count for relay in relays)
