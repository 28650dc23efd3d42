""":func:`single_instance`, the decorator. ``guard`` takes the lock when the task runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from celery import Task
from celery.local import Proxy

from .. import conf
from ..delivery.call import is_django_task, layers
from ..exceptions import ConfigurationError
from ..usage import with_usage
from .guard import run_alone
from .message_endings import watch
from .options import (
    GivenOptions,
    Key,
    OnConflict,
    OnDuplicate,
    UniqueUntil,
    check_key_names,
    make_options,
)

P = ParamSpec("P")
T = TypeVar("T")


@overload
def single_instance(function: Callable[P, T], /) -> Callable[P, T | None]: ...
@overload
def single_instance(
    **options: Unpack[GivenOptions],
) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...
@with_usage
def single_instance(
    function: Callable[..., Any] | None = None,
    /,
    *,
    key: Key | conf.Unset = conf.UNSET,
    lock: str | conf.Unset = conf.UNSET,
    limit: int = 1,
    on_conflict: OnConflict = "skip",
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    retry_delay: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | conf.Unset = conf.UNSET,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
    unique_until: UniqueUntil | conf.Duration | None = None,
    sent_timeout: conf.Duration | conf.Unset = conf.UNSET,
    on_duplicate: OnDuplicate | conf.Unset = conf.UNSET,
) -> Any:
    """
    Allow one run of a task at a time, for each key, on any number of machines.

    Put it below ``@shared_task``, with or without options, on any Celery task. The
    lock is held from the start of the run until the run ends, in whatever way, and
    is freed within one lease if the process dies. It does not prevent one run
    after another: to do something only once, see ``do_once``.

    A message that finds the lock held under its own task id (because it was redelivered, or
    is a retry) is never skipped: it is redelivered when the lease has expired.

    Args:
        key: Which calls count as the same. Unset: calls with equal arguments. A
            format string over argument names (``"{feed_url}"``), which appears
            unhashed in the lock's name; a list of argument names, hashed
            (``[]``: all calls); or a function of the task's arguments that
            returns a str, used unchanged, or any plain value, hashed.
        lock: The part before the key in the lock's name; unset: the task's name. Tasks
            with the same ``lock`` and equal keys exclude each other, including when they
            are sent.
        limit: How many runs may overlap, from 1 to 1,000, as for ``cache_lock``.
        on_conflict: The behaviour of a run if another run holds the lock or, with a ``limit``,
            if that many other runs do. ``"skip"``: returns None, so chains and chords continue.
            ``"retry"``: is retried after ``retry_delay``, without using up ``max_retries``.
            ``"wait"``: waits up to ``blocking_timeout``, occupying its worker slot, then
            raises ``AlreadyRunning``. ``"reject"``: raises Celery's ``Reject``, which is
            recorded as a failure. ``"raise"``: raises ``AlreadyRunning``.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT``.
        retry_delay: Seconds or timedelta before the retry, plus up to a quarter of
            that as jitter; unset: 5 s. At most half the broker's
            ``visibility_timeout``. Only with ``on_conflict="retry"``.
        blocking_timeout: Longest time to wait, seconds or timedelta above 0.
            Required with ``on_conflict="wait"``, and only allowed there.
        renew: Renew the lease while the task runs. False: the lease ends at
            ``timeout``, and a longer run continues unprotected.
        cache: Alias of the cache that holds the lock; unset: the place that the settings name.
        unique_until: Also deduplicate sends: a second send is a duplicate until the first
            message has started (``"start"``) or ended (``"end"``). Seconds or timedelta: any send
            within that time after the first send is a duplicate, whatever happens to the first
            message. None: each send is published. Needs ``base=SafeTask``. Combine ``"start"``
            with ``on_conflict="retry"``, so that a message sent during a run runs afterwards;
            with ``"skip"`` it would be lost.
        sent_timeout: How long a message that has not started, and may be lost, makes other
            sends duplicates: seconds or timedelta, plus its ``countdown`` or ``eta``, but no
            longer than until it ``expires``; unset: ``SENT_TIMEOUT``. With ``"end"``, the
            message's lock is also renewed while the task runs, like the run's lock. Only with
            ``unique_until="start"`` or ``"end"``.
        on_duplicate: The behaviour of a duplicate send. ``"existing"`` (unset): returns the
            result of the message already sent, with ``is_duplicate`` True. ``"raise"``:
            raises ``AlreadySent``. In a chain, chord or group, or with a link, the duplicate is
            published anyway, and its run returns None. Only with ``unique_until``.

    Raises:
        TypeError: The decorator is above ``@shared_task``.
        ConfigurationError: Options contradict each other, or the key names something that
            is not an argument.

    Example:
        >>> from celery import shared_task
        >>> from django_celery_safe import SafeTask, single_instance
        >>> @shared_task(base=SafeTask)
        ... @single_instance(key="{feed_url}")
        ... def import_feed(feed_url): ...

    Source:
        The Celery task cookbook, "Ensuring a task is only executed one at a time".
    """
    watch(runs=unique_until is not None)
    options = make_options(
        key=key,
        lock=lock,
        limit=limit,
        on_conflict=on_conflict,
        timeout=timeout,
        retry_delay=retry_delay,
        blocking_timeout=blocking_timeout,
        renew=renew,
        cache=cache,
        unique_until=unique_until,
        sent_timeout=sent_timeout,
        on_duplicate=on_duplicate,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        refuse_misplaced(function, "@single_instance", "its lock would be freed")
        check_key_names(function, options.key)
        return run_alone(function, options)

    return decorate if function is None else decorate(function)


#: Functions that return before their body runs.
_LATE = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def refuse_misplaced(function: Any, decorator: str, early: str, *, above_lock: bool = True) -> None:
    """
    Refuse to decorate anything but a function whose work is done when it returns.

    Args:
        early: What would happen before the body has run, as a clause.
        above_lock: Whether the decorator may be above ``@single_instance``. If not: a run
            that was skipped because the lock was held would count as done.

    Raises:
        TypeError: The object is a task, or not a function; or the decorator is above
            ``@single_instance``.
        ConfigurationError: The function's body runs after its call returns.
    """
    _refuse_task(function, decorator)
    if not above_lock and any(hasattr(layer, "single_instance") for layer in layers(function)):
        raise TypeError(
            f"{decorator} stands above @single_instance of {function.__qualname__}: a run that "
            f"met the lock and was skipped would count as done. Put it below."
        )
    _refuse_late_body(function, decorator, early)


def _refuse_late_body(function: Callable[..., Any], decorator: str, early: str) -> None:
    """
    Refuse a function that returns before its body runs.

    Raises:
        ConfigurationError: It does; the error says, with ``early``, what would happen too early.
    """
    if any(kind(function) for kind in _LATE):
        raise ConfigurationError(
            f"{decorator} can't decorate {function.__qualname__}: a coroutine or generator "
            f"function returns before its body runs, and {early} then."
        )


def _refuse_task(function: Any, decorator: str) -> None:
    """
    Refuse a task, which means that the decorator is above the decorator that makes the task.

    Raises:
        TypeError: It is a task, or not a function.
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
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"{decorator} got {function!r} instead of a function. Options are given by name, "
            f'as in {decorator}(key="{{feed_url}}"); in a task class it stands above run.'
        )
