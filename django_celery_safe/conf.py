"""
The app's settings: ``DJANGO_CELERY_SAFE = {...}`` in the project's settings.

They are read, and validated, at their first use, anew after ``override_settings``, and never
written. docs/reference/settings.md explains each one. Options of decorators and calls are
validated here too; each validator gets a value and its name, and raises ConfigurationError.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

from django.conf import settings
from django.core.signals import setting_changed

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
ABOVE_0: Final = sys.float_info.min
#: Shortest lease, s.
SHORTEST_LEASE: Final = 0.001
#: Longest lease, s: a year. Servers overflow at some centuries.
LONGEST_LEASE: Final = 366 * 24 * 3600.0
#: Most holders of one lock: each acquisition reads all of them.
LARGEST_LIMIT: Final = 1000
#: Longest retention, s: a century, because dates have a maximum.
LONGEST_RETENTION: Final = 100 * LONGEST_LEASE


class Span(NamedTuple):
    """A kind of duration, s: its name, its limits in words, and its limits."""

    name: str
    limits: str
    least: float
    most: float

    def seconds(self, value: Any, what: str) -> float:
        """Return a number of seconds, or a timedelta, in seconds."""
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if is_number and self.least <= seconds <= self.most:  # NaN is in no range
            return float(seconds)
        raise wrong(value, what, f"{self.name}: give seconds or a timedelta, {self.limits}")

    def seconds_or_none(self, value: Any, what: str) -> float | None:
        """Do the same where None, which means for ever, is valid too."""
        return None if value is None else self.seconds(value, what)

    def delta(self, value: Any, what: str) -> timedelta | None:
        """Do what :meth:`seconds_or_none` does, and return a timedelta."""
        return None if value is None else timedelta(seconds=self.seconds(value, what))


LEASE: Final = Span("lease", "at least 1 ms and at most a year", SHORTEST_LEASE, LONGEST_LEASE)
WAIT: Final = Span("time to wait", "0 to try once, None to wait for ever", 0, sys.float_info.max)
# Half of a relay's lease.
SEND: Final = Span("time for a publication", "above 0 and at most 30 s", ABOVE_0, 30.0)
RESEND: Final = Span("time to wait for a worker", "above 0", ABOVE_0, LONGEST_LEASE)
KEEP: Final = Span("retention", "0 to keep nothing, None to keep all", 0, LONGEST_RETENTION)
TTL: Final = Span("time to stay done", "above 0, or None for ever", ABOVE_0, LONGEST_RETENTION)


def switch(value: Any, what: str) -> bool:
    """Return True or False; other values could surprise, as the text "no" would count as True."""
    if isinstance(value, bool):
        return value
    raise wrong(value, what, "switch: give True or False")


def outbox(value: Any, what: str = "outbox") -> Any:
    """Return whether messages go through the outbox: True, "until_done" or False."""
    if isinstance(value, bool) or value == "until_done":
        return value
    means = 'use of the outbox: give True, False or "until_done"'
    raise wrong(value, what, means, did_you_mean(value, ["until_done"]))


def max_deaths(value: Any, what: str) -> int | None:
    """Return how many processes may die in a task before it fails; None: any number."""
    if value is None or (type(value) is int and value >= 1):
        return value
    means = "number of deaths: give a whole number of at least 1, or None for no limit"
    raise wrong(value, what, means, f" Did you mean {value}?" if str(value).isdigit() else "")


def lock_limit(value: Any) -> int:
    """Return how many holders a lock may have at once."""
    if type(value) is int and 1 <= value <= LARGEST_LIMIT:
        return value
    raise wrong(value, "limit", f"limit: give a whole number from 1 to {LARGEST_LIMIT}")


def wrong(value: Any, what: str, means: str, guess: str = "") -> ConfigurationError:
    """Return the error for a value: what it should mean, what to give, and what was meant."""
    return ConfigurationError(f"{what}={value!r} is not a valid {means}.{guess}")


#: Each retention: its default and its kind.
RETENTIONS: Final[dict[str, tuple[Duration, Span]]] = {
    "sent": (0, KEEP),
    "failed": (timedelta(days=30), KEEP),
    "records": (timedelta(days=7), TTL),
    "runs": (timedelta(days=7), KEEP),
}


def retentions(value: Any, what: str) -> dict[str, timedelta | None]:
    """Return how long rows of each kind are kept; one value is for all kinds."""
    chosen = value if isinstance(value, dict) else dict.fromkeys(RETENTIONS, value)
    for kind in chosen:
        if kind not in RETENTIONS:
            known = f"It has: {', '.join(RETENTIONS)}.{did_you_mean(kind, RETENTIONS)}"
            raise ConfigurationError(f"{what} has no key {kind!r}. {known}")
    return {
        kind: span.delta(chosen.get(kind, default), f"{what}[{kind!r}]")
        for kind, (default, span) in RETENTIONS.items()
    }


def alias(value: Any, what: str) -> Any:
    """Return an alias of a cache or database; whoever uses it knows those that exist."""
    return value


#: Each setting: its default, and the function that validates its value.
SETTINGS: Final[dict[str, tuple[Any, Callable[[Any, str], Any]]]] = {
    #: Alias of the cache that holds the locks. Give locks an alias with a database number of
    #: their own: ``cache.clear()`` frees every lock in its database.
    "LOCK_CACHE": ("default", alias),
    #: Alias of the database that holds the locks instead of the cache; None: the cache holds them.
    #: It needs ``manage.py migrate django_celery_safe --database=<alias>``, and on SQLite a file
    #: of its own.
    "LOCK_DATABASE": (None, alias),
    #: The lease of locks, of ``idempotent`` claims, of carried tasks and of steps: how long they
    #: stay held after their process died, a duration from 1 ms to a year. A holder renews its
    #: lease, so it does not limit how long work may take. A longer lease survives a longer outage
    #: of the store, and lets others wait longer after a crash.
    "LOCK_TIMEOUT": (30, LEASE.seconds),
    #: How long a message with ``unique_until`` that got lost keeps the same task from being sent
    #: again, a duration; the message's ``countdown`` or ``eta`` is added. Choose a little more
    #: than the longest time that a message waits in your queue.
    "SENT_TIMEOUT": (3600, LEASE.seconds),
    #: Whether a plain ``.delay()`` or ``.apply_async()`` of a SafeTask inside ``atomic()`` waits
    #: for the commit. A task's own ``send_on_commit``, and that of a call, override it.
    "SEND_ON_COMMIT": (False, switch),
    #: Whether a plain send of a SafeTask inside ``atomic()`` that does not wait for the commit is
    #: logged with its line in your code (``sent_in_atomic``). For development and tests: each
    #: report inspects the call stack.
    "WARN_IN_ATOMIC": (False, switch),
    #: True: the outbox keeps every message of a SafeTask that is sent on commit, until a broker
    #: has it. "until_done": it keeps every message, also that of a plain ``.delay()``, until the
    #: task has ended. A task's own ``outbox``, and that of a call, override it.
    "OUTBOX": (False, outbox),
    #: How long all publications right after one commit may take together, with the outbox: a
    #: duration of at most 30 s. A relay sends the messages that remain, and those of the next
    #: ``OUTBOX_SEND_TIMEOUT``; if the sender dies, 5 s later than this. Redis and AMQP keep it;
    #: other transports have timeouts of their own.
    "OUTBOX_SEND_TIMEOUT": (2, SEND.seconds),
    #: When a relay re-sends the message of a carried task that no worker has started, a duration
    #: from its send or its ``eta`` on; it doubles with each re-send, at most seven times. A second
    #: message of a task that only waited in a long queue does nothing.
    "OUTBOX_RESEND_AFTER": (600, RESEND.seconds),
    #: How many processes may die in a carried task or a step before it fails with TaskPoisoned
    #: instead of running again; None: any number. A task's own ``max_deaths`` overrides it.
    "MAX_DEATHS": (3, max_deaths),
    #: Whether a lock stores the arguments of the task that holds it, as its message shows them,
    #: cut to 200 characters, and commands and pages show arguments. Redact them with Celery's
    #: ``argsrepr`` and ``kwargsrepr``.
    "SHOW_ARGUMENTS": (True, switch),
    #: How long a relay keeps rows, a duration, None for ever; one value for all, or a dict:
    #: ``"sent"`` for messages that were sent, or whose carried task succeeded; ``"failed"`` for
    #: messages of carried tasks that failed; ``"records"`` for records of ``idempotent``, counted
    #: from the end of their work (a later request does the work again); ``"runs"`` for runs of
    #: stages that ended. Dead messages stay.
    "RETENTION": ({kind: default for kind, (default, _) in RETENTIONS.items()}, retentions),
}
#: The default of each setting.
DEFAULTS: Final = {name: default for name, (default, _) in SETTINGS.items()}


def given() -> dict[str, Any]:
    """Return the project's settings dict, unchanged."""
    value = getattr(settings, NAME, {})
    if not isinstance(value, dict):
        raise ConfigurationError(f"{NAME} is {value!r}; it has to be a dict of settings.")
    return value


@cache
def get(name: str) -> Any:
    """Return the setting ``name``, validated: the project's value, or the default."""
    default, check = SETTINGS[name]
    return check(given().get(name, default), name)


def _forget(**kwargs: Any) -> None:
    get.cache_clear()


setting_changed.connect(_forget, dispatch_uid=__name__)  # by override_settings


def retention(kind: str) -> timedelta | None:
    """Return how long rows of a kind are kept; 0: not at all; None: for ever."""
    kept: timedelta | None = get("RETENTION")[kind]
    return kept


def keeps_sent() -> bool:
    """Return whether messages stay in the outbox after they are sent."""
    return retention("sent") != timedelta()


def closest(name: object, known: Iterable[Any], likeness: float = 0.6) -> str | None:
    """Return the known name that is most similar to ``name``; None: no name is similar."""
    names = {str(each).upper(): str(each) for each in known}
    matches = difflib.get_close_matches(str(name).upper(), names, n=1, cutoff=likeness)
    return names[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[Any]) -> str:
    """Return the end of an error about a name, such as " Did you mean 'x'?"; "": no guess."""
    meant = closest(name, known)
    return "" if meant is None else f" Did you mean {meant!r}?"
