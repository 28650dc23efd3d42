"""
How this app's output and logs show durations and foreign text, and how its tables store that.

An error, a task's name or a holder may contain a newline, which would start a new line in
a log, or an escape sequence, which a terminal would obey.
"""

from __future__ import annotations

import logging
from typing import Any, Final

#: Characters of an error, of its type, and of the end of its traceback, that a row keeps.
LONGEST_ERROR: Final = 1000
LONGEST_TYPE: Final = 255
LONGEST_TRACEBACK: Final = 4000


def duration(seconds: float | None) -> str:
    """Return a duration as lists show it: ``12s``, ``5min``, ``3h``, ``2d``; None: ``-``."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def printable(text: str) -> str:
    """Return ``text`` with everything that could steer a terminal written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return a text that every database can store, cut to ``longest`` characters."""
    cut = text[:longest].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return cut.encode("utf-8", "replace").decode("utf-8")


def error_columns(error_type: str, error: str, traceback: str) -> dict[str, str]:
    """Return the columns of an error as a row keeps it, with the end of its traceback."""
    end = storable(traceback[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK)
    return {"error_type": error_type[:LONGEST_TYPE], "error": storable(error), "traceback": end}


def describe_error(error: BaseException) -> str:
    """Say an error of someone else's library in one line."""
    return f"{type(error).__name__}: {text_of(error).strip() or 'no message'}"


def text_of(value: object) -> str:
    """Return the text of someone else's value; "" if that fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - it is someone else's
        return ""


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose records show their arguments in one line."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape_arguments)
    return logger


def _escape_arguments(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape, record.args))
    elif record.args:
        record.args = {name: _escape(value) for name, value in record.args.items()}
    return True


def _escape(given: Any) -> Any:
    text = text_of(given)  # if it has none, logging says so when it formats the record
    return given if text.isprintable() else printable(text)
