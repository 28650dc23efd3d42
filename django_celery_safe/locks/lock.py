"""
The lock: :func:`cache_lock` and the :class:`CacheLock` that it makes.

Where it is kept is a matter of ``stores``, how it is kept alive one of ``lease``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn, ParamSpec, Self, TypeVar

from celery._state import get_current_task
from django.core.exceptions import SynchronousOnlyOperation

from .. import conf
from ..exceptions import (
    CelerySafeError,
    ConfigurationError,
    LockBackendError,
    LockError,
    LockLost,
    LockNotAcquired,
    WrongTransaction,
)
from ..signals import (
    emit,
    is_observed,
    lock_acquired,
    lock_backend_failed,
    lock_contended,
    lock_lost,
    lock_released,
)
from ..texts import get_logger
from .decorated import check_done, check_guardable
from .lease import Lease, Owner, renewer
from .stores import locate
from .stores.base import Acquired, HeldLock, Holder, Store, describe_arguments

P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger(__name__)


class _Mark:
    """Something that lives as long as its thread, or greenlet."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    """What tells this thread from all others; its number may be another's later."""

    def __init__(self) -> None:
        self._mark = _Mark()
        #: The same object at each use, so it is compared by ``is``.
        self.thread = weakref.ref(self._mark)


_here = _Here()

HOST: Final = socket.gethostname()

#: What to do instead of using a lock in a coroutine.
IN_A_COROUTINE: Final = (
    "Put the whole `with cache_lock(...) as lock:` block into one function without async, and call "
    "that by `await asgiref.sync.sync_to_async(function)()`."
)


class CacheLock:
    """
    A lock with an owner, in the cache or database that the settings name.

    Made by :func:`cache_lock`. One object is one attempt after another by one
    owner: it is not reentrant, and belongs to the thread that acquired it. A copy
    is another lock of the same name, which nobody holds.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: conf.Duration | conf.Unset = conf.UNSET,
        blocking_timeout: conf.Duration | None = 0,
        renew: bool = True,
        cache: str | conf.Unset = conf.UNSET,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"{name!r} is no name for a lock: give a non-empty str. All locks with one name "
                f"in one cache exclude each other."
            )
        self.name = name
        self._timeout: float | conf.Unset = conf.UNSET
        if not isinstance(timeout, conf.Unset):
            self._timeout = conf.lease_seconds(timeout, "timeout")
        self._blocking_timeout = conf.wait_seconds(blocking_timeout, "blocking_timeout")
        self._renew = renew
        self._cache = cache
        self._lease: Lease[Store] | None = None
        #: The thread that acquired it, as :class:`_Here` knows it.
        self._thread: weakref.ref[_Mark] | None = None
        #: The thread that is acquiring it, for each process that has the object.
        self._acquiring: dict[int, weakref.ref[_Mark]] = {}
        #: Threads in a block that began without the lock.
        self._without: set[weakref.ref[_Mark]] = set()
        self._fence: int | None = None
        #: Who holds it instead, as the last attempt saw it.
        self._contender: HeldLock | None = None
        self._asked = False

    def acquire(self, blocking_timeout: conf.Duration | conf.Unset | None = conf.UNSET) -> bool:
        """
        Try to take the lock.

        Args:
            blocking_timeout: Longest time to wait, seconds or timedelta; 0 tries
                once, None waits for ever, unset is what the lock was made with.

        Returns:
            True if the lock is ours now; False if someone else held it all the while.

        Raises:
            LockBackendError: The store did not answer in time. If it did get the request,
                the lock is held by nobody until one lease has passed.
            LockError: This object holds the lock already, or another thread is using it; or
                an event loop runs in this thread, and would stand still meanwhile.
            BackendNotSupported: The configured cache can't hold locks.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``.
        """
        longest = self._blocking_timeout
        if not isinstance(blocking_timeout, conf.Unset):
            longest = conf.wait_seconds(blocking_timeout, "blocking_timeout")
        refuse_event_loop(self.name, "acquire")
        try:
            # One step, so that of two threads that come at once one is refused.
            if self._acquiring.setdefault(os.getpid(), _here.thread) is not _here.thread:
                self._raise_used_elsewhere()
            return self._acquire(longest)
        finally:
            if self._acquiring.get(os.getpid()) is _here.thread:
                del self._acquiring[os.getpid()]

    def release(self) -> bool:
        """
        Give the lock back if it is still ours.

        The owner token is compared and the lock deleted in one atomic step, so a
        lock that expired and was taken by someone else is left alone.

        Returns:
            True if it was released; False if it was no longer ours, which is
            also logged and sent as ``lock_lost``.

        Raises:
            LockBackendError: The store did not answer. The lock ends by itself
                when its lease does.
            LockNotAcquired: This object never acquired it, or released it before.
            LockError: Another thread or process acquired it; or its database can't be asked
                while an event loop runs in this thread, and the lock is still held.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``; the lock is
                still held, and can be released after that.
        """
        lease = self._our_lease()
        try:
            self._lease = None
            renewer().remove(lease)
            released = self._ask_to_release(lease)
        except (WrongTransaction, SynchronousOnlyOperation):
            # Nothing was asked of the store: it can be released after the transaction, or
            # outside the event loop.
            self._lease = lease
            self._keep_renewed(lease)
            refuse_event_loop(self.name, "release")
            raise
        except CelerySafeError:
            raise
        except BaseException:
            renewer().remove(lease)
            _give_back(lease.store, self.name, lease.token)
            raise
        if released:
            if is_observed(lock_released, logger, logging.DEBUG):
                emit(
                    lock_released,
                    logger,
                    logging.DEBUG,
                    "Released the lock %r.",
                    self.name,
                    sender=CacheLock,
                    name=self.name,
                )
            return True
        if not lease.lost:
            _note_lost(lease, self._find_holder(lease))
        return False

    def extend(self, timeout: conf.Duration) -> None:
        """
        Let the lease end ``timeout`` from now, and be of that length from now on.

        Args:
            timeout: Seconds or timedelta. A renewed lease goes on being renewed.

        Raises:
            LockLost: The lock is no longer ours; nothing was changed.
            LockNotAcquired: This object does not hold it.
            LockBackendError: The store did not answer; the lease may be of
                either length.
        """
        seconds = conf.lease_seconds(timeout, "timeout")
        lease = self._our_lease()
        refuse_event_loop(self.name, "extend")
        lease.store.check_lease(seconds)
        try:
            if lease.lost or not lease.extend(seconds):
                self._raise_lost(lease)
        finally:
            if not lease.lost:
                self._keep_renewed(lease)  # it may be due sooner now

    def ensure(self) -> None:
        """
        Go on only if the lock is ours: ask the store, in one round trip.

        Call it before each step that must not be done by two. It costs a round
        trip because only the store knows of a lock freed by an operator or lost
        with the memory of the cache; :attr:`held` is the answer without one.
        A renewed lease begins anew.

        Raises:
            LockLost: The lease is no longer ours.
            LockNotAcquired: This object does not hold the lock.
            LockBackendError: The store did not answer; whether it is ours is not known.
        """
        self._asked = True
        lease = self._our_lease()
        refuse_event_loop(self.name, "ensure")
        if self._renew:
            ours = not lease.lost and lease.extend(lease.seconds)
        else:
            ours = lease.remaining > 0 and self._is_ours(lease)
        if not ours:
            self._raise_lost(lease)

    @property
    def held(self) -> bool:
        """
        Whether this thread acquired the lock, did not release it, and may trust it still.

        Raises:
            LockError: Another thread acquired it for the event loop that runs in this one, such
                as by ``await sync_to_async(lock.acquire)()``.
        """
        self._asked = True
        lease = self._lease
        if lease is not None and self._thread is not _here.thread and lease.remaining > 0:
            self._refuse_question()
        return self.remaining > 0

    @property
    def remaining(self) -> float:
        """Seconds for which the lock is trusted without another renewal; 0 if it is not held."""
        lease = self._lease
        if lease is None or self._thread is not _here.thread:
            return 0.0
        return lease.remaining

    @property
    def token(self) -> str | None:
        """Which acquisition holds the lock; None while this object does not."""
        return None if self._lease is None else self._lease.token

    @property
    def fence(self) -> int | None:
        """
        The number of the acquisition, larger than that of every earlier one in this store.

        Write it along with what the lock protects, and refuse a write that
        carries a smaller one. None before the first acquisition, and where the
        store can't count.
        """
        return self._fence

    @property
    def contender(self) -> HeldLock | None:
        """Who held the lock when the last :meth:`acquire` failed; None if it did not."""
        return self._contender

    def __bool__(self) -> bool:
        return self.held

    def __enter__(self) -> Self:
        before = self._lease
        try:
            acquired = self.acquire()
        except BaseException:
            # A soft time limit may hit right after acquire(). What another thread or an outer
            # block holds by this object is not this block's.
            if self._lease is not before and self._thread is _here.thread:
                self._take_back()
            raise
        if not acquired:
            self._without.add(_here.thread)
        self._asked = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        without = _here.thread in self._without
        self._without.discard(_here.thread)
        if self._lease is None or (without and self._thread is not _here.thread):
            if kind is None and not self._asked and self._contender is not None:
                warnings.warn(
                    f"A block ran without the lock {self.name!r}, which {self._contender.holder} "
                    f"held, and did not ask. Write: with cache_lock(...) as lock: if lock: ...",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        try:
            self.release()
        except (LockError, WrongTransaction) as failure:
            if kind is None and not isinstance(failure, LockBackendError | WrongTransaction):
                raise  # a mistake, and no error of the body that it could hide
            # The body's own result or error matters more; the lease ends by itself.
            if self._thread is _here.thread:  # else another thread has acquired it since
                self._forget()
            self._note_not_released(failure)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate ``function``: each call takes a lock of its own, or raises LockNotAcquired."""
        check_guardable(function)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._again() as lock:
                if not lock:
                    raise lock.not_acquired()
                return check_done(function, function(*args, **kwargs))

        return locked

    def __repr__(self) -> str:
        state = f"held, {self.remaining:.3g} s left" if self._lease else "not held"
        return f"<CacheLock {self.name!r}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickle and copy alike: what is held stays with the original.
        options = (self._timeout, self._blocking_timeout, self._renew, self._cache)
        return _make_unheld, (self.name, *options)

    def __aenter__(self) -> NoReturn:
        raise LockError(
            f"The lock {self.name!r} has no `async with`: it is acquired and released by calls "
            f"that block. {IN_A_COROUTINE}"
        )

    async def __aexit__(self, *error: object) -> None:
        """Be there, since Python looks for it first."""

    def not_acquired(self) -> LockNotAcquired:
        """Return the error that says who holds the lock instead."""
        if self._contender is None:
            return LockNotAcquired(self.name)
        holder = str(self._contender.holder) or "someone else"
        return LockNotAcquired(self.name, holder, self._blocking_timeout or 0.0)

    def _keep_renewed(self, lease: Lease[Store]) -> None:
        if self._renew and lease.store.renews():
            renewer().add(lease)

    def _forget(self) -> None:
        """Renew no more what this object held; it ends by its lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            renewer().remove(lease)

    def _again(self) -> CacheLock:
        return _make_unheld(
            self.name, self._timeout, self._blocking_timeout, self._renew, self._cache
        )

    def _acquire(self, longest: float | None) -> bool:
        if self.remaining > 0:
            raise LockError(
                f"The lock {self.name!r} is held by this very object already; it is not "
                f"reentrant. Release it first, or make another cache_lock for another owner."
            )
        if self._is_held_elsewhere():
            self._raise_used_elsewhere()
        self._forget()
        settings = conf.current()
        seconds = self._timeout
        if isinstance(seconds, conf.Unset):
            seconds = conf.lease_seconds(settings["LOCK_TIMEOUT"], "LOCK_TIMEOUT")
        store = locate(self._cache, settings).store()
        store.check_lease(seconds)
        started_at = time.monotonic()
        patience = None if longest == 0 else 0.0
        tries = 0
        try:
            while not self._try_acquire(store, seconds, patience):
                left = math.inf if longest is None else started_at + longest - time.monotonic()
                if left <= 0:
                    return False
                patience = store.wait(left, self._held_for(), tries, seconds)
                tries += 1
        except BaseException:
            # Also what hit when the lock was acquired already, such as a soft time limit.
            self._take_back()
            raise
        return True

    def _is_held_elsewhere(self) -> bool:
        """Tell whether another thread, which still runs, holds the lock by this object."""
        thread_ended = self._thread is None or self._thread() is None
        return self._lease is not None and self._lease.remaining > 0 and not thread_ended

    def _raise_used_elsewhere(self) -> NoReturn:
        raise LockError(
            f"The lock {self.name!r} is being used by another thread than this one, "
            f"{threading.current_thread().name!r}, through this very object, which is not "
            f"reentrant. Make another cache_lock in each thread."
        )

    def _refuse_question(self) -> None:
        """Refuse to answer, in a coroutine, whether it holds what its helper thread acquired."""
        if runs_event_loop():
            raise LockError(
                f"The lock {self.name!r} was acquired by another thread than that of this event "
                f"loop, as by `await sync_to_async(lock.acquire)()`, and belongs to that thread: "
                f"whether it is held can't be asked here. {IN_A_COROUTINE}"
            )

    def _take_back(self) -> None:
        """Free what an attempt that failed has acquired."""
        lease = self._lease
        if lease is not None:
            self._forget()
            _give_back(lease.store, self.name, lease.token)

    def _try_acquire(self, store: Store, seconds: float, patience: float | None) -> bool:
        renew = self._renew and store.renews()
        token = os.urandom(16).hex()
        task = get_current_task()
        # Once: each look at it costs as much as all that is made of it.
        request = None if task is None else task.request
        arguments = None if request is None else arguments_of(request)
        holder = describe_holder(task, request, renew, seconds, arguments)
        asked_at = time.monotonic()
        try:
            outcome = self._ask_to_acquire(store, token, seconds, holder, patience)
        except CelerySafeError:
            raise
        except BaseException:
            # A soft time limit, most likely. The store may have it: then nobody else could
            # for a whole lease.
            _give_back(store, self.name, token)
            raise
        if not isinstance(outcome, Acquired):
            self._note_contended(outcome)
            return False
        renew_until = math.inf if task is None else asked_at + time_limit(task, request)
        owner = Owner(self, _here.thread, request) if renew else None
        lease = Lease(store, self.name, token, seconds, asked_at, renew_until, _note_lost, owner)
        self._fence, self._contender = outcome.fence, None
        # In this order: a thread that sees the lease sees whose it is.
        self._thread = _here.thread
        self._lease = lease
        if lease.remaining <= 0:
            took = time.monotonic() - asked_at
            raise LockBackendError(
                store.where,
                "acquire",
                f"not in time: it took {took:.3g} s, and the lease of {seconds:.3g} s was over by "
                f"then; give the lock a longer timeout",
            )
        if renew:
            renewer().add(lease)
        if is_observed(lock_acquired, logger, logging.DEBUG):
            emit(
                lock_acquired,
                logger,
                logging.DEBUG,
                "Acquired the lock %r.",
                self.name,
                sender=CacheLock,
                name=self.name,
                fence=outcome.fence,
            )
        return True

    def _ask_to_acquire(
        self, store: Store, token: str, seconds: float, holder: Holder, patience: float | None
    ) -> Acquired | HeldLock:
        """Send the one request; a lock that takes another along does it here."""
        return store.acquire(self.name, token, seconds, holder, patience)

    def _ask_to_release(self, lease: Lease[Store]) -> bool:
        """Send the one request; a lock that takes another along does it here."""
        return lease.store.release(self.name, lease.token, lease.remaining)

    def _held_for(self) -> float:
        """How long the holder's lease runs at the most; a little more, so that it is over then."""
        left = self._contender.remaining if self._contender is not None else None
        return math.inf if left is None else left + 0.001

    def _our_lease(self) -> Lease[Store]:
        if self._lease is None:
            raise self.not_acquired()
        if self._lease.pid != os.getpid():
            raise LockError(
                f"The lock {self.name!r} was acquired by process {self._lease.pid}, this is "
                f"process {os.getpid()}: a lock does not come along in a fork; acquire it here."
            )
        if self._thread is not _here.thread:
            raise LockError(
                f"The lock {self.name!r} was acquired by another thread than this one, "
                f"{threading.current_thread().name!r}: only the thread that took a lock knows when "
                f"its work is done. Make another cache_lock here."
            )
        return self._lease

    def _is_ours(self, lease: Lease[Store]) -> bool:
        lock = lease.store.peek(self.name)
        return lock is not None and lock.token == lease.token

    def _find_holder(self, lease: Lease[Store]) -> HeldLock | None:
        try:
            return lease.store.peek(self.name)
        except LockBackendError:
            return None

    def _raise_lost(self, lease: Lease[Store]) -> None:
        holder = self._find_holder(lease)
        if not lease.lost:
            renewer().remove(lease)
            _note_lost(lease, holder)
        raise LockLost(self.name, str(holder.holder) if holder is not None else "")

    def _note_contended(self, contender: HeldLock) -> None:
        self._contender = contender
        emit(
            lock_contended,
            logger,
            logging.DEBUG,
            "The lock %r is held by %s.",
            self.name,
            str(contender.holder) or "someone else",
            sender=CacheLock,
            name=self.name,
            holder=str(contender.holder),
        )

    def _note_not_released(self, failure: CelerySafeError) -> None:
        emit(
            lock_backend_failed,
            logger,
            logging.WARNING,
            "The lock %r could not be released and ends by its lease: %s",
            self.name,
            failure,
            sender=CacheLock,
            name=self.name,
            reason=str(failure),
        )


def cache_lock(
    name: str,
    *,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    blocking_timeout: conf.Duration | None = 0,
    renew: bool = True,
    cache: str | conf.Unset = conf.UNSET,
) -> CacheLock:
    """
    Return a lock that keeps two from running at once, on any number of machines.

    As a context manager it is truthy when acquired; as a decorator each call
    makes a new lock and raises LockNotAcquired if it is held. A lock keeps two
    from running at the same time; it does not keep a thing from being done
    again later (see ``do_once``).

    Args:
        name: What is locked. Any non-empty text; long or odd names are hashed.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT`` (30 s).
            A holder that dies leaves the lock held for at most this long.
        blocking_timeout: Longest time to wait; 0 tries once, None waits for ever.
        renew: Renew the lease, from a background thread, until the release or
            the end of the thread that took the lock. False: the lock ends at ``timeout``, and work
            that takes longer runs unprotected. In a Celery task with a ``time_limit``
            it is renewed for that long at the most, so that a task that hangs in a
            pool which can't end it does not hold for ever.
        cache: Alias of the cache that holds the lock; unset: ``LOCK_DATABASE``
            if that is set, else ``LOCK_CACHE``.

    Raises:
        ConfigurationError: A value means nothing, such as ``timeout=None``.

    Example:
        >>> from django_celery_safe import cache_lock
        >>> with cache_lock("feed:42") as lock:
        ...     if lock:
        ...         print("importing")
        importing

    Source:
        The Celery task cookbook, "Ensuring a task is only executed one at a time".
    """
    return CacheLock(
        name, timeout=timeout, blocking_timeout=blocking_timeout, renew=renew, cache=cache
    )


def _make_unheld(
    name: str,
    timeout: float | conf.Unset,
    blocking_timeout: float | None,
    renew: bool,
    cache: str | conf.Unset,
) -> CacheLock:
    return CacheLock(
        name, timeout=timeout, blocking_timeout=blocking_timeout, renew=renew, cache=cache
    )


def _note_lost(lease: Lease[Store], now_held: HeldLock | None) -> None:
    # Knows the lease alone: a lease that knew its lock would keep it, and itself,
    # alive and renewed after the last of its owners is gone.
    lease.lost = True
    holder = str(now_held.holder) if now_held is not None else ""
    emit(
        lock_lost,
        logger,
        logging.ERROR,
        "The lock %r was lost while its holder worked; %s.",
        lease.name,
        f"it is held by {holder} now" if holder else "nobody is known to hold it now",
        sender=CacheLock,
        name=lease.name,
        holder=holder,
    )


def _give_back(store: Store, name: str, token: str) -> None:
    """Free what an interrupted request may have left; if that fails, it ends by its lease."""
    with suppress(CelerySafeError):
        store.release(name, token)


def runs_event_loop() -> bool:
    """Tell whether this is a coroutine's code, so that its event loop is not to be blocked."""
    try:
        # Not the running loop: with gevent it is that of all greenlets of the thread.
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


def refuse_event_loop(name: str, action: str) -> None:
    """
    Refuse to block the event loop that runs in this thread, as Django's database calls do.

    Raises:
        LockError: One runs, and ``DJANGO_ALLOW_ASYNC_UNSAFE`` is not set.
    """
    if not runs_event_loop():
        return
    raise LockError(
        f"An event loop runs in this thread, so it can't {action} the lock {name!r}: a call that "
        f"blocks would hold up every coroutine, and a lock belongs to the thread that took it. "
        f"{IN_A_COROUTINE} In a notebook, set DJANGO_ALLOW_ASYNC_UNSAFE=true, as for Django's ORM."
    )


def time_limit(task: Any, request: Any) -> float:
    """
    Return after how many seconds a running task is to be ended; inf: never.

    Only prefork and gevent pools end it. In others one that hangs must not keep
    its lock for ever.
    """
    limits: Sequence[float | None] = request.timelimit or ()
    # As the message says it: the hard limit, then the soft one.
    limit = limits[0] if limits and limits[0] is not None else task.time_limit
    return math.inf if limit is None else float(limit)


def describe_holder(
    task: Any,
    request: Any,
    renewed: bool,
    lease: float | None = None,
    arguments: str | None = None,
) -> Holder:
    """Return this process, and the task that it runs, as the holder of a lock or a claim."""
    if task is None:
        return Holder(HOST, os.getpid(), time.time(), renewed, lease=lease)
    return Holder(HOST, os.getpid(), time.time(), renewed, task.name, request.id, arguments, lease)


def arguments_of(request: Any) -> str | None:
    """Return a running task's arguments as its holder keeps them; None: it has no message."""
    # Set by messages alone.
    return describe_arguments(
        getattr(request, "argsrepr", None), getattr(request, "kwargsrepr", None)
    )
