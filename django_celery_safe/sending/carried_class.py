"""A carried run around what its task's class does: ``before_start()`` and ``__call__()``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import Task

from ..delivery.call import find_request
from ..delivery.header import get_header
from .carried import run_part


def wrap_class(task: Any) -> None:
    """
    Have each carried run of a task begin before the hooks of its class, and end after them.

    An error of theirs is then the outcome of the run, and the statements for its row stand outside
    a transaction or a guard that they open. A class without hooks is left as it is: Celery calls
    the ``run`` of its tasks directly.
    """
    cls = type(task)
    if cls.before_start is not Task.before_start:
        hook = task.before_start

        @functools.wraps(hook)
        def before_start(*args: Any, **kwargs: Any) -> Any:
            return _run(task, functools.partial(hook, *args, **kwargs), is_called=False)

        task.before_start = before_start
    call = cls.__call__
    if call is not Task.__call__ and not hasattr(call, "carries"):

        @functools.wraps(call)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, functools.partial(call, self, *args, **kwargs), is_called=True)

        wrapped.carries = True  # type: ignore[attr-defined]
        cls.__call__ = wrapped


def _run(task: Any, part: Callable[[], Any], *, is_called: bool) -> Any:
    request = find_request(task, part)
    if request is None or "attempt" not in get_header(request):
        return part()
    return run_part(task, request, part, is_called=is_called)
