"""
The app's settings: ``DJANGO_CELERY_SAFE = {...}`` in the project's settings.

They are read when they are used, so ``override_settings`` works, and never
written. docs/reference/settings.md explains each one.
"""

from __future__ import annotations

import difflib
import math
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeAlias

from django.conf import settings

from .exceptions import ConfigurationError

#: Seconds, or a timedelta.
Duration: TypeAlias = float | timedelta


class Unset(Enum):
    """The type of :data:`UNSET`: "not given", where None has a meaning of its own."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET

NAME: Final = "DJANGO_CELERY_SAFE"

#: Shortest lease, s.
SHORTEST_LEASE: Final = 0.001
#: Longest lease, s: a year. Beyond some centuries servers overflow.
LONGEST_LEASE: Final = 366 * 24 * 3600.0
#: Longest time for a publication right after a commit, s: half of a relay's lease.
LONGEST_SEND: Final = 30.0
#: Longest time to keep something, s: a century, since dates end.
LONGEST_RETENTION: Final = 100 * LONGEST_LEASE

DEFAULTS: Final[dict[str, Any]] = {
    #: Cache alias that holds the locks.
    "LOCK_CACHE": "default",
    #: Database alias that holds the locks instead of the cache; None: the cache.
    "LOCK_DATABASE": None,
    #: Lease of a lock, s.
    "LOCK_TIMEOUT": 30,
    #: How long a task that was sent keeps the same from being sent again, s.
    "SENT_TIMEOUT": 3600,
    #: Defer every ``.delay()`` of a SafeTask made inside ``atomic()`` to its commit.
    "SEND_ON_COMMIT": False,
    #: Log every plain ``.delay()`` of a SafeTask inside ``atomic()``.
    "WARN_IN_ATOMIC": False,
    #: Keep what is sent on commit in the outbox until the broker has it; "until_done": until
    #: its task has ended.
    "OUTBOX": False,
    #: Longest that a publication right after the commit may take with the outbox, s.
    "OUTBOX_SEND_TIMEOUT": 2,
    #: How long sent messages stay in the outbox, s; 0: not at all.
    "OUTBOX_RETENTION": 0,
    #: How long a task that is carried until done may wait for a worker until its message is
    #: sent again, s; it doubles each time.
    "OUTBOX_RESEND_AFTER": 600,
    #: How long messages of tasks that failed stay in the outbox, s; 0: not at all.
    "OUTBOX_FAILED_RETENTION": timedelta(days=30),
    #: How often a process may die in a task that is carried until done before the task fails;
    #: None: as often as it likes.
    "MAX_DEATHS": 3,
    #: How long a record of ``idempotent`` keeps a thing from being done again; None: for ever.
    "IDEMPOTENCY_RETENTION": timedelta(days=7),
    #: How long runs of stages are kept after their end, s.
    "STAGES_RETENTION": timedelta(days=7),
    #: Keep with a lock, and show, the arguments of the task that holds it.
    "SHOW_ARGUMENTS": True,
}


def given() -> dict[str, Any]:
    """Return what the project set, as it stands there."""
    value = getattr(settings, NAME, {})
    if not isinstance(value, dict):
        raise ConfigurationError(f"{NAME} is {value!r}; it has to be a dict of settings.")
    return value


def get(name: str) -> Any:
    """Return the setting ``name``: the project's value, or the default."""
    value = given().get(name, UNSET)
    return DEFAULTS[name] if value is UNSET else value


def current() -> dict[str, Any]:
    """Return all settings, the project's over the defaults."""
    return {**DEFAULTS, **given()}


def unknown() -> dict[str, str | None]:
    """Return each setting that does not exist, with the name that was probably meant."""
    return {name: closest(name, DEFAULTS) for name in given() if name not in DEFAULTS}


def closest(name: str, known: Any) -> str | None:
    """Return the known name that looks most like ``name``; None if none does."""
    matches = difflib.get_close_matches(str(name).upper(), [str(k).upper() for k in known], n=1)
    return next((str(k) for k in known if str(k).upper() == matches[0]), None) if matches else None


def lease_seconds(value: Any, what: str) -> float:
    """
    Return a lease in seconds.

    Args:
        value: Seconds or a timedelta, at least 1 ms and at most a year.
        what: What the value is, for the message, such as ``timeout``.

    Raises:
        ConfigurationError: It is no such duration. None is refused because a
            lock without end would stay held for ever after a crash.
    """
    if type(value) is int and 0 < value <= LONGEST_LEASE:
        return float(value)
    if value is None:
        raise ConfigurationError(
            f"{what}=None would be a lock without end, never free again after a crash. Give "
            f"seconds; with renew=True the lease is renewed for as long as the work takes."
        )
    seconds = _as_seconds(value)
    if seconds is None or not SHORTEST_LEASE <= seconds <= LONGEST_LEASE:
        raise ConfigurationError(
            f"{what}={value!r} is not a valid lease: give a number of seconds or a timedelta, "
            f"at least 1 ms and at most a year."
        )
    return seconds


def lock_timeout() -> float:
    """
    Return the setting ``LOCK_TIMEOUT``, the usual lease, in seconds.

    Raises:
        ConfigurationError: It is no such duration.
    """
    return lease_seconds(get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")


def send_timeout(name: str) -> float:
    """
    Return the setting ``name``, the longest time for a publication, in seconds.

    Raises:
        ConfigurationError: It is not a duration above 0, or so long that a relay would
            take what is just being sent.
    """
    seconds = _as_seconds(get(name))
    if seconds is None or not 0 < seconds <= LONGEST_SEND:
        raise ConfigurationError(
            f"{name}={get(name)!r} is not a valid time to wait for a broker: give a number of "
            f"seconds above 0, {LONGEST_SEND:g} at most, or a timedelta."
        )
    return seconds


def resend_after() -> timedelta:
    """
    Return the setting ``OUTBOX_RESEND_AFTER``.

    Raises:
        ConfigurationError: It is no duration above 0.
    """
    seconds = _as_seconds(get("OUTBOX_RESEND_AFTER"))
    if seconds is None or not 0 < seconds <= LONGEST_LEASE:
        raise ConfigurationError(
            f"OUTBOX_RESEND_AFTER={get('OUTBOX_RESEND_AFTER')!r} is not a valid time to wait for a "
            f"worker: give a number of seconds above 0, or a timedelta."
        )
    return timedelta(seconds=seconds)


def max_deaths(value: Any, what: str) -> int | None:
    """
    Return how often a process may die in a task; None: as often as it likes.

    Raises:
        ConfigurationError: It is neither None nor a whole number of at least 1.
    """
    if value is None or (type(value) is int and value >= 1):
        return value
    raise ConfigurationError(
        f"{what}={value!r} is not a valid number of deaths: give a whole number of at least 1, or "
        f"None for no limit."
    )


def retention(name: str) -> timedelta:
    """
    Return the setting ``name``, for how long something is kept; 0: not at all.

    Raises:
        ConfigurationError: It is no such duration.
    """
    seconds = _as_seconds(get(name))
    if seconds is None or not 0 <= seconds <= LONGEST_RETENTION:
        raise ConfigurationError(
            f"{name}={get(name)!r} is not a valid time to keep something: give a number of seconds "
            f"or a timedelta, 0 to keep nothing."
        )
    return timedelta(seconds=seconds)


def ttl(value: Any, what: str) -> timedelta | None:
    """
    Return for how long a record counts; None: for ever.

    Raises:
        ConfigurationError: It is neither None nor a duration above 0.
    """
    if value is None:
        return None
    seconds = _as_seconds(value)
    if seconds is None or not 0 < seconds <= LONGEST_RETENTION:
        raise ConfigurationError(
            f"{what}={value!r} is not a valid time for which work stays done: give a number "
            f"of seconds above 0 or a timedelta, or None for ever."
        )
    return timedelta(seconds=seconds)


def wait_seconds(value: Any, what: str) -> float | None:
    """
    Return the longest time to wait, in seconds; None waits for ever.

    Raises:
        ConfigurationError: It is neither None nor a duration of at least 0.
    """
    if value is None:
        return None
    if type(value) is int and value >= 0:
        return float(value)
    seconds = _as_seconds(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{what}={value!r} is not a valid time to wait: give seconds or a timedelta, 0 to "
            f"try once, None to wait for ever."
        )
    return seconds


def _as_seconds(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
