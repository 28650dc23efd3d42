"""The line of the project that calls this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Final

#: Packages that a call passes through; the reported place is outside of them.
PASSED: Final = {
    *("celery", "kombu", "billiard", "click", "django_celery_safe"),
    *("concurrent", "contextlib", "threading", "runpy"),
}
#: The reported place if no code of the project is found: a chain, a retry, beat.
CELERY_ITSELF: Final = "Celery itself"


def calling_line() -> str:
    """Return the place in the project's code that makes this call, or ``CELERY_ITSELF``."""
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
        return Path(frame.f_code.co_filename).stem in ("celery", "__main__")
    return module.partition(".")[0] in PASSED
