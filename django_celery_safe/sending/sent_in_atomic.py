"""Warning about messages that are sent before the transaction around them commits."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Final

from ..events import SENT_IN_ATOMIC
from ..transactions import aliases_in_atomic

#: Packages that a send passes through; the reported place is outside of them.
PASSED: Final = (
    "celery",
    "kombu",
    "django_celery_safe",
    "billiard",
    "click",
    "concurrent",
    "threading",
)
#: The reported place if no code of the project sends the task: a chain, a retry, beat.
CELERY_ITSELF: Final = "Celery itself"


def warn_if_in_atomic(task: str) -> None:
    """Log a send that does not wait for an open transaction, with its place in the code."""
    aliases = aliases_in_atomic()
    if not aliases:
        return
    place = calling_line()
    SENT_IN_ATOMIC.emit(warn_if_in_atomic, task=task, using=aliases[0], place=place)


def calling_line() -> str:
    """Return the place in the project's code that sends the task, or ``CELERY_ITSELF``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame):
        frame = frame.f_back
    if frame is None:
        return CELERY_ITSELF
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_passed(frame: FrameType) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    if module == "__main__":
        # Celery's own program, or `python -m celery`.
        path = Path(frame.f_code.co_filename)
        return path.stem == "celery" or path.parts[-2:] == ("celery", "__main__.py")
    return module.partition(".")[0] in PASSED or module == "runpy"
