"""Soft time limits that hit at a chosen call of the package."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

from celery.exceptions import SoftTimeLimitExceeded

import django_celery_safe

PACKAGE = str(Path(django_celery_safe.__file__).parent)


class Interruption:
    """
    Raises at the n-th call that the package makes or returns from, inside given functions.

    Args:
        others: Whether calls of functions outside the package count, too.
        spared: Functions at whose call it never raises.
        after: The only kinds of objects after whose methods, in C, it raises; None: anywhere.
    """

    def __init__(
        self,
        number: int,
        inside: Collection[CodeType],
        *,
        others: bool = False,
        spared: Collection[CodeType] = (),
        after: type | tuple[type, ...] | None = None,
    ) -> None:
        self.number, self.inside = number, inside
        self.others, self.spared, self.after = others, spared, after
        #: Where it was; "": there are fewer calls.
        self.place = ""
        self._depth = self._calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt this block, where Python looks for signals: not between any two lines."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code in self.inside:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        if not self._depth or event not in ("call", "c_return") or code in self.spared:
            return
        if self.after and not isinstance(getattr(arg, "__self__", None), self.after):
            return
        caller = frame.f_back if self.others and event == "call" else None
        if any(is_ours(each) for each in (frame, caller)):
            self._calls += 1
            if self._calls == self.number:
                self.place = f"{code.co_qualname}:{frame.f_lineno}"
                raise SoftTimeLimitExceeded


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of the package."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)
