"""
One call of what a decorator of ours wraps: whose it is, and what it was called with.

Celery calls a task's function for a message, eagerly, or not at all: anybody may call
it by hand, even the task itself inside its own run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

from celery import Task, current_app
from celery._state import get_current_task
from celery.app.task import Context

from ..exceptions import ConfigurationError
from .header import get_header

#: Environment variable that Celery's Django fixup heeds (celery/fixups/django.py).
SKIP_CHECKS: Final = "CELERY_SKIP_CHECKS"
#: Last parts of qualified names that say nothing: any number of functions of a module have them.
_NAMELESS: Final = ("", "_", "<lambda>")

#: Which functions run in this context, each with the id of the task whose message it runs
#: for. A call of one inside its own run is a direct call, although Celery shows it the
#: request of the message.
_running: ContextVar[frozenset[tuple[str | None, int]]] = ContextVar(
    "django_celery_safe_running_functions", default=frozenset()
)


def load_tasks(app: Any) -> None:
    """Import all modules with tasks of an app, as a worker does when it starts."""
    before = os.environ.get(SKIP_CHECKS)
    # Otherwise Celery's Django fixup would run all of the project's checks.
    os.environ[SKIP_CHECKS] = "1"
    try:
        app.loader.import_default_modules()
    finally:
        os.environ.pop(SKIP_CHECKS, None)
        if before is not None:
            os.environ[SKIP_CHECKS] = before


def find_call(
    decorated: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Context | None]:
    """
    Return what calls ``decorated`` with ``args`` now, which is to call ``function``.

    Returns:
        The task, None if it was made into none; and the request of its message, None for a
        direct call.
    """
    task = _find_task(decorated, args)
    return task, find_request(task, function)


def _find_task(decorated: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # A bound task stands first, and so does one that is handed to a function of its own.
    if (
        args
        and isinstance(args[0], Task)
        and (_runs(args[0], decorated) or _inherits(args[0], decorated))
    ):
        return args[0]
    current = get_current_task()
    if current is not None and _runs(current, decorated):
        return current
    # task.run(...) called by hand, or inside another task.
    tasks = current_app.tasks.values()
    return next((task for task in tasks if _runs(task, decorated)), None)


def find_request(task: Any, function: Callable[..., Any]) -> Context | None:
    """Return the request that ``task`` runs ``function`` for; None for a direct call."""
    if task is None or get_current_task() is not task:
        return None
    request: Context = task.request
    if request.called_directly or (request.id, id(function)) in _running.get():
        return None
    return request


def run_for(
    request: Context | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``function``, for a request or directly, so that calls inside are told from this one."""
    if request is None:
        return function(*args, **kwargs)
    token = _running.set(_running.get() | {(request.id, id(function))})
    try:
        return function(*args, **kwargs)
    finally:
        _running.reset(token)


def name_of(task: Any, function: Callable[..., Any]) -> str:
    """
    Return the name of a task; for a function that was made into none, where it is defined.

    Raises:
        ConfigurationError: The function has no name of its own, such as a lambda, so that
            others could have its locks and records.
    """
    if task is not None:
        return str(task.name)
    # The name of a method includes its class: two classes may have methods of one name.
    name: str = getattr(function, "__qualname__", "")
    if name.rpartition(".")[2] in _NAMELESS:
        raise ConfigurationError(
            f"{function!r} was called directly, is not a task and has no name of its own, so its "
            f"lock or record would be that of any other such function. Define it with a name of "
            f"its own (def charge(order): ...), or use `with` and a key inside."
        )
    return f"{function.__module__}.{name}"


def serializer_of(task: Any) -> str:
    """Return what decides on the wire form of a call's arguments."""
    return "json" if task is None else str(task.serializer)


def sent_arguments(
    task: Any, message: Context | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """
    Return a call's arguments as they are sent.

    Args:
        message: The message that it is for; None: there is none, and ``args`` and
            ``kwargs`` are what it was called with, without a bound task.
    """
    if args and "by_call" in get_header(message):
        return args, {name: getattr(value, "pk", value) for name, value in kwargs.items()}
    # pydantic=True has made models of the arguments by now. A message still has what
    # was sent; otherwise it is what Celery would send.
    if message is not None:
        return tuple(message.args or ()), message.kwargs or {}
    dump_models: Any = getattr(task, "_dump_pydantic_arguments", None)
    if dump_models is not None and serializer_of(task) != "pickle":
        args, kwargs = dump_models(args, kwargs)
    return args, kwargs


def layers(function: Any) -> Iterator[Any]:
    """Yield what a task runs, from the outside in: behind pydantic's and autoretry's wrappers."""
    while function is not None:
        yield function
        function = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)


def _runs(task: Any, decorated: Callable[..., Any]) -> bool:
    """Return whether ``decorated`` is what ``task`` runs, also behind other wrappers."""
    return any(layer is decorated for layer in layers(task.run))


def _inherits(task: Any, decorated: Callable[..., Any]) -> bool:
    """Return whether ``task`` overrides ``decorated``, and so may run it by ``super().run()``."""
    inherited = (vars(cls).get("run") for cls in type(task).__mro__)
    return any(layer is decorated for run in inherited for layer in layers(run))
