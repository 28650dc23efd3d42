""":func:`single_instance`, the decorator. What happens at the run is in ``guard``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from celery import Task
from celery.local import Proxy

from .. import conf
from ..delivery.call import layers
from ..exceptions import ConfigurationError
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
def single_instance(
    function: Callable[..., Any] | None = None,
    /,
    *,
    key: Key | conf.Unset = conf.UNSET,
    lock: str | conf.Unset = conf.UNSET,
    on_conflict: OnConflict = "skip",
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    retry_delay: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | conf.Unset = conf.UNSET,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
    unique_until: UniqueUntil | None = None,
    sent_timeout: conf.Duration | conf.Unset = conf.UNSET,
    on_duplicate: OnDuplicate | conf.Unset = conf.UNSET,
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
        lock: What stands before the key in the lock's name; unset: the task's name. Tasks
            with the same ``lock`` exclude each other where their keys are equal, at the
            send too.
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
        unique_until: Send it once, too: a second send before the first ``"start"``s
            or ``"end"``s is a duplicate. None: each send is published. Needs
            ``base=SafeTask``. With ``"start"``, ``on_conflict="retry"`` lets the one
            that was sent meanwhile run afterwards; skipped, it would be lost.
        sent_timeout: How long a message that nobody hears of again keeps others from
            being sent, seconds or timedelta, plus its ``countdown`` or ``eta``, and no
            longer than until it ``expires``; unset: ``SENT_TIMEOUT``. While it runs, and
            with ``"end"``, the lock is renewed like that of the run. Only with
            ``unique_until``.
        on_duplicate: What a duplicate send does. ``"existing"`` (unset): returns the
            result of the one already sent, with ``is_duplicate`` True. ``"raise"``:
            ``AlreadySent``. In a chain, chord or group, or with a link, it is published
            all the same, and its run returns None. Only with ``unique_until``.

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
    watch(runs=unique_until is not None)
    options = make_options(
        key=key,
        lock=lock,
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

        @functools.wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return run_alone(alone, function, options, args, kwargs)

        # Celery checks arguments at .delay() by getfullargspec, which looks only here.
        alone.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        alone.single_instance = options  # type: ignore[attr-defined]
        return alone

    return decorate if function is None else decorate(function)


#: Functions that return before their body runs.
_LATE = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def refuse_misplaced(function: Any, decorator: str, early: str, *, above_lock: bool = True) -> None:
    """
    Refuse to decorate anything but a function whose work ends with its call.

    Args:
        early: The effect before the body has run, as a clause.
        above_lock: Whether the decorator may stand above ``@single_instance``. If not, a run
            that met the lock and was skipped would count as done.

    Raises:
        TypeError: It is a task, or no function; or the decorator stands above
            ``@single_instance``.
        ConfigurationError: Its body runs later.
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
    Refuse what returns before its body runs.

    Raises:
        ConfigurationError: Saying by ``early`` what would come too early.
    """
    if any(kind(function) for kind in _LATE):
        raise ConfigurationError(
            f"{decorator} can't decorate {function.__qualname__}: a coroutine or generator "
            f"function returns before its body runs, and {early} then."
        )


def _refuse_task(function: Any, decorator: str) -> None:
    """
    Refuse to stand above the decorator that makes the task.

    Raises:
        TypeError: It does, or there is no function at all.
    """
    # By type: isinstance() would evaluate a lazy task and finalize the app.
    if issubclass(type(function), Proxy | Task):
        raise TypeError(
            f"{decorator} stands above the decorator that makes the task, so it got the task "
            f"instead of the function. Put it below:\n"
            f"    @shared_task\n"
            f"    {decorator}\n"
            f"    def ..."
        )
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"{decorator} got {function!r} instead of a function. Options are given by name, "
            f'as in {decorator}(key="{{feed_url}}"); in a task class it stands above run.'
        )
