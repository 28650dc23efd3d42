"""
Followers of carried messages: work of this package that depends on one, which is a step.

A follower is recorded before its message ends: a process that dies in between leaves a message
that comes back, finds what is recorded, and only goes on from there.
"""

from __future__ import annotations

from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from django.db import DEFAULT_DB_ALIAS

from ..delivery.call import find_higher
from ..delivery.header import Header
from ..events import MESSAGE_FAILED
from ..exceptions import find_soft_time_limit
from ..texts import text_of

if TYPE_CHECKING:
    from ..stages.follower import StepFollower

#: The result None as JSON. An empty text would mean that the task is not finished.
NOTHING: Final = "null"


class Fault(NamedTuple):
    """An error as a row stores it: type, text, and traceback ("": none)."""

    type: str
    text: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return the fault of an error, or of the soft time limit that it hides."""
        error = find_soft_time_limit(error) or error
        # Celery also makes errors to report an event; these were never raised.
        trace = "".join(format_exception(error)) if error.__traceback__ else ""
        return cls(type(error).__name__, text_of(error).strip(), trace)

    def __str__(self) -> str:
        return f"{self.type}: {self.text}".strip(": ")


#: The attempt of a message, and the token of the claim that must still hold it.
Held: TypeAlias = tuple[str, str]


def find_follower(header: Header) -> StepFollower | None:
    """Return what follows the message with this header; None: nothing of this package."""
    if "step" not in header:
        return None
    cls: type[StepFollower] = find_higher("stages.follower.StepFollower")
    return cls(header["step"], header.get("using", DEFAULT_DB_ALIAS))


def fail_message(
    follower: StepFollower | None, task_id: str, row: Any, token: str, fault: Fault
) -> bool:
    """
    Fail a message and what follows it, which then keeps the error instead of the message.

    Args:
        row: A queryset with the message.
        token: The claim that must still hold it.

    Returns:
        Whether the claim still held the message.
    """
    if follower is None:
        return bool(row.fail_task(token, *fault))
    return follower.fail(task_id, lambda: bool(row.claimed(token).erase()), fault)


def fail_unrun(header: Header, message: Any, row: Any, token: str, fault: Fault) -> bool:
    """
    Fail a message, and what follows it, without a run that could; see :func:`fail_message`.

    Args:
        message: The message, as it was found.
    """
    follower, task_id = find_follower(header), message.task_id
    ours = fail_message(follower, task_id, row, token, fault)
    if ours and follower is None:
        MESSAGE_FAILED.emit(fail_unrun, task=message.task, task_id=task_id, error=str(fault))
    return ours
