"""
The app's settings: ``DJANGO_CELERY_SAFE = {...}`` in the project's settings.

They are read when they are used, so ``override_settings`` works, and never
written. docs/reference/settings.md explains each one.
"""

from __future__ import annotations

import difflib
import math
import sys
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeAlias

from django.conf import settings

from .exceptions import ConfigurationError

#: Seconds, or a timedelta.
Duration: TypeAlias = float | timedelta


class Unset(Enum):
    """The type of :data:`UNSET`, which means "not given" where None has another meaning."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET

NAME: Final = "DJANGO_CELERY_SAFE"

#: Shortest duration, s, where 0 is not valid.
ABOVE_0: Final = math.ulp(0.0)
#: Shortest lease, s.
SHORTEST_LEASE: Final = 0.001
#: Longest lease, s: a year. Servers overflow at some centuries.
LONGEST_LEASE: Final = 366 * 24 * 3600.0
#: Most holders of one lock: each acquisition reads all of them.
LARGEST_LIMIT: Final = 1000
#: Longest time for a publication right after a commit, s: half of a relay's lease.
LONGEST_SEND: Final = 30.0
#: Longest retention, s: a century, because dates have a maximum.
LONGEST_RETENTION: Final = 100 * LONGEST_LEASE

DEFAULTS: Final[dict[str, Any]] = {
    #: Cache alias that holds the locks.
    "LOCK_CACHE": "default",
    #: Database alias that holds the locks instead of the cache; None: the cache.
    "LOCK_DATABASE": None,
    #: Lease of a lock, s.
    "LOCK_TIMEOUT": 30,
    #: How long a message that was sent prevents sending the same task again, s.
    "SENT_TIMEOUT": 3600,
    #: Defer every ``.delay()`` of a SafeTask made inside ``atomic()`` to its commit.
    "SEND_ON_COMMIT": False,
    #: Log every plain ``.delay()`` of a SafeTask inside ``atomic()``.
    "WARN_IN_ATOMIC": False,
    #: Keep messages that are sent on commit in the outbox until the broker has them;
    #: "until_done": until their task has ended.
    "OUTBOX": False,
    #: Longest time for a publication right after the commit, with the outbox, s.
    "OUTBOX_SEND_TIMEOUT": 2,
    #: How long sent messages stay in the outbox, s; 0: not at all; None: for ever.
    "OUTBOX_RETENTION": 0,
    #: How long a task that is carried until done may wait for a worker before its message is
    #: re-sent, s; the time doubles with each re-send.
    "OUTBOX_RESEND_AFTER": 600,
    #: How long messages of tasks that failed stay in the outbox; 0: not at all; None: for ever.
    "OUTBOX_FAILED_RETENTION": timedelta(days=30),
    #: How many processes may die in a task, which runs again after each death, before it fails;
    #: None: any number.
    "MAX_DEATHS": 3,
    #: How long a record of ``idempotent`` keeps work from being done again; None: for ever.
    "IDEMPOTENCY_RETENTION": timedelta(days=7),
    #: How long runs of stages are kept after their end; 0: not at all; None: for ever.
    "STAGES_RETENTION": timedelta(days=7),
    #: Store and show the arguments of the task that holds a lock.
    "SHOW_ARGUMENTS": True,
}


def given() -> dict[str, Any]:
    """Return the project's settings dict, unchanged."""
    value = getattr(settings, NAME, {})
    if not isinstance(value, dict):
        raise ConfigurationError(f"{NAME} is {value!r}; it has to be a dict of settings.")
    return value


def get(name: str) -> Any:
    """Return the setting ``name``: the project's value, or the default."""
    value = given().get(name, UNSET)
    return DEFAULTS[name] if value is UNSET else value


def current() -> dict[str, Any]:
    """Return all settings: the project's values, and the defaults for the rest."""
    return {**DEFAULTS, **given()}


def misnamed() -> list[str]:
    """Return project settings that resemble :data:`NAME` and hold settings of this app."""
    return [
        name
        for name in dir(settings)
        if name != NAME
        and closest(name, [NAME], 0.7)
        and isinstance(value := getattr(settings, name), dict)
        and not DEFAULTS.keys().isdisjoint(value)
    ]


def closest(name: str, known: Any, likeness: float = 0.6) -> str | None:
    """Return the known name that is most similar to ``name``; None: no name is similar."""
    names = {str(each).upper(): str(each) for each in known}
    matches = difflib.get_close_matches(str(name).upper(), names, n=1, cutoff=likeness)
    return names[matches[0]] if matches else None


def did_you_mean(name: object, known: Any) -> str:
    """Return the end of an error about a name, such as " Did you mean 'x'?"; "": no guess."""
    meant = closest(str(name), known)
    return "" if meant is None else f" Did you mean {meant!r}?"


def lease_seconds(value: Any, what: str) -> float:
    """
    Return a lease in seconds.

    Args:
        value: Seconds or a timedelta, at least 1 ms and at most a year.
        what: The value's name in the error, such as ``timeout``.

    Raises:
        ConfigurationError: The value is not such a duration. None is refused, because the lock
            would stay held for ever after a crash.
    """
    if value is None:
        raise ConfigurationError(
            f"{what}=None would be a lock that never expires, not even after a crash. Give "
            f"seconds; with renew=True the lease is renewed for as long as the work takes."
        )
    means = "lease: give a number of seconds or a timedelta, at least 1 ms and at most a year"
    return _seconds(value, what, means, LONGEST_LEASE, SHORTEST_LEASE)


def lock_timeout() -> float:
    """
    Return the setting ``LOCK_TIMEOUT``, the usual lease, in seconds.

    Raises:
        ConfigurationError: It is not such a duration.
    """
    return lease_seconds(get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")


def sent_timeout() -> float:
    """
    Return the setting ``SENT_TIMEOUT``, the lease of a waiting message's lock, in seconds.

    Raises:
        ConfigurationError: It is not such a duration.
    """
    return lease_seconds(get("SENT_TIMEOUT"), "SENT_TIMEOUT")


def send_timeout() -> float:
    """
    Return the setting ``OUTBOX_SEND_TIMEOUT``, the longest time for a publication, in seconds.

    Raises:
        ConfigurationError: It is not a duration above 0, or it is so long that a relay could
            claim a message while it is being sent.
    """
    name = "OUTBOX_SEND_TIMEOUT"
    means = (
        f"time to wait for a broker: give a number of seconds above 0, {LONGEST_SEND:g} at most, "
        f"or a timedelta"
    )
    return _seconds(get(name), name, means, LONGEST_SEND, ABOVE_0)


def resend_after() -> timedelta:
    """
    Return the setting ``OUTBOX_RESEND_AFTER``.

    Raises:
        ConfigurationError: It is not a duration above 0.
    """
    name = "OUTBOX_RESEND_AFTER"
    means = "time to wait for a worker: give a number of seconds above 0, or a timedelta"
    return timedelta(seconds=_seconds(get(name), name, means, LONGEST_LEASE, ABOVE_0))


def max_deaths(value: Any, what: str) -> int | None:
    """
    Return how many processes may die in a task before it fails; None: any number.

    Raises:
        ConfigurationError: It is neither None nor a whole number of at least 1.
    """
    if value is None or (type(value) is int and value >= 1):
        return value
    guess = f" Did you mean {int(value)}?" if isinstance(value, str) and value.isdigit() else ""
    raise ConfigurationError(
        f"{what}={value!r} is not a valid number of deaths: give a whole number of at least 1, or "
        f"None for no limit.{guess}"
    )


def switch(value: Any, what: str) -> bool:
    """
    Return whether something is on.

    Raises:
        ConfigurationError: The value is neither True nor False. Other values could surprise:
            the text "no" would count as True.
    """
    if isinstance(value, bool):
        return value
    raise ConfigurationError(f"{what}={value!r} is neither True nor False. Give one of them.")


def lock_limit(value: Any) -> int:
    """
    Return how many holders a lock may have at once.

    Raises:
        ConfigurationError: It is not a whole number from 1 to LARGEST_LIMIT.
    """
    if type(value) is int and 1 <= value <= LARGEST_LIMIT:
        return value
    raise ConfigurationError(
        f"limit={value!r} can't say how many may hold a lock at once: give a whole number from 1 "
        f"to {LARGEST_LIMIT}."
    )


def retention(name: str) -> timedelta | None:
    """
    Return the retention in the setting ``name``; 0: keep nothing; None: keep for ever.

    Raises:
        ConfigurationError: It is neither None nor such a duration.
    """
    value = get(name)
    if value is None:
        return None
    means = (
        "time to keep something: give a number of seconds or a timedelta, 0 to keep nothing, None "
        "to keep it for ever"
    )
    return timedelta(seconds=_seconds(value, name, means, LONGEST_RETENTION))


def keeps_sent() -> bool:
    """Return whether messages stay in the outbox after they are sent."""
    return retention("OUTBOX_RETENTION") != timedelta()


def ttl(value: Any, what: str) -> timedelta | None:
    """
    Return how long a record is valid; None: for ever.

    Raises:
        ConfigurationError: It is neither None nor a duration above 0.
    """
    if value is None:
        return None
    means = (
        "time for which work stays done: give a number of seconds above 0 or a timedelta, or None "
        "for ever"
    )
    return timedelta(seconds=_seconds(value, what, means, LONGEST_RETENTION, ABOVE_0))


def idempotency_retention() -> timedelta | None:
    """
    Return the setting ``IDEMPOTENCY_RETENTION``, how long a record is valid; None: for ever.

    Raises:
        ConfigurationError: It is neither None nor a duration above 0.
    """
    return ttl(get("IDEMPOTENCY_RETENTION"), "IDEMPOTENCY_RETENTION")


def wait_seconds(value: Any, what: str) -> float | None:
    """
    Return the longest time to wait, in seconds; None waits for ever.

    Raises:
        ConfigurationError: It is neither None nor a duration of at least 0.
    """
    if value is None:
        return None
    means = "time to wait: give seconds or a timedelta, 0 to try once, None to wait for ever"
    return _seconds(value, what, means, sys.float_info.max)


def _seconds(value: Any, what: str, means: str, most: float, least: float = 0.0) -> float:
    """Return a duration in seconds; the error for a wrong value says what to give instead."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and least <= seconds <= most):  # NaN is in no range
        raise ConfigurationError(f"{what}={value!r} is not a valid {means}.")
    return float(seconds)
