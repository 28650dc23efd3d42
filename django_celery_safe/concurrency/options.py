"""The options of ``@single_instance``, checked when the module is imported."""

from __future__ import annotations

import difflib
import inspect
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack, get_args

from .. import conf
from ..exceptions import ConfigurationError

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "reject", "raise"]
UniqueUntil: TypeAlias = Literal["start", "end"]
OnDuplicate: TypeAlias = Literal["existing", "raise"]
Key: TypeAlias = str | Sequence[str] | Callable[..., Any]

#: What can be told for one call; all of it plain values, since it travels in the message.
CALL_OPTIONS: Final = (
    "key",
    "lock",
    "timeout",
    "on_conflict",
    "blocking_timeout",
    "retry_delay",
    "unique_until",
    "sent_timeout",
    "on_duplicate",
)
#: Those that are durations.
_CALL_DURATIONS: Final = ("timeout", "blocking_timeout", "retry_delay", "sent_timeout")

#: What can stand in a field of a format string after its "!"; None: there is none.
_CONVERSIONS: Final = (None, "r", "s", "a")

#: Seconds after which ``on_conflict="retry"`` comes back, before jitter.
RETRY_DELAY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one ``@single_instance``, valid and with defaults applied."""

    key: Key | conf.Unset
    #: What stands before the key in the lock's name; unset: the task's name.
    lock: str | conf.Unset
    on_conflict: OnConflict
    timeout: float | conf.Unset
    retry_delay: float
    #: Longest time to wait, s; 0 unless on_conflict is "wait".
    blocking_timeout: float
    renew: bool
    cache: str | conf.Unset
    unique_until: UniqueUntil | None
    sent_timeout: float | conf.Unset
    on_duplicate: OnDuplicate

    def lease(self) -> float:
        """Return the lease of the run's lock, s."""
        if isinstance(self.timeout, conf.Unset):
            return conf.lock_timeout()
        return self.timeout


class GivenOptions(TypedDict, total=False):
    """The options of ``@single_instance``; each has a default."""

    key: Key | conf.Unset
    lock: str | conf.Unset
    on_conflict: OnConflict
    timeout: conf.Duration | conf.Unset
    retry_delay: conf.Duration | conf.Unset
    blocking_timeout: conf.Duration | conf.Unset
    renew: bool
    cache: str | conf.Unset
    unique_until: UniqueUntil | None
    sent_timeout: conf.Duration | conf.Unset
    on_duplicate: OnDuplicate | conf.Unset


def make_options(**given: Unpack[GivenOptions]) -> Options:
    """
    Return the options, or say which of them mean nothing.

    Raises:
        ConfigurationError: An option is unknown, or two contradict each other.
    """
    on_conflict = given.get("on_conflict", "skip")
    retry_delay = given.get("retry_delay", conf.UNSET)
    unique_until = given.get("unique_until")
    sent_timeout = given.get("sent_timeout", conf.UNSET)
    on_duplicate = given.get("on_duplicate", conf.UNSET)
    _check_choice("on_conflict", on_conflict, get_args(OnConflict))
    if not isinstance(retry_delay, conf.Unset) and on_conflict != "retry":
        raise ConfigurationError(
            f"retry_delay={retry_delay!r} has no meaning with on_conflict={on_conflict!r}, which "
            f'never retries. Leave it out, or set on_conflict="retry".'
        )
    patience = _checked_patience(given.get("blocking_timeout", conf.UNSET), on_conflict)
    delay = RETRY_DELAY if isinstance(retry_delay, conf.Unset) else retry_delay
    _check_unique(unique_until, sent_timeout, on_duplicate)
    return Options(
        key=checked_key(given.get("key", conf.UNSET)),
        lock=_checked_lock(given.get("lock", conf.UNSET)),
        on_conflict=on_conflict,
        timeout=_seconds_or_unset(given.get("timeout", conf.UNSET), "timeout"),
        retry_delay=conf.lease_seconds(delay, "retry_delay"),
        blocking_timeout=patience,
        renew=given.get("renew", True),
        cache=given.get("cache", conf.UNSET),
        unique_until=unique_until,
        sent_timeout=_seconds_or_unset(sent_timeout, "sent_timeout"),
        on_duplicate="existing" if isinstance(on_duplicate, conf.Unset) else on_duplicate,
    )


def check_call_options(given: Any) -> None:
    """
    Refuse options for one call that no task could follow.

    Raises:
        ConfigurationError: One is unknown, or can't travel in a message.
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"single_instance={given!r} is no dict of options for one call, such as "
            f'{{"key": "feed-42", "on_conflict": "retry"}}.'
        )
    for name, value in given.items():
        if name not in CALL_OPTIONS:
            close = difflib.get_close_matches(str(name), CALL_OPTIONS, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"single_instance has no option {name!r} for one call. It has: "
                f"{', '.join(CALL_OPTIONS)}.{guess}"
            )
        if name in _CALL_DURATIONS and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise ConfigurationError(
                f"single_instance has {name}={value!r} for one call: it travels in the message, "
                f"so give a number of seconds."
            )
        if name == "key" and (not isinstance(value, str | list | tuple) or value == ""):
            raise ConfigurationError(
                f"single_instance has key={value!r} for one call: it travels in the message, so "
                f"give a text that is not empty, or a list of argument names."
            )


def options_of_call(options: Options, given: Any) -> Options:
    """
    Return the options of one call: what the caller gave, over those of the task.

    Raises:
        ConfigurationError: One is unknown, can't travel, or contradicts another.
    """
    check_call_options(given)
    way = given.get("on_conflict", options.on_conflict)
    until = given.get("unique_until", options.unique_until)
    # What the task says of a way that this call does not go has no meaning here.
    as_task: dict[str, Any] = {
        "key": options.key,
        "lock": options.lock,
        "timeout": options.timeout,
        "renew": options.renew,
        "cache": options.cache,
        "on_conflict": way,
        "unique_until": until,
    }
    if way == options.on_conflict == "wait":
        as_task["blocking_timeout"] = options.blocking_timeout
    if way == options.on_conflict == "retry":
        as_task["retry_delay"] = options.retry_delay
    if until is not None:
        as_task["sent_timeout"] = options.sent_timeout
        as_task["on_duplicate"] = options.on_duplicate
    return make_options(**{**as_task, **given})


def check_key_names(
    function: Callable[..., Any], key: Key | conf.Unset, *, plain: bool = False
) -> None:
    """
    Refuse a key whose names are not arguments of ``function``.

    Args:
        plain: Whether a text that names none may be a key, as it may for one call.

    Raises:
        ConfigurationError: Naming the function, the name and what it may have meant.
    """
    if isinstance(key, conf.Unset) or callable(key):
        return
    # A functools.partial has no name, and may be made into a task that has.
    where = f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
    try:
        names = template_names(key) if isinstance(key, str) else list(key)
    except ValueError as error:
        raise ConfigurationError(
            f"The key {key!r} of {where} is no format string: {error}. A brace that is meant as "
            f"text is written twice."
        ) from error
    if isinstance(key, str) and not names and not plain:
        raise ConfigurationError(
            f"The key {key!r} of {where} names no argument, so every call would have the same. "
            f'Name one, as in key="{{feed_url}}"; for one lock over all calls write key=[].'
        )
    parameters = list(inspect.signature(function).parameters)
    # The task itself, by custom; call_key refuses it by any name.
    parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
    for name in names:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"The key {key!r} of {where} names {name!r}, which is not an argument of it. It "
                f"takes: {', '.join(parameters) or 'no arguments'}.{guess}"
            )


def template_names(template: str) -> list[str]:
    """
    Return the argument names that a format string uses, those in format specs too.

    Raises:
        ValueError: It is no format string.
    """
    names: list[str] = []
    for _, field, spec, conversion in string.Formatter().parse(template):
        if conversion not in _CONVERSIONS:
            raise ValueError(f"it has the conversion !{conversion}, and can have !r, !s or !a")
        if field is not None:
            names.append(field.partition(".")[0].partition("[")[0])
            names += template_names(spec or "")
    return names


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), choices, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(
        f"{name}={value!r} is not known; it can be {', '.join(map(repr, choices))}.{guess}"
    )


def _check_unique(unique_until: Any, sent_timeout: Any, on_duplicate: Any) -> None:
    if unique_until is not None:
        _check_choice("unique_until", unique_until, get_args(UniqueUntil))
        if not isinstance(on_duplicate, conf.Unset):
            _check_choice("on_duplicate", on_duplicate, get_args(OnDuplicate))
        return
    for name, value in (("sent_timeout", sent_timeout), ("on_duplicate", on_duplicate)):
        if not isinstance(value, conf.Unset):
            raise ConfigurationError(
                f"{name}={value!r} has no meaning without unique_until, since any number may be "
                f'sent then. Leave it out, or set unique_until="start" or "end".'
            )


def _checked_lock(lock: Any) -> str | conf.Unset:
    if isinstance(lock, conf.Unset):
        return lock
    # The locks of messages have that prefix.
    if isinstance(lock, str) and lock and lock.partition(":")[0] != "sent":
        return lock
    raise ConfigurationError(
        f"lock={lock!r} can't stand before the key in a lock's name: give a text that is not empty "
        f'and does not begin with "sent:", such as "reports".'
    )


def _seconds_or_unset(value: Any, what: str) -> float | conf.Unset:
    return conf.UNSET if isinstance(value, conf.Unset) else conf.lease_seconds(value, what)


def _checked_patience(blocking_timeout: Any, on_conflict: str) -> float:
    unset = isinstance(blocking_timeout, conf.Unset)
    if on_conflict != "wait":
        if unset:
            return 0.0
        raise ConfigurationError(
            f"blocking_timeout={blocking_timeout!r} has no meaning with on_conflict="
            f'{on_conflict!r}, which never waits. Leave it out, or set on_conflict="wait".'
        )
    seconds = None if unset else conf.wait_seconds(blocking_timeout, "blocking_timeout")
    if not seconds or math.isinf(seconds):
        given = "no blocking_timeout" if unset else f"blocking_timeout={blocking_timeout!r}"
        raise ConfigurationError(
            f'on_conflict="wait" with {given}: a run that waits holds a slot of its worker, so say '
            f"for how long at the most, in seconds above 0. To come back later without holding a "
            f'slot, set on_conflict="retry".'
        )
    return seconds


def checked_key(key: Any) -> Key | conf.Unset:
    """
    Return what says which calls are the same, ready to be kept.

    Raises:
        ConfigurationError: It can't say that.
    """
    if isinstance(key, (conf.Unset, str)):
        return key
    if callable(key):
        rule: Callable[..., Any] = key
        return rule
    if isinstance(key, Iterable):
        names = tuple(key)
        if all(isinstance(name, str) for name in names):
            return names
    raise ConfigurationError(
        f"key={key!r} can't say which calls are the same: give a format string over argument "
        f'names ("{{feed_url}}"), a list of argument names, or a function of the arguments.'
    )


#: The options of a task that is decorated without any, or not decorated.
DEFAULTS: Final = make_options()
