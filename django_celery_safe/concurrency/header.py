"""What of ours travels with a task's message: one header, a dict of plain values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, cast

from .. import conf
from ..exceptions import ConfigurationError
from ..texts import get_logger

logger = get_logger(__name__)

#: The message header in which all that is ours travels.
HEADER: Final = "django_celery_safe"

_TOKEN: Final = re.compile("[0-9a-f]{32}")


class Header(TypedDict, total=False):
    """
    What stands in the header; each but the task may be missing.

    Attributes:
        task: Name of the task that the message is for: headers get copied to others.
        key: Which calls of the task are the same, see ``keys``.
        lock: Stands before the key in the names of its locks, instead of the task's name.
        options: What the caller told ``single_instance`` for this call.
        sent: Token of the lock that the message holds since it was sent.
        sent_timeout: That lock's lease while the message waits, s.
        cache: Alias of the cache that holds the locks, if the task names one.
        canvas: Whether others wait for the message, so that it is published in any case.
        duplicate: Id of the task that was sent before; the message's run does nothing.
        copy: Token of the note that the message is a copy under way, see ``copies``.
        met: Token of the run whose lock that copy waits for.
        claim_copy: Token of the note that the message is a copy that waits for a claim.
        step: Id of the step of a run of stages that the message is to run.
    """

    task: str
    key: str
    lock: str
    options: Mapping[str, Any]
    sent: str
    sent_timeout: float
    cache: str
    canvas: bool
    duplicate: str
    copy: str
    met: str
    claim_copy: str
    step: int


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
    wrong = [name for name, value in found.items() if name in _CHECKS and not _CHECKS[name](value)]
    if not wrong:
        return cast("Header", found)
    logger.warning(
        "The header %r of a message for %s has values that mean nothing, and are ignored: %s.",
        HEADER,
        task,
        ", ".join(wrong),
    )
    kept = {name: value for name, value in found.items() if name not in wrong}
    return cast("Header", kept)


def find_header(request: Any) -> Header:
    """Return what of ours came with the message that runs; empty without one."""
    if request is None or not request.headers:
        return Header()
    known: Header | None = request.__dict__.get("celery_safe_header")
    if known is None:
        known = request.celery_safe_header = read_header(request.headers, request.task)
    return known


def with_header(options: Mapping[str, Any], header: Header) -> dict[str, Any]:
    """Return options of a send that let ``header`` travel along."""
    return {**options, "headers": {**(options.get("headers") or {}), HEADER: header}}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_token(value: object) -> bool:
    # Scripts take tokens apart by their length.
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def _is_lease(value: object) -> bool:
    try:
        conf.lease_seconds(value, "sent_timeout")
    except ConfigurationError:
        return False
    return True


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "key": _is_text,
    "lock": _is_text,
    "options": lambda value: isinstance(value, Mapping),
    "sent": _is_token,
    "sent_timeout": _is_lease,
    "cache": _is_text,
    "duplicate": _is_text,
    "copy": _is_token,
    "met": _is_token,
    "claim_copy": _is_token,
    "step": lambda value: type(value) is int,
}
