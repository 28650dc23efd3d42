"""Arguments of which a key is not made at once: a decorator adds some, or they have no encoding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kombu.serialization import dumps

from ..exceptions import ConfigurationError, NotSerializable

#: The kinds of parameters that can be given by position.
BY_POSITION: Final = frozenset(
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


def find_named(
    task_name: str,
    whole: inspect.Signature,
    call: inspect.BoundArguments,
    names: Sequence[str],
    *,
    is_send: bool,
    fits: bool,
) -> dict[str, Any] | None:
    """
    Return the named arguments of a call; None: a message that is sent does not have them.

    A decorator with ``*args`` and ``**kwargs`` may add arguments before those of the call, or by
    name. So an argument of the call that is given by position is the named one only if no other
    could be.

    Args:
        whole: The signature that has the names.
        fits: Whether the arguments of the call fit a signature.

    Raises:
        ArgumentsDontFit: The call does not have them.
        ConfigurationError: A name is the task itself; or it is not certain which argument it is.
    """
    for name in names:
        if name not in call.arguments and name not in whole.parameters:
            raise ConfigurationError(
                f"The key of task {task_name} names {name!r}, which is the task itself (bind=True) "
                f"and the same in all calls. Leave it out."
            )
    parameters = call.signature.parameters
    given, positional = dict(call.arguments), ()
    for name in call.arguments:
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            positional = given.pop(name)
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name)
    places = [
        name
        for name, parameter in whole.parameters.items()
        if parameter.kind in BY_POSITION and name not in given
    ]
    defaults = {
        name: parameter.default
        for name, parameter in whole.parameters.items()
        if parameter.default is not parameter.empty
    }
    readings = []
    for added in range(len(places) - len(positional) + 1):
        values = {**defaults, **dict(zip(places[added:], positional, strict=False)), **given}
        if all(name in values for name in names):
            readings.append({name: values[name] for name in names})
    if readings and all(_is_same(reading, readings[0]) for reading in readings):
        return readings[0]
    if is_send and (not readings or not fits):
        return None
    if not readings:
        raise ArgumentsDontFit(f"an argument of the key is missing: {', '.join(names)}")
    raise ConfigurationError(
        f"The key of task {task_name} names {', '.join(names)}, but a decorator below adds "
        f"arguments, so it is not certain which of {positional!r:.100} that is. Pass the arguments "
        f"of the key by name, or put that decorator above."
    )


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(value is other[name] for name, value in one.items())


def refuse(
    task_name: str, name: str, value: Any, serializer: str, error: Exception
) -> ConfigurationError | NotSerializable:
    """Return the error for an argument that has no encoding, although the key needs it."""
    if isinstance(error, TypeError) and _can_be_sent(value, serializer):
        return ConfigurationError(
            f"The key of task {task_name} can't be made of its argument {name}, which "
            f"is or holds {error}: the serializer {serializer!r} can send it, but it "
            f"has no form that is surely the same for equal values. {_KEY_HINT}"
        )
    return NotSerializable(task_name, name, str(error), _HINT)


def _can_be_sent(value: Any, serializer: str) -> bool:
    try:
        dumps(value, serializer)
    except Exception:  # noqa: BLE001 - serializers raise what they like
        return False
    return True
