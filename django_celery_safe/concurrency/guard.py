"""What happens when a single-instance task is run: take the lock, or step aside."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from celery import Task
from celery.app.task import Context

from .. import conf
from ..exceptions import AlreadyRunning, ConfigurationError
from ..locks import CacheLock, HeldLock
from ..locks.stores import locate
from ..signals import duplicate_skipped, emit, task_conflict
from ..texts import get_logger
from .call import find_request, find_task, layers, name_of, run_for, sent_arguments, serializer_of
from .copies import Rejected, come_back, drop_if_ended, finish_copy, send_own_copy
from .header import Header, find_header
from .keys import call_key
from .options import CALL_OPTIONS, DEFAULTS, Options, options_of_call
from .run_lock import RunLock
from .sent import find_sent

logger = get_logger(__name__)

#: Seconds that a message waits for the lock of its own task id before it is sent
#: again: a retry without delay may arrive before the run that sent it has ended.
OWN_LOCK_PATIENCE: Final = 0.5
#: Gets a task, its request, what it runs and with what, and runs a step of a run of stages.
StepRunner: TypeAlias = Callable[
    [Any, Context, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]
#: That of ``stages``, a floor above.
_step_runner: StepRunner | None = None
#: Part of ``retry_delay`` that is added at random, so that many don't come back at once.
JITTER: Final = 0.25


def run_alone(
    decorated: Callable[..., Any],
    function: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``function`` under its lock; if that is held, do what ``on_conflict`` says."""
    guarded = Guarded(function, options, bool(args) and isinstance(args[0], Task))
    task = find_task(decorated, args)
    return _run(guarded, task, find_request(task, function), args, kwargs)


def run_as_called(task: Any) -> Callable[..., Any]:
    """
    Return what a task without ``@single_instance`` runs, where one call can ask for it.

    What the call asked for is in the header of its message.
    """
    run = task.run

    @functools.wraps(run)
    def run_as_asked(*args: Any, **kwargs: Any) -> Any:
        if task.request.headers:
            request = find_request(task, run)
            header = find_header(request)
            if "options" in header:
                return _run(Guarded(run, DEFAULTS, False), task, request, args, kwargs)
            if request is not None and "step" in header and _step_runner is not None:
                return _step_runner(task, request, run, args, kwargs)
        return run(*args, **kwargs)

    return run_as_asked


def run_steps_by(runner: StepRunner) -> None:
    """Let the messages of steps whose tasks know nothing of steps be run by ``runner``."""
    global _step_runner
    _step_runner = runner


def _run(
    guarded: Guarded,
    task: Any,
    request: Context | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """
    Run a task alone.

    Args:
        request: What it runs for; None: a direct call.
    """
    header = find_header(request)
    if request is not None and "duplicate" in header:
        return _note_duplicate(task, request, header)
    options = options_for(guarded, header)
    # Eager runs and .apply() have no message that could come back.
    message = None if request is None or request.is_eager else request
    name = find_lock_name(task, message, guarded, options, args, kwargs)
    if message is not None and "copy" in header:
        drop_if_ended(task, message, locate(options.cache).store())
    sent = find_sent(message) if message is not None and "sent" in header else None
    lock = RunLock(name, options, task, message, sent)
    with lock:
        acquired = bool(lock)
        if not acquired and message is not None:
            acquired = _wait(lock, message, options)
        if acquired:
            if message is not None and "copy" in header:
                finish_copy(task, message, locate(options.cache).store())
            return run_for(request, guarded.function, args, kwargs)
    contender = lock.contender
    with lock.stepping_aside():
        if task is None or message is None or contender is None:
            _step_aside_without_message(name, options, contender)
        elif _is_own(contender, message):
            send_own_copy(task, message, contender, locate(options.cache).store())
        else:
            _step_aside(task, message, name, options, contender)
    return None


def find_lock_name(
    task: Any,
    message: Context | None,
    guarded: Guarded,
    options: Options,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """
    Return the name of the lock of one run.

    Args:
        message: The message that it runs for; None: there is none, and ``args`` and
            ``kwargs`` are what it was called with.
    """
    task_name = name_of(task, guarded.function)
    header = find_header(message)
    lock = task_name if isinstance(options.lock, conf.Unset) else options.lock
    key = header.get("key")
    if key is None:
        args, kwargs = sent_arguments(task, message, args[guarded.bound :], kwargs)
        key = call_key(
            task_name,
            guarded.function,
            options.key,
            args,
            kwargs,
            bound=guarded.bound,
            serializer=serializer_of(task),
        )
    return f"{header.get('lock', lock)}:{key}"


def name_lock(task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """
    Return the name of the lock under which a task runs when it is called so.

    Raises:
        ConfigurationError: The task has no ``@single_instance``, and so no lock.
        TypeError: The arguments don't fit the task.
    """
    guarded = find_guarded(task)
    if guarded is None:
        raise ConfigurationError(
            f"Task {task.name} has no @single_instance, so no lock keeps two runs of it apart. "
            f"Decorate it, or give the name of the lock that it takes itself."
        )
    args = (task, *args) if guarded.bound else args
    return find_lock_name(task, None, guarded, guarded.options, args, kwargs)


def _is_own(contender: HeldLock | None, request: Context | None) -> bool:
    """Tell whether the lock is held for the very task id of this message."""
    if contender is None or request is None:
        return False
    return request.id is not None and contender.holder.task_id == request.id


def _wait(lock: CacheLock, request: Context, options: Options) -> bool:
    """Try to acquire the lock a little later, where there is reason to; tell whether it worked."""
    contender = lock.contender
    if _is_own(contender, request):
        return lock.acquire(OWN_LOCK_PATIENCE)
    if options.on_conflict == "wait":
        _note_conflict(lock.name, options.on_conflict, contender, request.id)
        return lock.acquire(options.blocking_timeout)
    return False


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


def _note_duplicate(task: Any, request: Context, header: Header) -> None:
    emit(
        duplicate_skipped,
        logger,
        logging.INFO,
        "Task %s[%s] was a duplicate of %s when it was sent; it returns None.",
        task.name,
        request.id,
        header["duplicate"],
        sender=run_alone,
        task=task.name,
        task_id=request.id,
        sent_id=header["duplicate"],
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
    found = list(layers(task.run))
    # Wrappers copy the attributes of what they wrap, so it is the innermost one that has them.
    marked = [index for index, layer in enumerate(found) if _options_of(layer) is not None]
    if not marked:
        return None
    decorated = found[marked[-1]]
    # The method that binds the task may stand behind autoretry's wrapper, whose own
    # signature says nothing about it.
    bound = any(map(inspect.ismethod, found[: marked[-1]]))
    return Guarded(decorated, decorated.single_instance, bound)


def find_hidden(task: Any) -> Callable[..., Any] | None:
    """
    Return what ``@single_instance`` decorated where the task can't find it; None if nothing.

    That is behind a wrapper without ``functools.wraps``, which keeps what it wraps in its
    closure. Whether it wraps it, or calls it for another reason, nothing can tell.
    """
    seen: set[int] = set()
    waiting: list[Callable[..., Any]] = list(layers(task.run)) if find_guarded(task) is None else []
    while waiting:
        function = waiting.pop()
        if _options_of(function) is not None:
            return function
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # an empty one
                inner = cell.cell_contents
                if inspect.isfunction(inner) and id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append(inner)
    return None


def find_guarded_as_asked(task: Any, request: Context) -> tuple[Guarded, Options] | None:
    """Return what runs alone for a message, and how; None if any number may run at once."""
    header = find_header(request)
    guarded = find_guarded(task)
    if guarded is None:
        # A message may hold a lock that only its sender's release knows of.
        if "options" not in header and "sent" not in header:
            return None
        guarded = Guarded(task.run, DEFAULTS, False)
    return guarded, options_for(guarded, header)


def options_for(guarded: Guarded, header: Header) -> Options:
    """Return how a message's task runs: what its caller asked for, over what the task says."""
    if "options" not in header:
        return guarded.options
    # Those of a newer release, or of no release: the run must not fail for them.
    known = {name: value for name, value in header["options"].items() if name in CALL_OPTIONS}
    try:
        return options_of_call(guarded.options, known)
    except ConfigurationError as error:
        name = getattr(guarded.function, "__qualname__", guarded.function)
        logger.warning("The options for one call of %s are ignored: %s", name, error)
        return guarded.options


def _options_of(function: Any) -> Options | None:
    options = getattr(function, "single_instance", None)
    return options if isinstance(options, Options) else None
