"""
Celery's classes of tasks and results, with the type parameters of celery-types.

At run time Celery's own classes can't be subscripted. A class that derives from the task classes
here can be: ``SafeTask[[int], str]`` is ``SafeTask`` itself. A result is changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

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


def as_sent_result(result: AsyncResult[R]) -> SentResult[R]:
    """Set ``send_error`` of a result to None, and ``is_duplicate`` to False unless it is set."""
    sent = cast("SentResult[R]", result)
    if sent is not None:
        sent.send_error = None
        sent.__dict__.setdefault("is_duplicate", False)
    return sent
