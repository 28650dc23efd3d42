"""The header that this package adds to a task's message: a dict of plain values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from .. import conf
from ..texts import get_logger

logger = get_logger(__name__)

#: The name of the message header with all fields of this package.
HEADER: Final = "django_celery_safe"

_TOKEN: Final = re.compile("[0-9a-f]{32}")


#: Plain values by field name. ``task`` names the task that the message is for, because headers
#: get copied to other messages. All other fields are optional; see ``_FIELDS``.
Header: TypeAlias = dict[str, Any]


def is_token(value: object) -> bool:
    """Return whether a value is a token; its length matters, because scripts split by it."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def _is_lease(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and conf.SHORTEST_LEASE <= value <= conf.LONGEST_LEASE


#: All fields of the header, each with its type, or a function that returns whether a value is
#: possible.
_FIELDS: Final[dict[str, type | Callable[[Any], bool]]] = {
    # The key that calls of the same work share, what replaces the task's name before it in the
    # names of locks, and the ``single_instance`` options that the caller gave for this call.
    "key": str,
    "lock": str,
    "options": dict,
    # The token of the lock that the message has held since it was sent; for how long after that,
    # s, the lock is held whatever happens to the message; and whether its run frees the lock.
    "sent": is_token,
    "period": _is_lease,
    "start": bool,
    # Whether other tasks wait for this message, so even a duplicate is published; and the id of the
    # task that was sent before this duplicate, whose run does nothing.
    "canvas": bool,
    "duplicate": str,
    # Whether this message is a copy that waited for the end of another run or claim.
    "copy": bool,
    # The attempt of its task that this message is for, and the alias of the database with the row
    # of that name, which keeps the message until the task is done.
    "attempt": is_token,
    "using": str,
    # The id of the step that the message runs.
    "step": lambda value: type(value) is int,
    # How a Django task was enqueued.
    "django_task": dict,
}
#: The fields that the caller of a send may set. A send drops all other fields from the caller's
#: header, and sets them itself.
_GIVEN: Final = ("step", "django_task")


class Kept:
    """
    What is known of a message that runs.

    It is an attribute of the message's request. A header of the same name is never of this class.

    Attributes:
        header: Our header.
        sent: The lock that the message has held since it was sent, see ``concurrency.sent``;
            None: it has none, or nobody has looked for it.
        run: The run of a carried task, see ``sending.carried_run``; None: none has begun. Celery
            copies the request of a task that is called again inside its run, and this with it.
    """

    __slots__ = ("header", "run", "sent")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.sent: Any = None
        self.run: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.header,)  # the pickle of a request has neither


def read_given_fields(headers: Mapping[str, Any] | None, task: str) -> Header:
    """Return the fields that the caller of a send may set and has set; empty without any."""
    header = read_header(headers, task)
    given: Header = {name: header[name] for name in _GIVEN if name in header}
    return {"task": header["task"], **given} if given else {}


def read_header(headers: Mapping[str, Any] | None, task: str | None) -> Header:
    """
    Return our header from the headers of a message for ``task``; empty without one.

    Anyone may have written it, so a field that is not valid is left out, with a warning.
    """
    found = headers.get(HEADER) if headers else None
    if found is None:
        return Header()
    if type(found) is not dict and not isinstance(found, Mapping):
        logger.warning("The header %r of a message for %s is not a dict.", HEADER, task)
        return Header()
    if found.get("task") != task:
        return Header()  # copied from another message, along with its other headers
    wrong = [
        name
        for name, value in found.items()
        if (rule := _FIELDS.get(name)) is not None
        and not (isinstance(value, rule) if type(rule) is type else rule(value))
    ]
    if not wrong:
        return dict(found)
    text = "The header %r of a message for %s has values that mean nothing, and are ignored: %s."
    logger.warning(text, HEADER, task, ", ".join(wrong))
    return {name: value for name, value in found.items() if name not in wrong}


def find_ours(request: Any) -> Any:
    """
    Return the value of our header in a request, unchecked; None: it has none.

    ``request.headers`` need not have it: if tracers add a header named ``headers`` to a message,
    Celery shows only what is in that one. It is put there, because a retry is sent with it.
    """
    headers = request.headers if isinstance(request.headers, dict) else {}
    found = getattr(request, HEADER, None)
    if found is None:
        return headers.get(HEADER)  # an eager run has no other headers
    if headers.get(HEADER) is not found:
        request.headers = {**headers, HEADER: found}
    return found


def get_header(request: Any) -> Header:
    """Return our header of the message that runs; empty without one."""
    kept = getattr(request, "safe_kept", None)
    if type(kept) is not Kept:
        if request is None or (found := find_ours(request)) is None:
            return Header()
        kept = request.safe_kept = Kept(read_header({HEADER: found}, request.task))
    return kept.header
