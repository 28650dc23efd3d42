"""
:func:`single_instance`, and how its task runs: take the lock, or do what ``on_conflict`` says.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, Unpack, overload

from celery.app.task import Context

from .. import conf
from ..delivery import call, copies
from ..delivery.call import Args, Function, Kwargs
from ..delivery.header import Header, get_header
from ..events import TASK_CONFLICT, TASK_NOT_RUN
from ..exceptions import AlreadyRunning, ConfigurationError
from ..leases.holder import holder_text
from ..leases.lease import Renewal
from ..locks import CacheLock, HeldLock
from ..locks.lock import LockOptions, Mine
from ..locks.misuse import refuse_misplaced
from ..locks.stores import get_store
from ..texts import get_logger
from .keys import call_key
from .options import (
    CALL_OPTIONS,
    DEFAULTS,
    GivenOptions,
    Guarded,
    Key,
    OnConflict,
    Options,
    UniqueUntil,
    check_key_names,
    make_options,
    options_of_call,
)
from .sent import SentLock, find_sent

logger = get_logger(__name__)

#: Part of ``retry_delay`` that is added at random, so that many runs don't retry at once.
JITTER: Final = 0.25


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

    def decorate(function: Function) -> Function:
        refuse_misplaced(function, "@single_instance", "its lock would be freed")
        check_key_names(function, options.key)

        @functools.wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            task, request, bound = call.find_call(alone, function, args)
            return _run(Guarded(function, options, bound), task, request, args, kwargs)

        call.show_signature(alone, call.own_signature(function))
        alone.single_instance = options  # type: ignore[attr-defined]
        return alone

    return decorate if function is None else decorate(function)


def refuse_lock_below(function: Any, decorator: str) -> None:
    """
    Refuse to decorate what ``@single_instance`` has decorated.

    Raises:
        TypeError: It has: a run that was skipped because the lock was held would count as done.
    """
    if any(hasattr(layer, "single_instance") for layer in call.layers(function)):
        raise TypeError(
            f"{decorator} stands above @single_instance of {function.__qualname__}: a run that "
            f"met the lock and was skipped would count as done. Put it below."
        )


def run_as_asked(task: Any, request: Any, run: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run a task without ``@single_instance`` alone, because the caller's options ask for it."""
    if find_guarded(task) is not None:
        return run(*args, **kwargs)
    return _run(Guarded(run, DEFAULTS, False), task, request, args, kwargs)


def _run(guarded: Guarded, task: Any, request: Context | None, args: Args, kwargs: Kwargs) -> Any:
    """
    Run a task under its lock, or do what ``on_conflict`` says.

    Args:
        request: The request that the task runs for; None: a direct call.
    """
    header = get_header(request)
    if request is not None and "duplicate" in header:
        reason = f"it was a duplicate of {header['duplicate']} when it was sent"
        TASK_NOT_RUN.emit(single_instance, task=task.name, task_id=request.id, reason=reason)
        return None
    guarded = as_asked(guarded, header)
    options = guarded.options
    # Eager runs and .apply() have no message that could be redelivered.
    message = None if request is None or request.is_eager else request
    name = get_lock_name(task, message, guarded, header, args[guarded.bound :], kwargs)
    mine = Mine()  # only this thread sees the lock
    lock = CacheLock(name, LockOptions(options.timeout, 0.0, options.limit), mine)
    lock.function = guarded.function
    work = functools.partial(call.run_for, request, guarded.function, args, kwargs)
    if message is not None:
        lock.run = task, message
        if "copy" in header or (message.delivery_info or {}).get("redelivered"):
            copies.drop_if_run_ended(task, message, get_store())
    run = Run(task, message, options, lock, mine, work)
    sent = find_sent(message, header) if message is not None and "sent" in header else None
    return run.run() if sent is None else run.run_and_settle(sent)


class Run(NamedTuple):
    """
    One run of a task, with the lock of the run and that of the send.

    Attributes:
        message: The request of its message; None: a direct call, ``.apply()`` or eager mode.
        lock: The lock of the run.
        mine: The state of the lock for its thread, such as the lease.
        work: Calls the task's function with the arguments of the run.
    """

    task: Any
    message: Any
    options: Options
    lock: CacheLock
    mine: Mine
    work: Callable[[], Any]

    def run_and_settle(self, sent: SentLock) -> Any:
        """Run, and then settle the lock of the send."""
        # Where the store can do both at once, this request starts the run for both locks.
        longest = 0.0 if self.options.unique_until == "start" else math.inf
        self.lock.along = Renewal(sent.name, sent.token, longest)
        try:
            result = self.run(sent)
        except BaseException as error:
            sent.end_run(self.task, error, self.lock)
            raise
        sent.end_run(self.task, None, self.lock)
        if sent.settled:
            self.message.safe_ended = "sent"
        return result

    def run(self, sent: SentLock | None = None) -> Any:
        """Call the function under the lock, or step aside."""
        mine = self.mine
        with self.lock as lock:
            if mine.lease is None:
                self._wait(lock.contender)
            if (lease := mine.lease) is not None:
                work = self.work
                if sent is not None:
                    work = functools.partial(sent.hold, lock, lease, self.options, work)
                if self.message is not None and self.task.acks_late:
                    given = (self.task, self.message, lease, work)
                    work = functools.partial(copies.run_and_mark, *given)
                result = work()
                if sent is not None and not sent.settled and sent.passed_on is None:
                    lock.along = sent.freed = Renewal(sent.name, sent.token, 0.0)
                return result
        contender = lock.contender
        assert contender is not None  # the lock was not acquired
        if self._is_held_by_own(contender):
            copies.requeue_self(self.task, self.message, contender)
        return self._step_aside(contender)

    def _is_held_by_own(self, contender: HeldLock | None) -> bool:
        """Return whether the lock is held under this message's own task id."""
        own = None if self.message is None else self.message.id
        return own is not None and contender is not None and contender.holder.task_id == own

    def _wait(self, contender: HeldLock | None) -> None:
        """Wait for the lock if the holder is this task id or the option says so."""
        if self._is_held_by_own(contender):
            self.lock.acquire(copies.OWN_RUN_WAIT)
        elif self.options.on_conflict == "wait" and self.message is not None:
            self._emit(contender)
            self.lock.acquire(self.options.blocking_timeout)

    def _step_aside(self, contender: HeldLock) -> None:
        name, way, holder = self.lock.name, self.options.on_conflict, contender.holder
        waited = 0.0 if self.message is None else self.options.blocking_timeout
        if not waited:  # else the conflict was emitted when the wait started
            self._emit(contender)
        if way == "skip":
            return
        if way == "retry" and self.message is not None:
            delay = self.options.retry_delay * (1 + random.uniform(0, JITTER))  # noqa: S311
            copies.resend_later(self.task, self.message, delay)
        if way == "reject" and self.message is not None:
            raise copies.Rejected(f"the lock {name!r} is held by {holder}", requeue=False)
        raise AlreadyRunning(name, str(holder), waited, holder.task_id)

    def _emit(self, contender: HeldLock | None) -> None:
        task_id, way = getattr(self.message, "id", None), self.options.on_conflict
        facts = {"name": self.lock.name, "task_id": task_id, "holder": holder_text(contender)}
        TASK_CONFLICT.emit(single_instance, on_conflict=way, exc_info=None, **facts)


def get_lock_name(
    task: Any,
    message: Context | None,
    guarded: Guarded,
    header: Header,
    args: Args | None,
    kwargs: Kwargs,
) -> str:
    """
    Return the name of one run's lock.

    Args:
        message: The message that the task runs for; None: there is no message.
        header: The message's header.
        args, kwargs: The arguments of the call, without a bound task; None: those of the message.
    """
    task_name = call.name_of(task, guarded.function) if task is None else task.name
    lock = task_name if isinstance(guarded.options.lock, conf.Unset) else guarded.options.lock
    key = header.get("key")
    # The key of the send is made of the message, whose arguments something may have changed.
    if key is None or not (
        message is None
        or call.is_as_sent(message, args or (), kwargs)
        or call.is_of_message(task, args)
    ):
        args, kwargs, serializer = call.sent_arguments(task, message, args, kwargs)
        sent: Args = ()  # without a message, no value needs an encoding
        if message is not None:
            sent = (*(message.args or ()), *(message.kwargs or {}).values())
        key = call_key(task_name, guarded, args, kwargs, serializer=serializer, sent=sent)
    return f"{header.get('lock', lock)}:{key}"


def name_lock(task: Any, args: Args, kwargs: Kwargs) -> str:
    """
    Return the name of the lock that a task takes when it runs with these arguments.

    Raises:
        ConfigurationError: The task has no ``@single_instance``, and therefore no lock.
        TypeError: The arguments don't fit the task.
    """
    guarded = find_guarded(task)
    if guarded is None:
        raise ConfigurationError(
            f"Task {task.name} has no @single_instance, so no lock keeps two runs of it apart. "
            f"Decorate it, or give the name of the lock that it takes itself."
        )
    return get_lock_name(task, None, guarded, Header(), args, kwargs)


@functools.lru_cache(maxsize=4096)
def find_guarded(task: Any) -> Guarded | None:
    """Return the function that ``@single_instance`` decorated in ``task``; None: no function."""
    guarded, bound = None, False
    for layer in call.layers(task.run):
        options = getattr(layer, "single_instance", None)
        if isinstance(options, Options):
            # Wrappers copy the attributes of wrapped functions: the innermost is ours.
            guarded = Guarded(layer.__wrapped__, options, bound)
        # The method that binds the task may be inside autoretry's wrapper, whose own signature
        # does not show it.
        bound = bound or inspect.ismethod(layer)
    return guarded


def find_guarded_as_asked(task: Any, header: Header) -> Guarded | None:
    """Return the guarded function of a message with this header; None: any number may run."""
    guarded = find_guarded(task)
    if guarded is None:
        # The sender may run another release of the code, in which the task has a lock.
        if "options" not in header and "sent" not in header:
            return None
        guarded = Guarded(task.run, DEFAULTS, False)
    return as_asked(guarded, header)


def as_asked(guarded: Guarded, header: Header) -> Guarded:
    """Return a guarded function for a message: the caller's options override the task's."""
    if "options" not in header:
        return guarded
    # Drop options that this release does not know: they must not make the run fail.
    known = {name: value for name, value in header["options"].items() if name in CALL_OPTIONS}
    try:
        return guarded._replace(options=options_of_call(guarded.options, known))
    except ConfigurationError as error:
        name = getattr(guarded.function, "__qualname__", guarded.function)
        logger.warning("The options for one call of %s are ignored: %s", name, error)
        return guarded
