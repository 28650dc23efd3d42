"""What happens when a single-instance task is run: take the lock, or step aside."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, NamedTuple

from celery import Task, current_app
from celery._state import get_current_task
from celery.app.task import Context

from ..exceptions import AlreadyRunning
from ..locks import CacheLock, HeldLock
from ..signals import emit, task_conflict
from .copies import Rejected, come_back, find_header, finish_copy, send_own_copy
from .keys import call_key
from .options import Options

logger = logging.getLogger(__name__)

#: Seconds that a message waits for the lock of its own task id before it is sent
#: again: a retry without delay may arrive before the run that sent it has ended.
OWN_LOCK_PATIENCE: Final = 0.5
#: Part of ``retry_delay`` that is added at random, so that many don't come back at once.
JITTER: Final = 0.25

#: Id of the task whose message runs in this context. A call of the task inside its own
#: run is a direct call, although Celery shows it the request of the message.
_running: ContextVar[str | None] = ContextVar("django_celery_safe_running", default=None)


def run_alone(
    decorated: Callable[..., Any],
    function: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``function`` under its lock; if that is held, do what ``on_conflict`` says."""
    bound = bool(args) and isinstance(args[0], Task)
    task = _find_task(decorated, args)
    request = None if task is None else _message_of(task)
    name = _find_lock_name(task, request, function, options, args[bound:], kwargs, bound)
    lock = CacheLock(name, timeout=options.timeout, renew=options.renew, cache=options.cache)
    with lock:
        if not lock and request is not None:
            _wait(lock, request, options)
        if lock:
            if request is None:
                return function(*args, **kwargs)
            finish_copy(task, request, options.cache)
            token = _running.set(request.id)
            try:
                return function(*args, **kwargs)
            finally:
                _running.reset(token)
    contender = lock.contender
    if task is None or request is None or contender is None:
        return _step_aside_without_message(name, options, contender)
    if _is_own(contender, request):
        send_own_copy(task, request, contender, options.cache)
    return _step_aside(task, request, name, options, contender)


def _find_task(decorated: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the task that runs ``decorated`` now; None if it was made into none."""
    if args and isinstance(args[0], Task):
        return args[0]
    current = get_current_task()
    if current is not None and _runs(current, decorated):
        return current
    # task.run(...) called by hand, or inside another task.
    tasks = current_app.tasks.values()
    return next((task for task in tasks if _runs(task, decorated)), None)


def _runs(task: Any, decorated: Callable[..., Any]) -> bool:
    """Tell whether ``decorated`` is what ``task`` runs, also behind other wrappers."""
    return any(layer is decorated for layer in _layers(task.run))


def _message_of(task: Any) -> Context | None:
    """Return the request of the message that ``task`` runs for; None without one."""
    request: Context = task.request
    if request.called_directly or request.is_eager or get_current_task() is not task:
        return None
    if request.id == _running.get():
        return None
    return request


def _find_lock_name(
    task: Any,
    request: Context | None,
    function: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    bound: bool,
) -> str:
    task_name = f"{function.__module__}.{function.__name__}" if task is None else task.name
    key = find_header(request).get("key")
    if key is not None:
        return f"{task_name}:{key}"
    serializer = "json" if task is None else task.serializer
    # pydantic=True has made models of the arguments by now. A message still has what
    # was sent; otherwise it is what Celery would send.
    dump_models: Any = getattr(task, "_dump_pydantic_arguments", None)
    if request is not None:
        args, kwargs = tuple(request.args or ()), request.kwargs or {}
    elif dump_models is not None and serializer != "pickle":
        args, kwargs = dump_models(args, kwargs)
    key = call_key(task_name, function, options, args, kwargs, bound=bound, serializer=serializer)
    return f"{task_name}:{key}"


def _is_own(contender: HeldLock | None, request: Context | None) -> bool:
    """Tell whether the lock is held for the very task id of this message."""
    if contender is None or request is None:
        return False
    return request.id is not None and contender.holder.task_id == request.id


def _wait(lock: CacheLock, request: Context, options: Options) -> None:
    """Let the lock be acquired a little later, where there is reason to."""
    contender = lock.contender
    if _is_own(contender, request):
        lock.acquire(OWN_LOCK_PATIENCE)
    elif options.on_conflict == "wait":
        _note_conflict(lock.name, options.on_conflict, contender, request.id)
        lock.acquire(options.blocking_timeout)


def _step_aside(
    task: Any, request: Context, name: str, options: Options, contender: HeldLock
) -> None:
    holder = contender.holder
    if options.on_conflict == "wait":  # noted when it began to
        raise AlreadyRunning(name, str(holder), options.blocking_timeout, holder.task_id)
    _note_conflict(name, options.on_conflict, contender, request.id)
    match options.on_conflict:
        case "skip":
            return
        case "retry":
            delay = options.retry_delay * (1 + random.uniform(0, JITTER))  # noqa: S311
            come_back(task, request, delay)
        case "reject":
            raise Rejected(f"the lock {name!r} is held by {holder}", requeue=False)
        case "raise":
            raise AlreadyRunning(name, str(holder), 0.0, holder.task_id)


def _step_aside_without_message(name: str, options: Options, contender: HeldLock | None) -> None:
    """Do what can be done for a direct call, ``.apply()`` or eager mode: skip, or raise."""
    _note_conflict(name, options.on_conflict, contender, None)
    if options.on_conflict == "skip":
        return
    holder = None if contender is None else contender.holder
    raise AlreadyRunning(name, str(holder or ""), 0.0, None if holder is None else holder.task_id)


def _note_conflict(
    name: str, on_conflict: str, contender: HeldLock | None, task_id: str | None
) -> None:
    holder = "" if contender is None else str(contender.holder)
    emit(
        task_conflict,
        logger,
        logging.INFO,
        "Task %s met the lock %r, held by %s: %s.",
        task_id or "(called directly)",
        name,
        holder or "someone unknown",
        on_conflict,
        sender=run_alone,
        name=name,
        task_id=task_id,
        holder=holder,
        on_conflict=on_conflict,
    )


class Guarded(NamedTuple):
    """
    What ``@single_instance`` decorated in a task.

    Attributes:
        function: The decorated function.
        options: What the decorator was told.
        bound: Whether the function gets the task as its first argument.
    """

    function: Callable[..., Any]
    options: Options
    bound: bool


@lru_cache(maxsize=4096)
def find_guarded(task: Any) -> Guarded | None:
    """Return what ``@single_instance`` decorated in ``task``; None if nothing."""
    layers = list(_layers(task.run))
    # Wrappers copy the attributes of what they wrap, so it is the innermost one that has them.
    marked = [index for index, layer in enumerate(layers) if _options_of(layer) is not None]
    if not marked:
        return None
    decorated = layers[marked[-1]]
    # The method that binds the task may stand behind autoretry's wrapper, whose own
    # signature says nothing about it.
    bound = any(map(inspect.ismethod, layers[: marked[-1]]))
    return Guarded(decorated, decorated.single_instance, bound)


def _options_of(function: Any) -> Options | None:
    options = getattr(function, "single_instance", None)
    return options if isinstance(options, Options) else None


def _layers(function: Any) -> Iterator[Any]:
    """Yield what a task runs, from the outside in: behind pydantic's and autoretry's wrappers."""
    while function is not None:
        yield function
        function = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
