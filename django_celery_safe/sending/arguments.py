"""Which values can't travel in a message, found before the message is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.db.models import Model, QuerySet
from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from ..exceptions import NotSerializable


def check_arguments(
    task: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> None:
    """
    Refuse what must not travel in a message, however it is serialized.

    A model instance would be a stale copy of its row, a QuerySet would be run
    at some unknown time, and an iterator can be read only once.

    Raises:
        NotSerializable: Naming the argument, nested ones too.
    """
    for place, value in _places(args, kwargs):
        found = _find_unsendable(value, set())
        if found is not None:
            raise NotSerializable(task, place, *found)


def serialize(task: str, body: Any, serializer: str) -> tuple[str, str, Any]:
    """
    Return content type, encoding and data of a message's body.

    Raises:
        NotSerializable: Naming the argument that the serializer refused.
    """
    args, kwargs, *embedded = body
    check_arguments(task, args, kwargs)
    check_arguments(task, (), {"link or chain": embedded})
    try:
        content_type, encoding, data = dumps(body, serializer=serializer)
    except EncodeError as error:
        raise _explain(task, args, kwargs, serializer, error) from error
    return content_type, encoding, data


def _explain(
    task: str, args: Any, kwargs: Any, serializer: str, error: EncodeError
) -> NotSerializable:
    for place, value in _places(args, kwargs):
        try:
            dumps(value, serializer=serializer)
        except EncodeError as refused:
            hint = f"The serializer {serializer!r} says: {refused}. Send plain data instead."
            return NotSerializable(task, place, _name(value), hint)
    return NotSerializable(task, "the message", "made of something", f"It says: {error}.")


def _places(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args or ()):
        yield f"args[{index}]", value
    for name, value in (kwargs or {}).items():
        yield f"kwargs[{name!r}]", value


def _find_unsendable(value: Any, seen: set[int]) -> tuple[str, str] | None:
    """Return what was found and what to send instead; None if nothing was."""
    if value is None or isinstance(value, str | int | float | bytes):
        return None
    if isinstance(value, Model):
        return (
            _name(value),
            "Pass the primary key, and read the row again in the task, where it is fresh.",
        )
    if isinstance(value, QuerySet):
        return (
            f"a QuerySet of {value.model.__name__}",
            "Pass a list of primary keys: list(queryset.values_list('pk', flat=True)).",
        )
    if isinstance(value, Iterator):
        return f"a {type(value).__name__}, which can be read only once", "Pass a list."
    if isinstance(value, Mapping):
        items: Any = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return None
    if id(value) in seen:
        return None
    seen.add(id(value))
    return next((found for item in items if (found := _find_unsendable(item, seen))), None)


def _name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name} instance"
