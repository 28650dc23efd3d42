"""Who calls this package: errors that show how it is called, and the line that calls it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Packages that a call passes through; the reported place is outside of them.
PASSED: Final = (
    "celery",
    "kombu",
    "django_celery_safe",
    "billiard",
    "click",
    "concurrent",
    "contextlib",
    "threading",
)
#: The reported place if no code of the project is found: a chain, a retry, beat.
CELERY_ITSELF: Final = "Celery itself"


def with_usage(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` so that Python's error about a wrong call says how it is called."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # An error of the call itself has no frame below this one.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                error.add_note(f"It is called as {_usage(function)}.")
            raise

    return call


def _usage(function: Callable[..., object]) -> str:
    parameters = inspect.signature(function).parameters
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in parameters.items()
        if name != "cls"
    ]
    return f"{function.__name__}{inspect.Signature(bare)}"


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
        path = Path(frame.f_code.co_filename)
        return path.stem == "celery" or path.parts[-2:] == ("celery", "__main__.py")
    return module.partition(".")[0] in PASSED or module == "runpy"
