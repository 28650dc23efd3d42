"""
Options of one entry of a plan, beside its arguments: ``{"width": 640, "@queue": "slow"}``.

No argument of a Python function starts with an @, so names can't clash, and one column holds
both as the plan has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from celery import Celery

from .. import conf
from ..exceptions import ConfigurationError
from ..values import decode

#: The first character of an option's name.
MARK: Final = "@"
#: Largest priority of a message: a byte, in AMQP.
LARGEST_PRIORITY: Final = 255


class InvalidEntry(Exception):
    """An entry can't be run; its args are the fault, as a clause, and advice, as a sentence."""


class EntryParts(NamedTuple):
    """
    The third part of a plan's entry.

    Attributes:
        arguments: The keyword arguments of its function.
        options: Its options, without the @.
    """

    arguments: dict[str, Any]
    options: dict[str, Any]


def split(given: Mapping[str, Any]) -> EntryParts:
    """Split the dict of a plan's entry into arguments and options."""
    parts = EntryParts({}, {})
    for name, value in given.items():
        if name.startswith(MARK):
            parts.options[name.removeprefix(MARK)] = value
        else:
            parts.arguments[name] = value
    return parts


def read_entry(text: str) -> EntryParts:
    """Return arguments and options as a step's row has them."""
    given = decode(text) or {}
    return split(given) if MARK in text else EntryParts(given, {})


def make_options(options: Mapping[str, Any], app: Celery) -> dict[str, Any]:
    """
    Return the options of an entry as its row keeps them, with their @.

    Raises:
        InvalidEntry: An option is not known, or its value is not valid.
    """
    for name in options:
        if name not in OPTIONS:
            close = conf.closest(name, OPTIONS)
            known = ", ".join(MARK + each for each in OPTIONS)
            hint = f'Did you mean "{MARK}{close}"?' if close else f"There are {known}."
            raise InvalidEntry(f'has the option "{MARK}{name}", which is not known', hint)
    return {MARK + name: OPTIONS[name](value, app) for name, value in options.items()}


def check_retries(task: Any, options: Mapping[str, Any]) -> None:
    """
    Refuse the option ``retries`` for a task that already has ``autoretry_for``.

    Raises:
        InvalidEntry: The task has both.
    """
    if "retries" in options and hasattr(task, "_orig_run"):
        raise InvalidEntry(
            f'has "{MARK}retries" for the task {task.name}, whose autoretry_for has its own number',
            f'Leave out "{MARK}retries" and set max_retries on the task, or leave out '
            f"autoretry_for.",
        )


def _queue(value: Any, app: Celery) -> str:
    if not isinstance(value, str) or not value:
        raise _refused("queue", value, "the name of a queue")
    if not app.conf.task_create_missing_queues and value not in app.amqp.queues:
        known = ", ".join(sorted(app.amqp.queues))
        raise _refused("queue", value, f"a queue of the app: {known}")
    return value


def _countdown(value: Any, app: Celery) -> float:
    try:
        seconds = conf.WAIT.seconds_or_none(value, "countdown")
    except ConfigurationError:
        seconds = None
    # Celery and databases can't store later moments.
    if seconds is None or seconds > conf.LONGEST_LEASE:
        raise _refused("countdown", value, "a number of seconds or a timedelta, at most a year")
    return seconds


def _priority(value: Any, app: Celery) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_PRIORITY:
        raise _refused("priority", value, f"a whole number from 0 to {LARGEST_PRIORITY}")
    return value


def _retries(value: Any, app: Celery) -> int:
    if type(value) is not int or value < 0:
        raise _refused("retries", value, "a whole number, 0 or more")
    return value


def _refused(name: str, value: Any, wanted: str) -> InvalidEntry:
    return InvalidEntry(f'has the option "{MARK}{name}": {value!r:.100}', f"Give {wanted}.")


#: Functions that check an option, and return it as JSON can keep it, by its name.
OPTIONS: Final[Mapping[str, Callable[[Any, Celery], Any]]] = {
    "queue": _queue,
    "countdown": _countdown,
    "priority": _priority,
    "retries": _retries,
}
