""":func:`single_instance`, the decorator. ``guard`` takes the lock when the task runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from .. import conf
from ..delivery.call import layers
from ..locks.misuse import refuse_misplaced
from .guard import run_alone
from .options import GivenOptions, Key, OnConflict, UniqueUntil, check_key_names, make_options

P = ParamSpec("P")
T = TypeVar("T")


@overload
def single_instance(function: Callable[P, T], /) -> Callable[P, T | None]: ...
@overload
def single_instance(
    **options: Unpack[GivenOptions],
) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...
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
    unique_until: UniqueUntil | conf.Duration | None = None,
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
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT``. It is renewed while
            the task runs.
        retry_delay: Seconds or timedelta before the retry, plus up to a quarter of
            that as jitter; unset: 5 s. At most half the broker's
            ``visibility_timeout``. Only with ``on_conflict="retry"``.
        blocking_timeout: Longest time to wait, seconds or timedelta above 0.
            Required with ``on_conflict="wait"``, and only allowed there.
        unique_until: Also deduplicate sends: a second send is a duplicate until the first
            message has started (``"start"``) or ended (``"end"``). Seconds or timedelta: any send
            within that time after the first send is a duplicate, whatever happens to the first
            message. None: each send is published. Needs ``base=SafeTask``. Combine ``"start"``
            with ``on_conflict="retry"``, so that a message sent during a run runs afterwards;
            with ``"skip"`` it would be lost. A duplicate send returns the result of the message
            already sent, with ``is_duplicate`` True; in a chain, chord or group, or with a link,
            the duplicate is published anyway, and its run returns None.

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
    options = make_options(
        key=key,
        lock=lock,
        limit=limit,
        on_conflict=on_conflict,
        timeout=timeout,
        retry_delay=retry_delay,
        blocking_timeout=blocking_timeout,
        unique_until=unique_until,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        refuse_misplaced(function, "@single_instance", "its lock would be freed")
        check_key_names(function, options.key)
        return run_alone(function, options)

    return decorate if function is None else decorate(function)


def refuse_lock_below(function: Any, decorator: str) -> None:
    """
    Refuse to decorate what ``@single_instance`` has decorated.

    Raises:
        TypeError: It has: a run that was skipped because the lock was held would count as done.
    """
    if any(hasattr(layer, "single_instance") for layer in layers(function)):
        raise TypeError(
            f"{decorator} stands above @single_instance of {function.__qualname__}: a run that "
            f"met the lock and was skipped would count as done. Put it below."
        )
