"""
One call of a function that one of our decorators wraps: its message, its arguments, its wrappers.

Celery may call a task's function for a message or eagerly. Other code may also call it
directly, even the task itself during its own run.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache, partial, wraps
from types import MethodType
from typing import Any, Final, TypeAlias

from celery import Task, current_app
from celery._state import get_current_task
from celery.app.task import Context
from django.utils.module_loading import import_string

from ..compat import dump_models, has_models
from ..exceptions import ConfigurationError
from .header import get_header

#: A function that a task runs or a decorator wraps, and the arguments of a call.
Function: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]

#: Environment variable that Celery's Django fixup reads (celery/fixups/django.py).
SKIP_CHECKS: Final = "CELERY_SKIP_CHECKS"
#: Last parts of qualified names that identify no function: many in a module may share them.
_NAMELESS: Final = ("", "_", "<lambda>")
#: The wrappers, the outermost first, each after the header field with which a message requests it:
#: called with a task, its request, the function to run, and its arguments; may run it or not.
WRAPPERS: Final = (
    ("attempt", "sending.carried_run.run_carried"),
    ("options", "concurrency.guard.run_as_asked"),
    ("step", "stages.step_tasks.run_plain"),
)
#: Runs what the class of a carried task does before and around the task.
RUN_PART: Final = "sending.carried_run.run_part"

#: The functions that run in this context, each with the id of the task whose message it
#: runs for. A call of such a function during its own run is a direct call, although Celery
#: still shows the request of the message.
_running: ContextVar[tuple[tuple[str | None, int], ...]] = ContextVar(
    "django_celery_safe_running_functions", default=()
)

#: Whether the run that goes on in this context has begun with our header; None: not known.
has_header: ContextVar[bool | None] = ContextVar("django_celery_safe_has_header", default=None)


@cache
def find_higher(path: str) -> Any:
    """Return a name of a higher room, of which a lower one knows only this text."""
    return import_string(f"django_celery_safe.{path}")


def wrap_run(task: Any) -> Function:
    """Return the task's ``run`` with the wrappers that the header of each message requests."""
    run = task.run

    @wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Most have none, and to look for it would take ten times as long.
        header = None if has_header.get() is False else get_header(task.request)
        wanted = [path for field, path in WRAPPERS if field in header] if header else []
        inner = run
        if wanted and (request := find_request(task, run)) is not None:
            for path in reversed(wanted):
                inner = partial(find_higher(path), task, request, inner)
        return inner(*args, **kwargs)

    return wrapped


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

        @wraps(hook)
        def before_start(*args: Any, **kwargs: Any) -> Any:
            return _run_part(task, partial(hook, *args, **kwargs), is_called=False)

        task.before_start = before_start
    call = cls.__call__
    if call is not Task.__call__ and not hasattr(call, "carries"):

        @wraps(call)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run_part(self, partial(call, self, *args, **kwargs), is_called=True)

        wrapped.carries = True  # type: ignore[attr-defined]
        cls.__call__ = wrapped


def _run_part(task: Any, part: Callable[[], Any], *, is_called: bool) -> Any:
    request = find_request(task, part)
    if request is None or "attempt" not in get_header(request):
        return part()
    return find_higher(RUN_PART)(task, request, part, is_called=is_called)


def load_tasks(app: Any) -> None:
    """Import all task modules of an app, as a worker does when it starts."""
    before = os.environ.get(SKIP_CHECKS, "")
    # Otherwise Celery's Django fixup would run all of the project's checks.
    os.environ[SKIP_CHECKS] = "1"
    try:
        app.loader.import_default_modules()
    finally:
        os.environ[SKIP_CHECKS] = before


def find_call(
    decorated: Function, function: Function, args: Args
) -> tuple[Any, Context | None, bool]:
    """
    Return the task and request for which ``decorated``, which wraps ``function``, is called now.

    Returns:
        The task, None if the function is not a task; the request of its message, None for a
        direct call; and whether the first argument is not from the message: the task, with
        ``bind=True``, or the ``TaskContext`` of a Django task.
    """
    current = get_current_task()
    task = _find_task(decorated, args, current)
    context = getattr(sys.modules.get("django.tasks"), "TaskContext", Task)  # since Django 6.0
    bound = bool(args) and isinstance(args[0], (Task, context))
    return task, find_request(task, function, current), bound


def _find_task(decorated: Function, args: Args, current: Any) -> Any:
    # With bind=True, or in the run() of a task class, the first argument is the task.
    if args and isinstance(args[0], Task) and _runs(args[0], decorated):
        return args[0]
    if current is not None and _has_layer(current.run, decorated):
        return current
    # task.run(...) called directly, or inside another task.
    tasks = current_app.tasks.values()
    return next((task for task in tasks if _has_layer(task.run, decorated)), None)


def find_request(task: Any, function: Function, current: Any = None) -> Context | None:
    """
    Return the request for which ``task`` runs ``function``; None: it is a direct call.

    Args:
        current: The task that runs here; None: the caller has not asked.
    """
    current = get_current_task() if current is None else current
    if task is None or current is None:
        return None
    # By its request: a tracer may run a proxy of the task.
    request: Context = task.request
    is_other = current is not task and current.request is not request
    if is_other or request.called_directly or (request.id, id(function)) in _running.get():
        return None
    return request


def run_for(request: Context | None, function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call ``function``, for a request or directly; calls of it inside the run count as direct."""
    if request is None:
        return function(*args, **kwargs)
    before = _running.get()
    try:
        _running.set((*before, (request.id, id(function))))
        return function(*args, **kwargs)
    finally:
        _running.set(before)


def name_of(task: Any, function: Function) -> str:
    """
    Return the name of a task; for a function that is not a task, its module and name.

    Raises:
        ConfigurationError: The function has no name of its own, such as a lambda, so other
            functions could share its locks and records.
    """
    if task is not None:
        return str(task.name)
    # The qualified name of a method includes its class; two classes may use the same name.
    name: str = getattr(function, "__qualname__", "")
    if name.rpartition(".")[2] in _NAMELESS:
        raise ConfigurationError(
            f"{function!r} was called directly, is not a task and has no name of its own, so its "
            f"lock or record would be that of any other such function. Define it with a name of "
            f"its own (def charge(order): ...), or use `with` and a key inside."
        )
    return f"{function.__module__}.{name}"


def sent_arguments(
    task: Any, message: Context | None, args: Args | None, kwargs: Kwargs
) -> tuple[tuple[Any, ...], Mapping[str, Any], str]:
    """
    Return the arguments of a call of which its key is made, and the serializer of their wire form.

    They are those that the function gets, which decorators and ``__call__`` may have changed;
    with ``pydantic=True``, those that were sent, of which Celery has made models.

    Args:
        message: The message of the call; None: there is none.
        args: The arguments of the call, without a bound task; None: those of the message.
    """
    serializer = "json" if task is None else str(task.serializer)
    if message is not None and is_of_message(task, args):
        return tuple(message.args or ()), message.kwargs or {}, serializer
    args = args or ()
    # The attribute exists since Celery 5.7, and is None for most tasks.
    if serializer != "pickle" and getattr(task, "_dump_pydantic_arguments", True) is not None:
        args, kwargs = dump_models(task, args, kwargs)
    return args, kwargs, serializer


def is_of_message(task: Any, args: Args | None) -> bool:
    """Return whether the key of a call is made of the arguments that its message has."""
    return args is None or _has_models(task.run)


@lru_cache(maxsize=4096)
def _has_models(run: Function) -> bool:
    return has_models(layers(run))


def is_as_sent(message: Context, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call has the very arguments of its message, so that nothing changed them."""
    sent, named = message.args or (), message.kwargs or {}
    return (
        len(args) == len(sent)
        and kwargs.keys() == named.keys()
        and all(map(operator.is_, args, sent))
        and all(map(operator.is_, map(named.get, kwargs), kwargs.values()))
    )


class _Attributes(dict[str, Any]):
    """The attributes of a function; ``functools.wraps`` copies all of them but its signature."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name != "__signature__")

    def keys(self) -> Any:
        return list(self)


def show_signature(wrapper: Any, signature: inspect.Signature) -> None:
    """
    Let Celery check a call of ``wrapper`` by the signature of the function that it wraps.

    Celery's check of ``.delay()`` uses getfullargspec, which reads only ``__signature__``. A
    decorator above may fill in arguments, so it must not get this signature from
    ``functools.wraps``, unless the wrapped function itself would pass one on.
    """
    if "__signature__" not in wrapper.__dict__:
        wrapper.__dict__ = _Attributes(wrapper.__dict__)
    wrapper.__signature__ = signature


def own_signature(function: Function) -> inspect.Signature:
    """Return the signature with which Celery would check calls of ``function``."""
    return inspect.signature(function, follow_wrapped=False)


def inner_signature(function: Function) -> inspect.Signature:
    """Return the signature of the function that ``function`` wraps, also below our decorators."""
    return inspect.signature(inspect.unwrap(function, stop=_has_signature))


def _has_signature(function: Any) -> bool:
    is_ours = isinstance(getattr(function, "__dict__", None), _Attributes)
    return isinstance(function, MethodType) or (hasattr(function, "__signature__") and not is_ours)


def layers(function: Any) -> list[Any]:
    """Return a task's function and its wrappers, such as pydantic's, from the outside in."""
    found = []
    while function is not None:
        found.append(function)
        function = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
    return found


def _runs(task: Any, decorated: Function) -> bool:
    """Return whether ``task`` runs ``decorated``, inside other wrappers or by ``super().run()``."""
    inherited = (vars(cls).get("run") for cls in type(task).__mro__)
    return any(_has_layer(run, decorated) for run in (task.run, *inherited))


@lru_cache(maxsize=4096)
def _has_layer(function: Any, wanted: Function) -> bool:
    return any(layer is wanted for layer in layers(function))
