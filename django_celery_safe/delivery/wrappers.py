"""The ordered wrappers around a run of a task; each message names the wrappers it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from celery.app.task import Context

from .call import Args, Function, Kwargs, find_request
from .header import find_ours, get_header

#: Called with a task, its request, the function to run, and its arguments; may run it or not.
Wrapper: TypeAlias = Callable[[Any, Context, Function, Args, Kwargs], Any]


class _Entry(NamedTuple):
    """A wrapper, and the header field with which a message requests it."""

    field: str
    wrapper: Wrapper


#: The outermost first: ``attempt`` (sending), ``options`` (concurrency), then ``step`` (stages).
_wrappers: Final[list[_Entry]] = []


def add_wrapper(field: str, wrapper: Wrapper, *, outermost: bool = False) -> None:
    """Add a wrapper for messages with ``field`` in their header, inside the existing ones."""
    _wrappers.insert(0 if outermost else len(_wrappers), _Entry(field, wrapper))


def wrap_run(task: Any) -> Function:
    """Return the task's ``run`` with the wrappers that the header of each message requests."""
    run = task.run

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        request = task.request  # read once, because it costs more than the rest
        found = find_ours(request)
        asks = isinstance(found, Mapping) and any(field in found for field, _ in _wrappers)
        if not asks or (request := find_request(task, run)) is None:
            return run(*args, **kwargs)
        header, inner = get_header(request), run
        for field, wrapper in reversed(_wrappers):
            if field in header:
                inner = functools.partial(_call, wrapper, task, request, inner)
        return inner(*args, **kwargs)

    return wrapped


def _call(
    wrapper: Wrapper,
    task: Any,
    request: Context,
    inner: Function,
    /,  # the task's own arguments may have these names
    *args: Any,
    **kwargs: Any,
) -> Any:
    return wrapper(task, request, inner, args, kwargs)
