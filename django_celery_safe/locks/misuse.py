"""Errors and warnings for a lock that is used where it can't protect the work."""

from __future__ import annotations

import asyncio
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from celery.app.task import Task
from celery.local import Proxy

from ..compat import is_django_task
from ..exceptions import ConfigurationError
from ..leases.holder import Holder
from ..texts import get_logger
from ..usage import calling_line

logger = get_logger(__name__)

#: Functions that return before their body runs.
_LATE: Final = (iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def refuse_misplaced(function: Any, decorator: str, early: str) -> None:
    """
    Refuse to decorate anything but a function whose work is done when it returns.

    Args:
        early: What would happen before the body has run, as a clause.

    Raises:
        TypeError: It is a task, or not a function.
        ConfigurationError: The function's body runs after its call returns.
    """
    # By type: isinstance() would evaluate a lazy task and finalize the app.
    if issubclass(type(function), Proxy | Task) or is_django_task(function):
        maker = "@task" if is_django_task(function) else "@shared_task"
        raise TypeError(
            f"{decorator} stands above the decorator that makes the task, so it got the task "
            f"instead of the function. Put it below:\n"
            f"    {maker}\n"
            f"    {decorator}\n"
            f"    def ..."
        )
    if isinstance(function, type | staticmethod) or not callable(function):
        raise TypeError(
            f"{decorator} got {function!r} instead of a function. Put it right above the function, "
            f"in a task class above run; options are given by name, as in @single_instance(key="
            f'"{{feed_url}}").'
        )
    if any(kind(each) for kind in _LATE for each in (function, type(function).__call__)):
        raise ConfigurationError(
            f"{decorator} can't decorate {getattr(function, '__qualname__', function)}: a "
            f"coroutine or generator function returns before its body runs, and {early} then. Move "
            f"the work into a function without async and yield, and decorate that."
        )


def warn_not_asked(name: str, holder: Holder) -> None:
    """Warn, at the line of its ``with``, about a block that ran while another held the lock."""
    warnings.warn(
        f"A block ran without the lock {name!r}, which {holder} held, and did not ask. Write: with "
        f"cache_lock(...) as lock: if lock: ...",
        RuntimeWarning,
        stacklevel=3,
    )


#: The places that a warning has named, each once in a process.
_warned: set[str] = set()


def warn_in_atomic(name: str, alias: str, function: Callable[..., Any] | None) -> None:
    """
    Log, once for each place, that a lock ends before the transaction around it commits.

    Args:
        function: The decorated function that the lock guards; None: a block.
    """
    place = calling_line()
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is not None:
        place = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    if place not in _warned:
        _warned.add(place)
        logger.warning(
            "The lock %r was released inside atomic() of %r, by %s: it was free before the commit, "
            "so the next holder may have read what this one had not committed yet. Take the lock "
            "first: `with cache_lock(...) as lock:` around `with transaction.atomic():`, and "
            "@transaction.atomic below @single_instance or @cache_lock.",
            name,
            alias,
            place,
        )


def refuse_event_loop(name: str) -> None:
    """
    Refuse to block the event loop that runs in this thread, as Django's database calls do.

    Raises:
        ConfigurationError: An event loop runs, and ``DJANGO_ALLOW_ASYNC_UNSAFE`` is not set.
    """
    # Asked first, because an error costs more than all other checks of an acquisition. With
    # gevent, all greenlets of the thread share the loop, which then runs no task of this one.
    if asyncio._get_running_loop() is None or asyncio.current_task() is None:
        return
    if os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        return
    raise ConfigurationError(
        f"An event loop runs in this thread, so the lock {name!r} can't be used here: a call that "
        f"blocks would hold up every coroutine, and a lock belongs to the thread that took it. Put "
        f"the whole `with cache_lock(...) as lock:` block into one function without async, and "
        f"call that by `await asgiref.sync.sync_to_async(function)()`. In a notebook, set "
        f"DJANGO_ALLOW_ASYNC_UNSAFE=true, as for Django's ORM."
    )
