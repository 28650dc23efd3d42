"""Plain values as texts that a table can keep, as a message would carry them, and its moments."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json

from .texts import describe_error


class NotPlain(Exception):
    """A value can't be kept; the text says why, as a clause."""


def encode(value: Any, longest: int, *, strict: bool = False) -> str:
    """
    Return a value as JSON, with what kombu adds to it, such as dates and Decimals.

    Args:
        longest: How many characters it may have.
        strict: Whether NaN and infinity are refused, which JSON of others can't have.

    Raises:
        NotPlain: JSON can't take it, or it is too long.
    """
    try:
        text: str = json.dumps(value, allow_nan=not strict)
        if len(text) <= longest:
            json.loads(text)
            return text
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # whatever its own code raises
        raise NotPlain(f"JSON can't take it ({describe_error(error)})") from error
    raise NotPlain(f"it is {len(text):,} characters of JSON, of {longest:,} at most")


def decode(text: str) -> Any:
    """Return the value that a text stands for; "": None."""
    return json.loads(text) if text else None


def seconds_until(moment: object) -> float | None:
    """Return the seconds until a time; None: it is not a time. Numbers are returned as floats."""
    if isinstance(moment, int | float):
        return float(moment)
    if isinstance(moment, str):
        with suppress(ValueError):  # not a time: whoever receives the message reports that
            moment = datetime.fromisoformat(moment)
    if not isinstance(moment, datetime):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)  # as Celery's worker does
    return (moment - datetime.now(UTC)).total_seconds()
