"""The options of ``@single_instance``, checked when the module is imported."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, get_args

from .. import conf
from ..delivery.call import inner_signature, own_signature
from ..exceptions import ConfigurationError

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "reject", "raise"]
UniqueUntil: TypeAlias = Literal["start", "end"]
Key: TypeAlias = str | Sequence[str] | Callable[..., Any]

#: Options that one call may override; their values are plain data, sent in the message.
CALL_OPTIONS: Final = ("key", "lock", "on_conflict", "timeout", "blocking_timeout", "retry_delay")
#: Those of CALL_OPTIONS that are durations.
_CALL_DURATIONS: Final = ("timeout", "blocking_timeout", "retry_delay")

#: Options that only one ``on_conflict`` has.
_ONLY_WITH: Final = {"retry_delay": "retry", "blocking_timeout": "wait"}

#: How long a run with ``on_conflict="wait"`` may wait.
_IN_A_SLOT: Final = conf.WAIT._replace(
    limits='above 0: with on_conflict="wait" a run holds a slot of its worker, with "retry" none',
    least=conf.ABOVE_0,
)

#: Kinds of parameters that take any number of arguments.
VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Options(NamedTuple):
    """The validated options of one ``@single_instance``, with defaults applied."""

    key: Key | conf.Unset = conf.UNSET
    #: The part before the key in the lock's name; unset: the task's name.
    lock: str | conf.Unset = conf.UNSET
    #: How many runs may hold the lock at once.
    limit: int = 1
    on_conflict: OnConflict = "skip"
    timeout: float | conf.Unset = conf.UNSET
    #: Seconds until the retry of ``on_conflict="retry"``, before jitter.
    retry_delay: float = 5.0
    #: Longest time to wait, s; 0 unless on_conflict is "wait".
    blocking_timeout: float = 0.0
    #: A number is a period, s.
    unique_until: UniqueUntil | float | None = None


#: The options of a task that is decorated without options, or not decorated.
DEFAULTS: Final = Options()


class GivenOptions(TypedDict, total=False):
    """The options of ``@single_instance``; each has a default."""

    key: Key | conf.Unset
    lock: str | conf.Unset
    limit: int
    on_conflict: OnConflict
    timeout: conf.Duration | conf.Unset
    retry_delay: conf.Duration | conf.Unset
    blocking_timeout: conf.Duration | conf.Unset
    unique_until: UniqueUntil | conf.Duration | None


class Guarded(NamedTuple):
    """
    The function that ``@single_instance`` decorated in a task.

    Attributes:
        function: The decorated function.
        options: The options of the decorator, or those for one call.
        bound: Whether the function gets the task as its first argument.
    """

    function: Callable[..., Any]
    options: Options
    bound: bool


def make_options(**given: Unpack[GivenOptions]) -> Options:
    """
    Return the validated options, with defaults applied.

    Raises:
        ConfigurationError: An option is not valid, or two contradict each other.
    """
    values = {name: value for name, value in given.items() if value is not conf.UNSET}
    if values.get("on_conflict") == "wait":
        values.setdefault("blocking_timeout", None)
    valid: dict[str, Any] = {name: _CHECKS[name](value, name) for name, value in values.items()}
    options = Options(**valid)
    for name, way in _ONLY_WITH.items():
        if name in valid and way != options.on_conflict:
            raise ConfigurationError(
                f"{name}={values[name]!r} has no meaning with on_conflict={options.on_conflict!r}. "
                f'Leave it out, or set on_conflict="{way}".'
            )
    if options.limit > 1 and options.unique_until == "end":
        raise ConfigurationError(
            f'limit={options.limit} has no meaning with unique_until="end": the same is not sent '
            f'again while one runs. Leave one of them out, or set unique_until="start".'
        )
    return options


def check_call_options(given: Any) -> None:
    """
    Refuse options for one call that are not valid for any task.

    Raises:
        ConfigurationError: An option is unknown, or can't be sent in a message.
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"single_instance={given!r} is not a dict of options for one call, such as "
            f'{{"key": "feed-42", "on_conflict": "retry"}}.'
        )
    for name, value in given.items():
        if name not in CALL_OPTIONS:
            raise ConfigurationError(
                f"single_instance has no option {name!r} for one call. It has: "
                f"{', '.join(CALL_OPTIONS)}.{conf.did_you_mean(name, CALL_OPTIONS)}"
            )
        kinds = (int, float) if name in _CALL_DURATIONS else (str, list, tuple)
        if not isinstance(value, kinds) or isinstance(value, bool) or value == "":
            raise ConfigurationError(
                f"single_instance has {name}={value!r} for one call: it travels in the message, so "
                f"give a number of seconds, a text that is not empty, or a list of argument names."
            )


def options_of_call(options: Options, given: Any) -> Options:
    """
    Return the options of one call: the caller's options override the task's.

    Raises:
        ConfigurationError: An option is unknown, can't be sent, or contradicts another option.
    """
    check_call_options(given)
    way, as_task = given.get("on_conflict", options.on_conflict), options._asdict()
    # Leave out options of the task that don't fit this call's on_conflict.
    for name, fits in _ONLY_WITH.items():
        if not way == options.on_conflict == fits:
            del as_task[name]
    return make_options(**as_task | given)


def check_key_names(
    function: Callable[..., Any], key: Key | conf.Unset, *, plain: bool = False
) -> None:
    """
    Refuse a key whose names are not arguments of ``function``.

    Args:
        plain: Whether a text that names no arguments may be a key, as for one call.

    Raises:
        ConfigurationError: A name is not an argument; the error suggests a similar name.
    """
    if isinstance(key, conf.Unset) or callable(key):
        return
    # A functools.partial has no name, but a task made from it has.
    where = f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
    try:
        names = template_names(key) if isinstance(key, str) else list(key)
    except ValueError as error:
        raise ConfigurationError(
            f"The key {key!r} of {where} is not a format string: {error}. A brace that is meant as "
            f"text is written twice."
        ) from error
    if isinstance(key, str) and not names and not plain:
        raise ConfigurationError(
            f"The key {key!r} of {where} names no argument, so every call would have the same. "
            f'Name one, as in key="{{feed_url}}"; for one lock over all calls write key=[].'
        )
    parameters = dict.fromkeys(inner_signature(function).parameters)
    # A decorator below may have arguments of its own, and pass on the others.
    own = own_signature(function).parameters.values()
    parameters |= dict.fromkeys(one.name for one in own if one.kind not in VARIABLE)
    # By convention "self" is the task itself; call_key refuses the task under any name.
    parameters.pop("self", None)
    for name in names:
        if name not in parameters:
            raise ConfigurationError(
                f"The key {key!r} of {where} names {name!r}, which is not an argument of it. It "
                f"takes: {', '.join(parameters) or 'no arguments'}."
                f"{conf.did_you_mean(name, parameters)}"
            )


@lru_cache(maxsize=1024)  # parsing a template takes longer than filling it in
def template_names(template: str) -> list[str]:
    """
    Return the argument names that a format string uses, including those in format specs.

    Raises:
        ValueError: The text is not a format string.
    """
    names: list[str] = []
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is not None:
            names.append(field.partition(".")[0].partition("[")[0])
            names += template_names(spec or "")
    return names


def checked_key(key: Any, name: str = "key") -> Key | conf.Unset:
    """
    Return the ``key`` option, validated; a list of names becomes a tuple.

    Raises:
        ConfigurationError: The key is not valid.
    """
    if isinstance(key, (conf.Unset, str)) or callable(key):
        valid: Key | conf.Unset = key
        return valid
    if isinstance(key, list | tuple) and all(isinstance(part, str) for part in key):
        return tuple(key)
    raise ConfigurationError(
        f"{name}={key!r} can't say which calls are the same: give a format string over argument "
        f'names ("{{feed_url}}"), a list of argument names, or a function of the arguments.'
    )


def _checked_lock(lock: Any, name: str) -> str:
    # The names of messages' locks start with "sent:".
    if isinstance(lock, str) and lock and lock.partition(":")[0] != "sent":
        return lock
    raise ConfigurationError(
        f"{name}={lock!r} can't stand before the key in a lock's name: give a text that is not "
        f'empty and does not begin with "sent:", such as "reports".'
    )


def _checked_choice(value: Any, name: str, choices: Sequence[str] = get_args(OnConflict)) -> Any:
    if value in choices:
        return value
    raise ConfigurationError(
        f"{name}={value!r} is not known; it can be {', '.join(map(repr, choices))}."
        f"{conf.did_you_mean(value, choices)}"
    )


def _checked_unique_until(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return _checked_choice(value, name, get_args(UniqueUntil))
    return conf.LEASE.seconds_or_none(value, name)


#: The check of each option: gets its value and its name, and returns the valid value.
_CHECKS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "key": checked_key,
    "lock": _checked_lock,
    "limit": lambda value, _: conf.lock_limit(value),
    "on_conflict": _checked_choice,
    "timeout": conf.LEASE.seconds,
    "retry_delay": conf.LEASE.seconds,
    "blocking_timeout": _IN_A_SLOT.seconds,
    "unique_until": _checked_unique_until,
}
