"""The header that this package adds to a task's message: a dict of plain values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

from ..texts import get_logger

logger = get_logger(__name__)

#: The message header that carries every field of this package.
HEADER: Final = "django_celery_safe"

_TOKEN: Final = re.compile("[0-9a-f]{32}")


#: The plain values, by field. ``task`` names the task that the message is for, since headers
#: get copied to others. Each of the others may be missing, and is declared by the room that
#: uses it.
Header: TypeAlias = dict[str, Any]


class Field(NamedTuple):
    """
    The rule for a value of the header.

    Attributes:
        is_valid: Returns whether a value can be ours.
        is_given: Whether the caller of a send may set the field. The send drops the others
            from the caller's header, and sets them itself.
    """

    is_valid: Callable[[Any], bool]
    is_given: bool


_fields: Final[dict[str, Field]] = {}
#: The header of each message that runs, for as long as Celery keeps its request.
_headers: Final[WeakKeyDictionary[Any, Header]] = WeakKeyDictionary()


def declare_field(name: str, is_valid: Callable[[Any], bool], *, is_given: bool = False) -> None:
    """Let messages carry a value under this name; see :class:`Field`."""
    _fields[name] = Field(is_valid, is_given)


def read_given_fields(headers: Mapping[str, Any] | None, task: str) -> Header:
    """Return the fields that the caller of a send has set; empty if there are none."""
    header = read_header(headers, task)
    given = {name: header[name] for name in header if name in _fields and _fields[name].is_given}
    return {"task": header["task"], **given} if given else {}


def read_header(headers: Mapping[str, Any] | None, task: str | None) -> Header:
    """
    Return what of ours is in the headers of a message for ``task``.

    Anyone may have written it: what can't be ours is left out, with a warning.
    """
    found = headers.get(HEADER) if headers else None
    if found is None:
        return Header()
    if type(found) is not dict and not isinstance(found, Mapping):
        logger.warning("The header %r of a message for %s is no dict.", HEADER, task)
        return Header()
    if found.get("task") != task:
        return Header()  # copied from another message, along with its other headers
    wrong = [
        name
        for name, value in found.items()
        if name in _fields and not _fields[name].is_valid(value)
    ]
    if not wrong:
        return cast("Header", found)
    logger.warning(
        "The header %r of a message for %s has values that mean nothing, and are ignored: %s.",
        HEADER,
        task,
        ", ".join(wrong),
    )
    return {name: value for name, value in found.items() if name not in wrong}


def get_header(request: Any) -> Header:
    """Return what of ours came with the message that runs; empty without one."""
    if request is None or not request.headers:
        return Header()
    header = _headers.get(request)
    if header is None:
        header = _headers[request] = read_header(request.headers, request.task)
    return header


def with_header(options: Mapping[str, Any], header: Header) -> dict[str, Any]:
    """Return options of a send that let ``header`` travel along."""
    return {**options, "headers": {**(options.get("headers") or {}), HEADER: header}}


def is_text(value: object) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_token(value: object) -> bool:
    """Return whether a value is a token: scripts take tokens apart by their length."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def is_flag(value: object) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def is_id(value: object) -> bool:
    """Return whether a value is the key of a row."""
    return type(value) is int


#: The function gets other arguments than the message has, and its key is made of the former.
declare_field("by_call", is_flag, is_given=True)
