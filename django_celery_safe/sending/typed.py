"""
Celery's task classes with the types that celery-types gives them, at run time too.

There Celery's classes can't be subscripted: what derives from these can be written
``SafeTask[[int], str]``, which means ``SafeTask`` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Task as Task
    from celery.contrib.django.task import DjangoTask as DjangoTask
    from celery.result import AsyncResult
    from typing_extensions import ParamSpec, TypeVar

    #: A task's parameters and what it returns; unknown where nothing says it.
    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any, covariant=True)

    class SentResult(AsyncResult[R]):
        """
        The result of a send.

        Attributes:
            is_duplicate: Whether the same was on its way already; None until that shows.
            send_error: Why it could not be published after the commit; None: nothing failed.
        """

        is_duplicate: bool | None
        send_error: Exception | None
else:
    from typing import ParamSpec, TypeVar

    from celery import Task as CeleryTask
    from celery.contrib.django.task import DjangoTask as CeleryDjangoTask

    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class Task(CeleryTask):
        """Celery's task class, which can be subscripted."""

        abstract = True

        def __class_getitem__(cls, types):
            return cls

    class DjangoTask(Task, CeleryDjangoTask):
        """That for Django."""

        abstract = True
