"""
Celery's classes of tasks and results, with the type parameters of celery-types.

At run time Celery's own classes can't be subscripted. A class that derives from the task classes
here can be: ``SafeTask[[int], str]`` is ``SafeTask`` itself. A result is changed in place: it gets
``send_error``, and ``get()`` raises an error while the send waits for a commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from django.db import transaction

from ..exceptions import WrongTransaction

if TYPE_CHECKING:
    from celery import Task as Task
    from celery.contrib.django.task import DjangoTask as DjangoTask
    from celery.result import AsyncResult
    from typing_extensions import ParamSpec, TypeVar

    #: A task's parameters and its return type; unknown unless they are annotated.
    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any, covariant=True)

    class SentResult(AsyncResult[R]):
        """
        The result of a send.

        Attributes:
            is_duplicate: Whether the same call was already on its way; None: not known yet.
            send_error: The error if the publication after the commit failed, otherwise None.
        """

        is_duplicate: bool | None
        send_error: Exception | None
else:
    from typing import ParamSpec, TypeVar

    from celery import Task as CeleryTask
    from celery.contrib.django.task import DjangoTask as CeleryDjangoTask
    from celery.result import AsyncResult as SentResult

    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class Task(CeleryTask):
        """Celery's task class, which can be subscripted."""

        abstract = True

        def __class_getitem__(cls, types):
            return cls

    class DjangoTask(Task, CeleryDjangoTask):
        """Celery's task class for Django, which can be subscripted."""

        abstract = True


def refuse_get(result: Any, using: str | None) -> None:
    """Let ``get()`` of a result, and of its parts, raise inside the transaction, until its end."""
    as_sent_result(result)
    for part in _parts(result):
        part.get = partial(_get, part, using)


def allow_get(result: Any) -> None:
    """Let ``get()`` be Celery's own: the transaction has committed."""
    for part in _parts(result):
        part.__dict__.pop("get", None)


def as_sent_result(result: AsyncResult[R]) -> SentResult[R]:
    """Set ``send_error`` of a result to None, and ``is_duplicate`` to False unless it is set."""
    sent = cast("SentResult[R]", result)
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
