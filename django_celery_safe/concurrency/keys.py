"""
Keys of calls: two calls of a task with the same key count as the same.

A call's key is made from its arguments, bound to the task's signature with defaults
applied, in the form in which they arrive at the worker. So the key does not depend on
how the call was written, or on whether it is made when the task is sent or when it runs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from kombu.exceptions import SerializationError
from kombu.serialization import dumps, loads

from .. import conf
from ..exceptions import ConfigurationError, NotSerializable
from ..foreign_errors import describe_error
from .options import Key, template_names

#: Hexadecimal digits of a hashed key; 128 bits.
DIGITS: Final = 32

_BY_POSITION: Final = frozenset(
    {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
)

_HINT: Final = (
    'Send its primary key or plain data instead, or choose the arguments that count with key=["…"].'
)
_KEY_HINT: Final = (
    'Choose the arguments that count with key=["…"], or make a text of it yourself with '
    "key=lambda …: …."
)


class ArgumentsDontFit(TypeError):
    """The arguments of a call don't fit the task's signature."""


def call_key(
    task_name: str,
    function: Callable[..., Any],
    rule: Key | conf.Unset,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    bound: bool = False,
    serializer: str = "json",
    strict: bool = True,
) -> str:
    """
    Return the key of one call, which is equal for calls that must not overlap.

    Args:
        function: The task's own function, for its signature.
        rule: The option ``key`` of ``single_instance``.
        args: Positional arguments, without the ``self`` of a bound task.
        bound: Whether the function's first parameter is the task.
        serializer: The task's serializer, which decides on the form of arguments in a message.
        strict: Whether to raise for an argument that can't be encoded, instead of ignoring its
            value.

    Raises:
        ArgumentsDontFit: The arguments don't fit the signature.
        NotSerializable: An argument of the key can't be sent.
        ConfigurationError: An argument of the key can be sent, but not encoded;
            the key function returned None or a value that can't be encoded; or the key
            names the task itself.
    """
    try:
        call = _bind(function, bound, args, kwargs)
    except TypeError as error:
        raise ArgumentsDontFit(*error.args) from error
    given = set(call.arguments)
    if len(given) < len(call.signature.parameters):
        call.apply_defaults()
    names = list(call.arguments) if isinstance(rule, conf.Unset) or callable(rule) else _names(rule)
    for name in names:
        if name not in call.arguments:
            raise ConfigurationError(
                f"The key of task {task_name} names {name!r}, which is the task itself (bind=True) "
                f"and the same in all calls. Leave it out."
            )
        call.arguments[name] = to_wire(call.arguments[name], serializer)
    if isinstance(rule, str):
        return str(to_wire(_fill_in(task_name, rule, call.arguments), "json"))
    if callable(rule):
        return _from_function(task_name, rule, call)
    parts = []
    for name in names:
        value = call.arguments[name]
        try:
            parts.append(encode(name) + encode(value))
        except (TypeError, RecursionError) as error:
            if strict and name in given:
                if isinstance(error, TypeError) and _can_be_sent(value, serializer):
                    raise ConfigurationError(
                        f"The key of task {task_name} can't be made of its argument {name}, which "
                        f"is or holds {error}: the serializer {serializer!r} can send it, but it "
                        f"has no form that is surely the same for equal values. {_KEY_HINT}"
                    ) from error
                raise NotSerializable(task_name, name, str(error), _HINT) from error
            # Use no value: a default is not in the message, so it is the same in all calls; and
            # without ``strict`` the value does not count.
            parts.append(encode(name) + "default")
    return _digest("".join(parts))


def _can_be_sent(value: Any, serializer: str) -> bool:
    try:
        dumps(value, serializer)
    except Exception:  # noqa: BLE001 - serializers raise what they like
        return False
    return True


def _fill_in(task_name: str, template: str, arguments: Mapping[str, Any]) -> str:
    try:
        return template.format_map(arguments)
    except AttributeError as error:
        raise ConfigurationError(
            f"The key {template!r} of task {task_name} can't be made from these arguments: "
            f"{describe_error(error)}. Arguments are plain data in a key, as in the message: pass "
            f"what the key needs, for example user_id, and write {{user_id}}."
        ) from error
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigurationError(
            f"The key {template!r} of task {task_name} can't be made from these arguments: "
            f"{describe_error(error)}. Leave out the format, or give a list of names."
        ) from error


def to_wire(value: Any, serializer: str) -> Any:
    """Return ``value`` as the serializer delivers it; unchanged if it can't be sent."""
    try:
        if serializer == "json" and _is_plain(value):
            return value
        content_type, encoding, data = dumps(value, serializer)
        return loads(data, content_type, encoding, accept={content_type})
    except (SerializationError, TypeError, ValueError, RecursionError):
        return value


def encode(value: Any) -> str:
    """
    Encode a value so that equal text means equal type and value.

    Tuples and lists are encoded alike, because JSON has only lists; the order of dicts and
    sets does not matter. Raises TypeError for a value that can't be encoded this way.
    """
    match value:
        case None:
            return "N"
        case bool():
            return "T" if value else "F"
        case int():
            # Hexadecimal, because Python refuses to print very large ints in decimal.
            # Through the type, because an Enum member formats itself differently.
            return f"i{int.__format__(value, 'x')};"
        case float():
            return f"f{float.__repr__(value)};"
        case str():
            return f"s{len(value)}:{str.__str__(value)}"
        case bytes():
            return f"b{value.hex()};"
        case list() | tuple():
            return "[" + "".join(map(encode, value)) + "]"
        case dict():
            return "{" + "".join(sorted(encode(k) + encode(v) for k, v in value.items())) + "}"
        case set() | frozenset():
            return "<" + "".join(sorted(map(encode, value))) + ">"
        case time() if value.tzinfo is not None and value.utcoffset() is None:
            return f"time{value.isoformat()} {value.tzinfo};"
        case datetime() | date() | time():
            return f"{type(value).__name__}{value.isoformat()};"
        case timedelta() | Decimal() | UUID():
            return f"{type(value).__name__}{value};"
    raise TypeError(f"a {type(value).__name__}")


def _from_function(task_name: str, rule: Callable[..., Any], call: inspect.BoundArguments) -> str:
    try:
        key = rule(*call.args, **call.kwargs)
    except Exception as error:
        error.add_note(f"Raised by the key function {rule!r} of task {task_name}.")
        raise
    if key is None:
        raise ConfigurationError(
            f"The key function {rule!r} of task {task_name} returned None. Return a str, or any "
            f"plain value, that is equal for calls that must not run at once."
        )
    if isinstance(key, str):
        return str(to_wire(str.__str__(key), "json"))
    try:
        return _digest(encode(to_wire(key, "json")))
    except (TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"The key function {rule!r} of task {task_name} returned {error}. Return a str, or any "
            f"plain value, that is equal for calls that must not run at once."
        ) from error


# Cached: parsing a template takes longer than filling it in.
_names_of = lru_cache(maxsize=1024)(template_names)


def _names(rule: Any) -> list[str]:
    names = _names_of(rule) if isinstance(rule, str) else rule
    # Sorted: a set's order differs between processes.
    return sorted(set(names))


def _is_plain(value: Any) -> bool:
    """Return whether JSON certainly delivers ``value`` unchanged."""
    kind = type(value)
    if kind is str:
        return str.isascii(value)  # in other strings, JSON may join two surrogates
    if value is None or kind in (int, bool):
        return True
    if kind is list:
        return all(map(_is_plain, value))
    if kind is dict and "__type__" not in value:  # kombu's marker for other types
        return all(
            type(key) is str and _is_plain(key) and _is_plain(item) for key, item in value.items()
        )
    return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def _bind(
    function: Callable[..., Any], bound: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    signature, names = _signature(function, bound)
    if kwargs or names is None or len(args) != len(names):
        return signature.bind(*args, **kwargs)
    # Most calls give all arguments by position, and bind() would take three times as long.
    return inspect.BoundArguments(signature, OrderedDict(zip(names, args, strict=True)))


@lru_cache(maxsize=1024)
def _signature(
    function: Callable[..., Any], bound: bool
) -> tuple[inspect.Signature, tuple[str, ...] | None]:
    """Return a signature and its names; None: not all arguments can be given by position."""
    signature = inspect.signature(function)
    if bound:
        first, *others = signature.parameters.values()
        if first.kind is not first.VAR_POSITIONAL:
            signature = signature.replace(parameters=others)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return signature, tuple(signature.parameters) if kinds <= _BY_POSITION else None
