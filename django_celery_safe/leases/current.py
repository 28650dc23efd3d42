"""The claims under which the running code works."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task

if TYPE_CHECKING:
    from .claim import Claim

#: The claims under which the running code works, the innermost last, each with the request of
#: the task that holds it; None: code outside of tasks holds it.
current_claims: ContextVar[tuple[tuple[Claim, Any], ...]] = ContextVar(
    "django_celery_safe_claims", default=()
)


def own_claims() -> list[Claim]:
    """Return the claims of the task that is running here, the innermost last."""
    _, request = find_request()
    # A helper thread of a task has no request of its own.
    return [one for one, its in current_claims.get() if one.is_held and request in (None, its)]


def working_claims() -> list[Claim]:
    """Return the claims under which the running code works, the innermost last."""
    return [claim for claim, _ in current_claims.get() if claim.is_held]


def find_request() -> tuple[Any, Any]:
    """Return the task that is running here and its request; None and None: no task is running."""
    task = get_current_task()
    return task, None if task is None else task.request
