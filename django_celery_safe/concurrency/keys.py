"""
Keys of calls: two calls of a task with the same key count as the same.

A call's key is made from its arguments, bound to the task's signature with defaults
applied, in the form in which they arrive at the worker. So the key does not depend on
how the call was written, or on whether it is made when the task is sent or when it runs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

from celery.app.task import Context
from django.db.models import Model
from kombu.exceptions import SerializationError
from kombu.serialization import dumps, loads

from .. import conf
from ..delivery.call import inner_signature, own_signature
from ..exceptions import ConfigurationError, NotSerializable
from ..texts import describe_error
from .options import DEFAULTS, VARIABLE, Guarded, template_names

#: Takes any arguments: those of a message that something changes before the function gets them.
_ANY: Final = inspect.signature(lambda *args, **kwargs: None)

#: Hexadecimal digits of a hashed key; 128 bits.
DIGITS: Final = 32


def call_key(
    task_name: str,
    guarded: Guarded,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    serializer: str = "json",
    sent: Sequence[Any] | None = None,
    is_send: bool = False,
    is_digest: bool = False,
) -> str:
    """
    Return the key of one call, which is equal for calls that must not overlap.

    Args:
        guarded: The decorated function, for its signature, and the option ``key``.
        args: Positional arguments, without the ``self`` of a bound task.
        serializer: The task's serializer, which decides on the form of arguments in a message.
        sent: The values in the call's message; None: each value is from the message. Without
            ``key``, a value that is not from the message does not need an encoding.
        is_send: Whether the message is being sent, so a decorator or ``__call__`` may still
            change its arguments. If they don't fit, the key is made of all of them.
        is_digest: Whether to leave out values that are not from the message, and let values
            without an encoding count as the same.

    Raises:
        TypeError: The arguments don't fit the signature.
        NotSerializable: An argument of the key can't be sent.
        ConfigurationError: An argument of the key can be sent, but not encoded; the key function
            returned None or a value that can't be encoded; or the key names the task itself, or
            an argument that can't be told apart from others.
    """
    rule = guarded.options.key
    own, whole, names = _signatures(guarded.function, guarded.bound)
    is_usual = rule is conf.UNSET and not (kwargs or is_digest) and serializer == "json"
    if is_usual and names and len(names) == len(args) and all(map(_is_plain, args)):
        # Most calls are like that, and all that the others need takes ten times as long.
        return _digest("".join(map(operator.add, names, map(encode, args))))
    call = _bind((whole, own, _ANY) if is_send else (whole, own), args, kwargs)
    given = set(call.arguments)
    call.apply_defaults()
    if isinstance(rule, str | tuple):
        # Sorted: a set's order differs between processes.
        wanted = sorted(set(template_names(rule) if isinstance(rule, str) else rule))
        named = _find_named(task_name, whole, call, wanted, is_send=is_send)
        if named is None:
            rule = conf.UNSET
        else:
            call.arguments = named
    elif call.signature is _ANY:
        rule = conf.UNSET
    raw = dict(call.arguments)
    for name, value in raw.items():
        call.arguments[name] = to_wire(value, serializer)
    if isinstance(rule, str):
        return str(to_wire(_fill_in(task_name, rule, call.arguments), "json"))
    if callable(rule):
        return _from_function(task_name, rule, call)
    # Values are known by their ids: those of the message are the very objects in it.
    in_message, left_out = set(map(id, sent or ())), set[int]()
    parts = list[str]()
    for name, value in raw.items():
        inside = set(map(id, _parts(value)))
        is_from_message = sent is None or id(value) in in_message or inside <= in_message
        try:
            part = encode(name) + encode(call.arguments[name])
            if is_digest and name in given and not is_from_message:
                continue
        except (TypeError, RecursionError) as error:
            # A default without an encoding, which is not in the message, is the same in all calls.
            if name in given and not is_digest:
                if is_from_message or not isinstance(rule, conf.Unset):
                    raise _refuse(task_name, name, value, serializer, error) from error
                left_out |= inside
            part = encode(name) + "default"
        parts.append(part)
    if left_out:
        # A value that does not count may have been made of those that the function never got, or
        # have some of them beside it.
        got = set(map(id, (*args, *kwargs.values()))) - left_out
        parts += [encode(to_wire(one, serializer)) for one in sent or () if id(one) not in got]
    return _digest("".join(parts))


def key_and_digest(task_name: str, guarded: Guarded, **call: Any) -> tuple[str, str]:
    """
    Return the key of a call, and a hash of its arguments; "": the key is made of all of them.

    Arguments that can't be encoded, such as a method's self, are not part of the hash.
    """
    key = call_key(task_name, guarded, **call)
    if guarded.options.key is conf.UNSET:
        return key, ""
    return key, call_key(task_name, guarded._replace(options=DEFAULTS), is_digest=True, **call)


def _parts(value: Any) -> Collection[Any]:
    """Return the values of which an argument is made: many for ``*args`` and ``**kwargs``."""
    if type(value) is dict:
        return value.values()
    return value if type(value) is tuple else (value,)


def _fill_in(task_name: str, template: str, arguments: Mapping[str, Any]) -> str:
    try:
        return template.format_map({name: _in_order(arguments[name]) for name in arguments})
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        advice = "Leave out the format, or give a list of names."
        if isinstance(error, AttributeError):
            advice = (
                "Arguments are plain data in a key, as in the message: pass what the key needs, "
                "for example user_id, and write {user_id}."
            )
        raise ConfigurationError(
            f"The key {template!r} of task {task_name} can't be made from these arguments: "
            f"{describe_error(error)}. {advice}"
        ) from error


def _in_order(value: Any) -> Any:
    """Return ``value`` with the items of its dicts in order, so that equal dicts look alike."""
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return {name: _in_order(item) for name, item in items}
    return [_in_order(item) for item in value] if type(value) is list else value


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
        # These are in no message: a decorator or Celery passes them to the function.
        case Model() if value.pk is not None:
            return f"m{value._meta.label_lower};{encode(value.pk)}"
        case Context():
            return f"r{encode(value.id)}"
    raise TypeError(f"a {type(value).__name__}")


def _from_function(task_name: str, rule: Callable[..., Any], call: inspect.BoundArguments) -> str:
    try:
        key = rule(*call.args, **call.kwargs)
    except Exception as error:
        note = f"Raised by the key function {rule!r}, which gets all arguments of task {task_name}."
        error.add_note(note)
        raise
    if isinstance(key, str):
        return str(to_wire(str.__str__(key), "json"))
    try:
        if key is None:
            raise TypeError(key)
        return _digest(encode(to_wire(key, "json")))
    except (TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"The key function {rule!r} of task {task_name} returned {error}. Return a str, or any "
            f"plain value, that is equal for calls that must not run at once."
        ) from error


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a single one that JSON certainly delivers unchanged."""
    if type(value) is str:
        return value.isascii()  # in other strings, JSON may join two surrogates
    return value is None or type(value) in (int, bool)


def _digest(text: str) -> str:
    # SHA-256 takes longer to begin: OpenSSL looks it up each time.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGITS // 2).hexdigest()


def _bind(
    signatures: Sequence[inspect.Signature], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind a call by the first signature that it fits; the first raises the error if none does."""
    for signature in signatures:
        with suppress(TypeError):
            return signature.bind(*args, **kwargs)
    return signatures[0].bind(*args, **kwargs)


def _find_named(
    task_name: str,
    whole: inspect.Signature,
    call: inspect.BoundArguments,
    names: Sequence[str],
    *,
    is_send: bool,
) -> dict[str, Any] | None:
    """
    Return the named arguments of a call; None: a message that is sent does not have them.

    A decorator with ``*args`` and ``**kwargs`` may add arguments before those of the call, or by
    name. So an argument of the call that is given by position is the named one only if no other
    could be.

    Raises:
        TypeError: The call does not have them.
        ConfigurationError: A name is the task itself; or it is not certain which argument it is.
    """
    if call.arguments.keys() >= set(names):
        return {name: call.arguments[name] for name in names}
    for name in names:
        if name not in call.arguments and name not in whole.parameters:
            raise ConfigurationError(
                f"The key of task {task_name} names {name!r}, which is the task itself (bind=True) "
                f"and the same in all calls. Leave it out."
            )
    given, positional = dict(call.arguments), ()
    for name in call.arguments:
        kind = call.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional = given.pop(name)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name)
    rest = [one for name, one in whole.parameters.items() if name not in given]
    places = [one.name for one in rest if one.kind <= one.POSITIONAL_OR_KEYWORD]
    defaults = {one.name: one.default for one in rest if one.default is not one.empty}
    readings = dict[tuple[int, ...], dict[str, Any]]()
    for added in range(len(places) - len(positional) + 1):
        values = {**defaults, **dict(zip(places[added:], positional, strict=False)), **given}
        if values.keys() >= set(names):
            reading = {name: values[name] for name in names}
            readings[tuple(map(id, reading.values()))] = reading
    if len(readings) == 1:
        return readings.popitem()[1]
    if is_send and (not readings or call.signature is _ANY):
        return None
    if not readings:
        raise TypeError(f"an argument of the key is missing: {', '.join(names)}")
    raise ConfigurationError(
        f"The key of task {task_name} names {', '.join(names)}, but a decorator below adds "
        f"arguments, so it is not certain which of {positional!r:.100} that is. Pass the arguments "
        f"of the key by name, or put that decorator above."
    )


def _refuse(
    task_name: str, name: str, value: Any, serializer: str, error: Exception
) -> ConfigurationError | NotSerializable:
    """Return the error for an argument that has no encoding, although the key needs it."""
    if isinstance(error, TypeError):
        with suppress(Exception):  # serializers raise what they like
            dumps(value, serializer)
            return ConfigurationError(
                f"The key of task {task_name} can't be made of its argument {name}, which is or "
                f"holds {error}: the serializer {serializer!r} can send it, but it has no form "
                f"that is surely the same for equal values. Choose the arguments that count with "
                f'key=["…"], or make a text of it yourself with key=lambda …: ….'
            )
    hint = "Send its primary key or plain data instead, or choose the arguments that count with "
    return NotSerializable(task_name, name, str(error), hint + 'key=["…"].')


@lru_cache(maxsize=1024)
def _signatures(
    function: Callable[..., Any], bound: bool
) -> tuple[inspect.Signature, inspect.Signature, tuple[str, ...] | None]:
    """
    Return the signatures by which the arguments of a function get their names.

    Returns:
        That of the function itself; that of the function which it wraps, if its own says less,
        otherwise its own; and the names in the latter, encoded for a key, None if not all
        arguments can be given by position.
    """
    # A decorator with *args and **kwargs usually passes its arguments on as they are. If a call
    # does not fit the wrapped function, the decorator changes them.
    own = _without_task(own_signature(function), bound)
    whole = _without_task(inner_signature(function), bound)
    named = {name for name, parameter in own.parameters.items() if parameter.kind not in VARIABLE}
    if len(named) == len(own.parameters) or not named <= whole.parameters.keys():
        whole = own
    if any(one.kind > one.POSITIONAL_OR_KEYWORD for one in whole.parameters.values()):
        return own, whole, None
    return own, whole, tuple(map(encode, whole.parameters))


def _without_task(signature: inspect.Signature, bound: bool) -> inspect.Signature:
    first = next(iter(signature.parameters.values()), None)
    if not bound or first is None or first.kind is first.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])
