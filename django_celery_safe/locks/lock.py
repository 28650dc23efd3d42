"""
:class:`CacheLock`, the lock that :func:`cache_lock` returns.

``stores`` keeps the lock in a cache or database, and ``leases`` renews it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, ParamSpec, Self, TypeVar

from celery._state import get_current_task
from django.core.exceptions import SynchronousOnlyOperation

from .. import conf, process
from ..events import LOCK_LOST, LOCK_NOT_RELEASED
from ..exceptions import (
    CelerySafeError,
    ConfigurationError,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    WrongTransaction,
)
from ..leases.holder import HeldLock, describe_holder, holder_text, place_name, place_names
from ..leases.lease import Lease, Renewal, clock
from ..leases.renewer import renewer
from ..transactions import aliases_in_atomic, has_block
from .misuse import refuse_event_loop, refuse_misplaced, warn_in_atomic, warn_not_asked
from .stores import get_store
from .stores.base import Acquired, LockRequest, Store

P = ParamSpec("P")
T = TypeVar("T")

#: Errors before any request to the store: the lock is still held, and can be released after the
#: transaction, or outside the event loop.
NOT_SENT: Final = (WrongTransaction, SynchronousOnlyOperation)


class LockOptions(NamedTuple):
    """
    The validated options of a lock; see :func:`cache_lock`.

    Attributes:
        timeout: Length of the lease, s; unset: ``LOCK_TIMEOUT``.
        blocking_timeout: Longest time to wait, s; None: for ever.
        limit: How many may hold the lock at once.
    """

    timeout: float | conf.Unset = conf.UNSET
    blocking_timeout: float | None = 0.0
    limit: int = 1


class Mine:
    """The part of a lock object that each thread has for itself."""

    #: The lease of the current acquisition; None: this thread does not hold the lock.
    lease: Lease[Store] | None = None
    fence: int | None = None
    #: The lock as the last failed attempt saw it, with its holder.
    contender: HeldLock | None = None
    #: Whether the block has asked if it has the lock.
    asked = False


class PerThread(Mine, threading.local):
    """The same, with values of its own in each thread that looks."""


class _Here(threading.local):
    """
    The thread, or greenlet, that looks.

    Attributes:
        thread: Its identity, compared with ``is``: thread ids are reused. Its object lives as
            long as the thread.
    """

    def __init__(self) -> None:
        self._mark = set[None]()
        self.thread = weakref.ref(self._mark)


here = _Here()


class CacheLock:
    """
    A lock with an owner, in the cache or database that the settings name.

    Made by :func:`cache_lock`. An object can be acquired again after a release, and is not
    reentrant. It belongs to the thread that acquired it: threads that share an object exclude
    each other, and only the thread that holds the lock releases it. A copy is a separate lock
    object with the same name, and is not held.
    """

    def __init__(self, name: str, options: LockOptions, mine: Mine | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise conf.wrong(name, "name", "name of a lock: give a non-empty str")
        self.name, self._options = name, options
        self._mine = PerThread() if mine is None else mine
        #: The decorated function that the lock guards; None: a block.
        self.function: Callable[..., Any] | None = None
        #: The task and the request that run, if the maker of the lock knows them; None: look.
        self.run: tuple[Any, Any] | None = None
        #: Another lock that the next request carries along, see ``LockRequest``; None: it did.
        self.along: Renewal | None = None

    def acquire(self, blocking_timeout: conf.Duration | conf.Unset | None = conf.UNSET) -> bool:
        """
        Try to acquire the lock.

        Args:
            blocking_timeout: Longest time to wait, seconds or timedelta; 0 tries
                once, None waits for ever; unset: the value that the lock was made with.

        Returns:
            True if the lock is ours now; False if someone else held it the whole time.

        Raises:
            LockBackendError: The store did not answer in time. If the request did reach it,
                the lock stays taken, although no one uses it, until its lease expires.
            ConfigurationError: The configured cache can't hold locks; or this thread holds the lock
                through this object already; or an event loop runs in this thread, and the call
                would block it.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``.
        """
        mine = self._mine
        seconds, longest, limit = self._options
        if not isinstance(blocking_timeout, conf.Unset):
            longest = conf.WAIT.seconds_or_none(blocking_timeout, "blocking_timeout")
        if asyncio._get_running_loop() is not None:  # a call less in each acquisition
            refuse_event_loop(self.name)
        if mine.lease is not None:
            if self.remaining > 0:
                raise ConfigurationError(
                    f"The lock {self.name!r} is held by this very object, and is not reentrant. "
                    f"Release it first, or take it once, in the outermost function that needs it."
                )
            self._forget()
        if isinstance(seconds, conf.Unset):
            seconds = float(conf.get("LOCK_TIMEOUT"))
        store = get_store()
        if limit > 1 or not store.shortest_lease <= seconds <= store.longest_lease:
            store.check(seconds, limit)
        started_at, tries = clock.now() if longest else 0.0, 0
        patience = None if longest == 0 else 0.0
        while (found := self._try(store, seconds, patience)) is not None:
            left = math.inf if longest is None else started_at + longest - clock.now()
            if left <= 0:
                return False
            # The holder's lease can't expire before that; plus a margin.
            held = math.inf if found.remaining is None else found.remaining + 0.001
            patience = store.wait(left, held, tries, seconds)
            tries += 1
        return True

    def _try(self, store: Store, seconds: float, patience: float | None) -> HeldLock | None:
        """
        Try once to acquire the lock for the running task and this thread.

        Args:
            seconds: Length of the lease.
            patience: See ``LockRequest``.

        Returns:
            The lock with its current holder; None: it is ours now.

        Raises:
            LockBackendError: The store did not answer, or answered after the lease had expired.
        """
        name, limit, mine = self.name, self._options.limit, self._mine
        token, renew = os.urandom(16).hex(), store.renews
        task, request = self.run or (now := get_current_task(), getattr(now, "request", None))
        holder = describe_holder(task, request, renew, seconds)
        along = self.along if store.carries and limit == 1 else None
        if not store.open_connections:
            store.connect()
        asked_at = clock.now()
        try:
            outcome = store.take(LockRequest(name, token, seconds, holder, patience, limit, along))
            if not isinstance(outcome, Acquired):
                mine.contender = outcome
                return outcome
            run = None if request is None else weakref.ref(request)
            ends = (weakref.ref(self) if renew else None, here.thread, run)
            place = name if outcome.place == 1 else place_name(name, outcome.place)
            facts = (place, token, seconds, asked_at, _report_lost, outcome.fence)
            lease = Lease(store, *facts, *ends)
            took = clock.now() - asked_at
            if took < seconds - store.early:
                if along is not None:
                    self.along = None
                mine.lease, mine.fence, mine.contender = lease, lease.fence, None
                renewer.add(lease)
                return None
        except BaseException as error:
            if not isinstance(error, CelerySafeError):
                # A soft time limit, most likely. If the store has set the lock already, no other
                # process could acquire it until the lease expires.
                self._forget()
                give_back(store, token, *place_names(name, limit))
            raise
        give_back(store, token, place)
        reason = (
            f"not in time: it took {took:.3g} s, and the lease of {seconds:.3g} s was over by "
            f"then; give the lock a longer timeout"
        )
        raise LockBackendError(store.where, "acquire", reason)

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
                when its lease expires.
            LockNotAcquired: This thread does not hold the lock through this object.
            ConfigurationError: Its database can't be queried while an event loop runs in this
                thread, and the lock is still held.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``; the lock is
                still held, and can be released after the transaction.
        """
        lease = self._our_lease()
        try:
            self._forget()
            store, facts = lease.store, (lease.name, lease.token, lease.remaining)
            if store.carries:
                released, self.along = store.release_along(*facts, self.along), None
            else:
                released = store.release(*facts)
        except NOT_SENT:
            self._mine.lease = lease
            renewer.add(lease)
            refuse_event_loop(self.name)
            raise
        except BaseException as error:
            if not isinstance(error, CelerySafeError):
                self._take_back(lease)
            raise
        if released:
            if has_block() and (aliases := aliases_in_atomic()):
                warn_in_atomic(self.name, aliases[0], self.function)
            return True
        record_lost(lease)
        return False

    def extend(self, timeout: conf.Duration) -> None:
        """
        Make the lease end ``timeout`` from now, and use that length for later renewals.

        Args:
            timeout: Seconds or timedelta.

        Raises:
            LockLost: The lock is no longer ours; nothing was changed.
            LockNotAcquired: This object does not hold it.
            LockBackendError: The store did not answer; the lease may have the old or the
                new length.
        """
        self._extend(conf.LEASE.seconds(timeout, "timeout"))

    def ensure(self) -> None:
        """
        Check with the store, in one round trip, that the lock is still ours.

        Call it before each step that two processes must not both do. It costs a
        round trip because only the store knows whether an operator freed the lock or
        the cache lost its memory; :attr:`held` answers without a round trip.
        This also renews the lease.

        Raises:
            LockLost: The lease is no longer ours.
            LockNotAcquired: This object does not hold the lock.
            LockBackendError: The store did not answer; whether it is ours is not known.
        """
        self._mine.asked = True
        self._extend(None)

    @property
    def held(self) -> bool:
        """
        Whether this thread acquired the lock, has not released it, and may still trust it.

        Raises:
            ConfigurationError: An event loop runs in this thread, and another thread may have
                acquired the lock for it, for example through
                ``await sync_to_async(lock.acquire)()``.
        """
        self._mine.asked = True
        if self._mine.lease is None:
            refuse_event_loop(self.name)
        return self.remaining > 0

    @property
    def lease(self) -> Lease[Store] | None:
        """The lease of the current acquisition; None: this thread does not hold the lock."""
        lease = self._mine.lease
        # A lock does not come along in a fork.
        return lease if lease is None or lease.pid == process.pid else None

    @property
    def remaining(self) -> float:
        """Seconds for which the lock is trusted without another renewal; 0 if it is not held."""
        lease = self._mine.lease
        return 0.0 if lease is None else lease.remaining

    @property
    def token(self) -> str | None:
        """The token of the current acquisition; None while this thread does not hold the lock."""
        return None if self.lease is None else self.lease.token

    @property
    def fence(self) -> int | None:
        """
        The number of the acquisition, larger than every earlier acquisition of this lock.

        Write the fence along with the data that the lock protects, and refuse a write that
        carries a smaller fence. It is None before the first acquisition, and if the
        store can't count acquisitions.
        """
        return self._mine.fence

    @property
    def contender(self) -> HeldLock | None:
        """The lock as the last :meth:`acquire` found it held; None: :meth:`acquire` succeeded."""
        self._mine.asked = True
        return self._mine.contender

    def __bool__(self) -> bool:
        return self.held

    def __enter__(self) -> Self:
        before = self._mine.lease
        try:
            self.acquire()
        except BaseException:
            # A soft time limit may hit right after acquire(). Don't release the lock of an outer
            # block.
            if (lease := self._mine.lease) is not None and lease is not before:
                self._take_back(lease)
            raise
        self._mine.asked = False
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self.lease is None:
            contender = self._mine.contender
            if exc_info[0] is None and contender is not None and not self._mine.asked:
                warn_not_asked(self.name, contender.holder)
            return
        try:
            self.release()
        except CelerySafeError as failure:
            # The body's own result or error matters more; the lease ends by itself.
            self._forget()
            LOCK_NOT_RELEASED.emit(CacheLock, name=self.name, reason=str(failure), leases=1)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate ``function``: each call acquires a new lock, or raises LockNotAcquired."""
        refuse_misplaced(function, "@cache_lock", "the lock would be released")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            lock = CacheLock(self.name, self._options)
            lock.function = function
            with lock:
                if not lock:
                    raise lock.not_acquired()
                return function(*args, **kwargs)

        return locked

    def __repr__(self) -> str:
        state = f"held, {self.remaining:.3g} s left" if self.lease else "not held by this thread"
        return f"<CacheLock {self.name!r}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Used by pickle and by copy: a held lock stays with the original.
        return CacheLock, (self.name, self._options)

    def not_acquired(self) -> LockNotAcquired:
        """Return the error for a lock that was not acquired, which names the holder if known."""
        if self.contender is None:
            return LockNotAcquired(self.name)
        holder = str(self.contender.holder) or "someone else"
        return LockNotAcquired(self.name, holder, self._options.blocking_timeout or 0.0)

    def _forget(self) -> None:
        """Drop the lease and stop renewing it; the lock ends when the lease expires."""
        lease, self._mine.lease = self._mine.lease, None
        if lease is not None:
            renewer.remove(lease)

    def _take_back(self, lease: Lease[Store]) -> None:
        """Free a lock whose acquisition, or release, was interrupted."""
        self._forget()
        renewer.remove(lease)
        give_back(lease.store, lease.token, lease.name)

    def _our_lease(self) -> Lease[Store]:
        if (lease := self.lease) is None:
            raise self.not_acquired()
        return lease

    def _extend(self, seconds: float | None) -> None:
        """Make the lease end ``seconds`` from now; None: as long as it was."""
        lease = self._our_lease()
        refuse_event_loop(self.name)
        seconds = lease.seconds if seconds is None else seconds
        lease.store.check(seconds)
        try:
            if lease.lost or not renewer.extend(lease, seconds):
                raise LockLost(self.name, holder_text(record_lost(lease)))
        finally:
            if not lease.lost:
                renewer.add(lease)  # the next renewal may be due sooner now


def _report_lost(lease: Lease[Store], now_held: HeldLock | None) -> None:
    # Gets only the lease: a lease with a reference to its lock would keep both alive, and
    # renewed, after the last reference to the lock is gone.
    lease.lost = True
    LOCK_LOST.emit(CacheLock, name=lease.name, holder=holder_text(now_held))


def record_lost(lease: Lease[Store]) -> HeldLock | None:
    """Report that the lease was lost, unless already reported; return the new holder's lock."""
    holder = None
    with suppress(LockBackendError):
        holder = lease.store.peek(lease.name)
    if not lease.lost:
        renewer.remove(lease)
        lease.on_lost(lease, holder)
    return holder


def give_back(store: Store, token: str, *names: str) -> None:
    """
    Free the lock that an interrupted request may have acquired under one of these names.

    There is no retry: if the store does not answer, the lock ends with its lease.
    """
    with suppress(CelerySafeError):
        any(store.release(name, token) for name in names)
