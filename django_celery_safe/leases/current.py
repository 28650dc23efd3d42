"""The claim under which the running code works."""

from __future__ import annotations

from celery._state import get_current_task

from ..exceptions import ConfigurationError
from .claim import Claim, current_claims, find_request


def current_claim() -> Claim:
    """
    Return the claim under which the running code works: the innermost one of this task.

    The claim belongs to ``idempotent``, to a message with ``outbox="until_done"``, or to a step.
    In a task that is called directly or eagerly, outside any ``idempotent`` of its own, it is a
    stand-in that no other process can hold, and its ``finish()`` writes nothing.

    Raises:
        ConfigurationError: The running code has no claim.
    """
    if ours := own_claims():
        return ours[-1]
    task, request = get_current_task(), find_request()
    if request is not None and (request.called_directly or request.is_eager):
        return _DirectClaim(str(task.name))
    raise ConfigurationError(
        "No claim is being worked on here: this is for code that runs inside an "
        '@idempotent function, a `with idempotent(...)` block, a task with outbox="until_done" '
        "(which this message was not sent with), or a step."
    )


def own_claims() -> list[Claim]:
    """Return the claims of the task that is running here, the innermost last."""
    request = find_request()
    # A helper thread of a task has no request of its own.
    return [one for one, its in current_claims.get() if one.is_held and request in (None, its)]


class _DirectClaim(Claim):
    """The claim of a task that runs without a message, so it can't be delivered again."""

    def __init__(self, key: str) -> None:
        super().__init__(None, "", key, 0.0)
        self.is_held = True

    def ensure(self) -> None:
        self.check_unfinished()

    def read_cursor(self) -> str:
        return ""

    def _record_done(self, text: str) -> None:
        self.is_finished = True

    def _write_done(self, text: str) -> bool:
        return True
