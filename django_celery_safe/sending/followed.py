"""
Followers of carried messages: work of this package that depends on one, such as a step.

A follower is recorded before its message ends: a process that dies in between leaves a message
that comes back, finds what is recorded, and only goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from traceback import format_exception
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from ..delivery.header import Header
from ..foreign_errors import find_soft_time_limit, text_of

#: The result None as JSON. An empty text would mean that the task is not finished.
NOTHING: Final = "null"
#: The classes of followers, by the field of the header that names what follows a message.
FOLLOWERS: Final = {"step": "django_celery_safe.stages.follower.StepFollower"}


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
        return cls(type(error).__name__, text_of(error), trace)

    def __str__(self) -> str:
        return f"{self.type}: {self.text}".strip(": ")


#: The attempt of a message, and the token of the claim that must still hold it.
Held: TypeAlias = tuple[str, str]


class Follower(Protocol):
    """
    Work that depends on the end of one message.

    Attributes:
        is_recorded: Whether the success is recorded, so that nothing later changes it.
        fault: Why a run that has returned is no success; None: it is one.
    """

    is_recorded: bool
    fault: Fault | None

    def begin(self, task_id: str) -> str:
        """Record that the task begins; return why it must not be called, or ""."""

    def encode(self, result: Any, work: str) -> str:
        """Return the text for the argument of ``finish()``; "" for None."""

    def finish(self, text: str) -> None:
        """Take the argument of ``finish()``, instead of what the task returns."""

    def end(self, held: Held, write: Callable[[], bool]) -> bool:
        """Record the success, and go on together with the end of the message, by ``write``."""

    def wait(self, held: Held, fault: Fault) -> None:
        """Record that the message comes again, before it is sent again."""

    def fail(self, task_id: str, write: Callable[[], bool], fault: Fault) -> bool:
        """Record a failure together with the end of the message, by ``write``."""

    def note(self, task_id: str, fault: Fault) -> None:
        """Record why a worker did not take the message, which stays."""


def find_follower(header: Header) -> Follower | None:
    """Return what follows the message with this header; None: nothing of this package."""
    for field, path in FOLLOWERS.items():
        if field in header:
            found: Follower = _load(path)(header[field], header.get("using", DEFAULT_DB_ALIAS))
            return found
    return None


_load = lru_cache(import_string)


def fail_message(
    follower: Follower | None, task_id: str, row: Any, token: str, fault: Fault
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
        failed: bool = row.fail_task(token, *fault)
        return failed
    return follower.fail(task_id, lambda: bool(row.claimed(token).erase()), fault)
