"""The wrappers around a run of a task, in order; each message says which ones it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from celery.app.task import Context

from .call import find_request
from .header import HEADER, get_header

#: Called with a task, its request, the function to run, and its arguments; may run it or not.
Wrapper: TypeAlias = Callable[
    [Any, Context, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]


class _Entry(NamedTuple):
    """A wrapper, and the field of the header by which a message asks for it."""

    field: str
    wrapper: Wrapper


#: The outermost first: ``attempt`` (sending), ``options`` (concurrency), then ``step`` (stages).
_wrappers: Final[list[_Entry]] = []


def add_wrapper(field: str, wrapper: Wrapper, *, outermost: bool = False) -> None:
    """Add a wrapper for messages with ``field`` in their header, inside the existing ones."""
    _wrappers.insert(0 if outermost else len(_wrappers), _Entry(field, wrapper))


def wrap_run(task: Any) -> Callable[..., Any]:
    """Return what a task runs, with the wrappers that each of its messages asks for."""
    run = task.run

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = (task.request.headers or {}).get(HEADER)
        if not isinstance(found, Mapping) or not any(field in found for field, _ in _wrappers):
            return run(*args, **kwargs)
        if (request := find_request(task, run)) is None:
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
    inner: Callable[..., Any],
    /,  # the task's own arguments may have these names
    *args: Any,
    **kwargs: Any,
) -> Any:
    return wrapper(task, request, inner, args, kwargs)
