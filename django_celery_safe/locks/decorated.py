"""
Checks that a lock used as a decorator guards the work: it has to end when the call returns.

Used by :meth:`CacheLock.__call__`.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import Any, Final, TypeVar

from asgiref.sync import iscoroutinefunction
from celery.app.task import Task
from celery.local import Proxy

from ..exceptions import ConfigurationError

T = TypeVar("T")

#: Objects that other decorators return in place of a method.
DESCRIPTORS: Final = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
)

BELOW_TASK: Final = (
    "Write @cache_lock(...) below the task's decorator, right above the function, or use "
    "@single_instance."
)
BEFORE_BODY: Final = "it returns before its body runs, and the lock with it"
INSIDE: Final = "Write `with cache_lock(...) as lock:` inside it."
IN_SYNC: Final = (
    "Move the work into a function without async, decorate that, and call it by "
    "`await asgiref.sync.sync_to_async(function)()`."
)


def check_guardable(function: Any) -> None:
    """
    Refuse an object that a lock around its call would not guard.

    Raises:
        ConfigurationError: A lock can't guard it; the error says what to write instead.
    """
    refusal = _find_refusal(function)
    if refusal is not None:
        what, why, instead = refusal
        raise ConfigurationError(
            f"cache_lock can't decorate {_name_of(function)}, {what}: {why}. {instead}"
        )


def check_done(function: Any, result: T) -> T:
    """
    Return the result of a decorated function, unless the work has yet to be done.

    Raises:
        ConfigurationError: The result is a coroutine, a generator or the like, whose body would
            run without the lock.
    """
    kind = type(result)
    if kind in HARMLESS or not _is_yet_to_run(result):
        return result
    with suppress(Exception):
        result.close()  # type: ignore[attr-defined]  # else Python warns of a coroutine
    raise ConfigurationError(
        f"{_name_of(function)}, decorated with cache_lock, returned {_with_article(kind.__name__)},"
        f" whose work would be done after the lock is released. {INSIDE}"
    )


#: Types that most functions return.
HARMLESS: Final = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set})


def _find_refusal(function: Any) -> tuple[str, str, str] | None:
    """Return its kind, why a lock can't guard it, and what to write instead; None: a lock can."""
    # First, and by type() alone: isinstance() on a task's proxy would finalize its Celery app.
    if issubclass(type(function), Proxy | Task):
        return ("a Celery task", "what delay() sends would run without the lock", BELOW_TASK)
    if isinstance(function, DESCRIPTORS):
        return (
            f"a {type(function).__name__}",
            "it is not a function",
            f"Write @cache_lock(...) below @{type(function).__name__}, right above the function.",
        )
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.isclass(called):
        return "a class", "its methods would run without the lock", "Decorate the methods."
    if not callable(called):
        return "which can't be called", "there is nothing to guard", "Decorate a function."
    # For a callable object, its class has the function.
    for candidate in (called, type(called).__call__):
        if iscoroutinefunction(candidate):
            return "a coroutine function", BEFORE_BODY, IN_SYNC
        if inspect.isasyncgenfunction(candidate):
            return "an async generator function", BEFORE_BODY, IN_SYNC
        if inspect.isgeneratorfunction(candidate):
            return "a generator function", BEFORE_BODY, INSIDE
    return None


def _is_yet_to_run(result: object) -> bool:
    # contextlib's context managers keep the generator that does their work in ``gen``.
    return (
        inspect.isawaitable(result)
        or inspect.isasyncgen(result)
        or _is_unstarted(result)
        or _is_unstarted(getattr(result, "gen", None))
        or inspect.isasyncgen(getattr(result, "gen", None))
    )


def _is_unstarted(value: object) -> bool:
    return inspect.isgenerator(value) and inspect.getgeneratorstate(value) == inspect.GEN_CREATED


def _name_of(function: Any) -> str:
    if issubclass(type(function), Proxy):
        return "this"
    while isinstance(function, functools.partial):
        function = function.func
    inner = getattr(function, "__func__", function)
    return str(getattr(inner, "__qualname__", None) or repr(function))


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name.lstrip('_')}"
