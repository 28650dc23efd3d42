"""What ``@single_instance`` can be told, checked when the module is imported."""

from __future__ import annotations

import difflib
import inspect
import math
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from .. import conf
from ..exceptions import ConfigurationError

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "reject", "raise"]
Key: TypeAlias = str | Sequence[str] | Callable[..., Any]

#: Seconds after which ``on_conflict="retry"`` comes back, before jitter.
RETRY_DELAY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one ``@single_instance``, valid and with defaults applied."""

    key: Key | conf.Unset
    on_conflict: OnConflict
    timeout: float | conf.Unset
    retry_delay: float
    #: Longest time to wait, s; 0 unless on_conflict is "wait".
    blocking_timeout: float
    renew: bool
    cache: str | conf.Unset


def make_options(
    *,
    key: Key | conf.Unset,
    on_conflict: str,
    timeout: conf.Duration | conf.Unset,
    retry_delay: conf.Duration | conf.Unset,
    blocking_timeout: conf.Duration | conf.Unset,
    renew: bool,
    cache: str | conf.Unset,
) -> Options:
    """
    Return the options, or say which of them mean nothing.

    Raises:
        ConfigurationError: An option is unknown, or two contradict each other.
    """
    ways = get_args(OnConflict)
    if on_conflict not in ways:
        close = difflib.get_close_matches(str(on_conflict), ways, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"on_conflict={on_conflict!r} is not known; it can be {', '.join(map(repr, ways))}."
            f"{guess}"
        )
    if not isinstance(retry_delay, conf.Unset) and on_conflict != "retry":
        raise ConfigurationError(
            f"retry_delay={retry_delay!r} has no meaning with on_conflict={on_conflict!r}, which "
            f'never retries. Leave it out, or set on_conflict="retry".'
        )
    patience = _checked_patience(blocking_timeout, on_conflict)
    delay = RETRY_DELAY if isinstance(retry_delay, conf.Unset) else retry_delay
    unset = isinstance(timeout, conf.Unset)
    return Options(
        key=_checked_key(key),
        on_conflict=on_conflict,  # type: ignore[arg-type]
        timeout=conf.UNSET if unset else conf.lease_seconds(timeout, "timeout"),
        retry_delay=conf.lease_seconds(delay, "retry_delay"),
        blocking_timeout=patience,
        renew=renew,
        cache=cache,
    )


def check_key_names(function: Callable[..., Any], key: Key | conf.Unset) -> None:
    """
    Refuse a key whose names are not arguments of ``function``.

    Raises:
        ConfigurationError: Naming the function, the name and what it may have meant.
    """
    if isinstance(key, conf.Unset) or callable(key):
        return
    where = f"{function.__module__}.{function.__qualname__}"
    try:
        names = template_names(key) if isinstance(key, str) else list(key)
    except ValueError as error:
        raise ConfigurationError(
            f"The key {key!r} of {where} is no format string: {error}. A brace that is meant as "
            f"text is written twice."
        ) from error
    if isinstance(key, str) and not names:
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
    """Return the argument names that a format string uses, those in format specs too."""
    names: list[str] = []
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is not None:
            names.append(field.partition(".")[0].partition("[")[0])
            names += template_names(spec or "")
    return names


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


def _checked_key(key: Any) -> Key | conf.Unset:
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
