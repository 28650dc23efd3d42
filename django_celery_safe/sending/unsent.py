"""Sends that wait for a commit, and their results: waiting for one inside it has no end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.db import transaction

from ..exceptions import WrongTransaction

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .typed import SentResult

T = TypeVar("T")


def refuse_get(result: Any, using: str | None) -> None:
    """Let ``get()`` of a result, and of its parts, raise inside the transaction, until its end."""
    as_sent_result(result)
    for part in _parts(result):
        part.get = partial(_get, part, using)


def allow_get(result: Any) -> None:
    """Let ``get()`` be Celery's own: the transaction has committed."""
    for part in _parts(result):
        part.__dict__.pop("get", None)


def as_sent_result(result: AsyncResult[T]) -> SentResult[T]:
    """Set ``send_error`` of a result to None, and ``is_duplicate`` to False unless it is set."""
    sent = cast("SentResult[T]", result)
    if sent is not None:
        sent.send_error = None
        sent.__dict__.setdefault("is_duplicate", False)
    return sent


def _get(result: Any, using: str | None, *args: Any, **kwargs: Any) -> Any:
    connection = transaction.get_connection(using)
    if connection.in_atomic_block:
        raise WrongTransaction(
            f"get() of the result {result.id} is called inside the transaction of "
            f"{connection.alias!r} whose commit the task waits for, so it would never return. "
            f"Call it after the block, or send the task with send_on_commit=False."
        )
    return type(result).get(result, *args, **kwargs)


def _parts(result: Any) -> Iterator[Any]:
    """Yield a result, the members of a group, and the results that come before it in a chain."""
    while result is not None:
        yield result
        for member in getattr(result, "results", None) or ():
            yield from _parts(member)
        result = result.parent
