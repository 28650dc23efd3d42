"""
Workers and relays with one deliberate fault each.

Each is put in the place of the right one in its own process alone.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from django.db.models import Q
from django.db.models.functions import Now

from django_celery_safe.models import OutboxMessages
from django_celery_safe.sending import carried

#: Has the fault that a worker is to have, see ``use_chosen``.
VARIABLE: Final = "SAFE_TESTS_BROKEN_CARRYING"


def use_chosen() -> None:
    """Let this process have the fault that the environment names, if that is one of workers."""
    if os.environ.get(VARIABLE) == "no-token":
        carried.Run._ending = end_without_token  # type: ignore[method-assign]


def end_without_token(run: carried.Run) -> Callable[[], bool]:
    """End a task's row, whoever has it by now."""
    row = run.claim.table.at(run.claim.name)
    return lambda: bool(row.erase())


def break_relay(fault: str) -> None:
    """Let this process relay with a fault, if that is one of relays."""
    if fault == "ignores-leases":
        OutboxMessages.due = due_or_running  # type: ignore[method-assign]


def due_or_running(rows: Any) -> Any:
    """Return what is due, and what a worker runs just now; once, or no task would ever end."""
    running = Q(due_at__isnull=False, deaths=0) & ~Q(token="")
    return rows.filter(Q(due_at__lte=Now()) | running).order_by("due_at", "pk")
