""":func:`single_instance`, the decorator. What happens at the run is in ``guard``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from celery import Task
from celery.local import Proxy

from .. import conf
from ..exceptions import ConfigurationError
from .guard import run_alone
from .options import Key, check_key_names, make_options

P = ParamSpec("P")
T = TypeVar("T")


@overload
def single_instance(function: Callable[P, T], /) -> Callable[P, T | None]: ...
@overload
def single_instance(
    *,
    key: Key | conf.Unset = conf.UNSET,
    on_conflict: str = "skip",
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    retry_delay: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | conf.Unset = conf.UNSET,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...
def single_instance(
    function: Callable[..., Any] | None = None,
    /,
    *,
    key: Key | conf.Unset = conf.UNSET,
    on_conflict: str = "skip",
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    retry_delay: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | conf.Unset = conf.UNSET,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
) -> Any:
    """
    Let one run of a task go on at a time, for each key, on any number of machines.

    Goes below ``@shared_task``, bare or with options, on any Celery task. The
    lock is held from the start of the run to its end, whatever that end is, and
    is freed within one lease if the process dies. Runs one after the other are
    not kept apart: see ``do_once`` for doing a thing only once.

    A message that meets the lock of its own task id (it was delivered again, or
    is its own retry) is never skipped: it comes back when the lease is over.

    Args:
        key: Which calls are the same. Unset: those with equal arguments. A
            format string over argument names (``"{feed_url}"``), which stands in
            clear text in the lock's name; a list of argument names, hashed
            (``[]``: all calls); or a function of the task's arguments that
            returns a str, used as it is, or any plain value, hashed.
        on_conflict: What a run does when another holds the lock. ``"skip"``:
            returns None, so chains and chords go on. ``"retry"``: comes back
            after ``retry_delay``, without using up ``max_retries``. ``"wait"``: waits
            for ``blocking_timeout``, in its worker's slot, then ``AlreadyRunning``.
            ``"reject"``: Celery's ``Reject``, recorded as a failure.
            ``"raise"``: ``AlreadyRunning``.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT``.
        retry_delay: Seconds or timedelta until a retried run comes back, plus up
            to a quarter of jitter; unset: 5 s. Sooner where that is more than half
            the broker's ``visibility_timeout``. Only with ``on_conflict="retry"``.
        blocking_timeout: Longest time to wait, seconds or timedelta above 0.
            Required with ``on_conflict="wait"``, and only there.
        renew: Renew the lease while the run goes on. False: it ends at
            ``timeout``, and a longer run goes on unprotected.
        cache: Alias of the cache that holds the lock; unset: as the settings say.

    Raises:
        TypeError: It stands above ``@shared_task``.
        ConfigurationError: Options contradict each other, or the key names what
            is no argument.

    Example:
        >>> from celery import shared_task
        >>> from django_celery_safe import SafeTask, single_instance
        >>> @shared_task(base=SafeTask)
        ... @single_instance(key="{feed_url}")
        ... def import_feed(feed_url): ...

    Source:
        The Celery task cookbook, "Ensuring a task is only executed one at a time".
    """
    options = make_options(
        key=key,
        on_conflict=on_conflict,
        timeout=timeout,
        retry_delay=retry_delay,
        blocking_timeout=blocking_timeout,
        renew=renew,
        cache=cache,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_task(function)
        _refuse_late_body(function)
        check_key_names(function, options.key)

        @functools.wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return run_alone(alone, function, options, args, kwargs)

        # Celery checks arguments at .delay() by getfullargspec, which looks only here.
        alone.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        alone.single_instance = options  # type: ignore[attr-defined]
        return alone

    return decorate if function is None else decorate(function)


def _refuse_late_body(function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"@single_instance can't decorate {function.__qualname__}: a coroutine or generator "
            f"function returns before its body runs, and its lock would be freed then."
        )


def _refuse_task(function: Any) -> None:
    # By type: isinstance() would evaluate a lazy task and finalize the app.
    if issubclass(type(function), Proxy | Task):
        raise TypeError(
            "@single_instance stands above the decorator that makes the task, so it got the task "
            "instead of the function. Put it below:\n"
            "    @shared_task\n"
            "    @single_instance\n"
            "    def ..."
        )
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"@single_instance got {function!r} instead of a function. Options are given by name, "
            f'as in @single_instance(key="{{feed_url}}"); in a task class it stands above run.'
        )
