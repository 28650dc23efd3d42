"""
:class:`CacheLock`, the lock that :func:`cache_lock` returns.

``stores`` keeps the lock in a cache or database, and ``leases`` renews it.
"""

from __future__ import annotations

import functools
import math
import os
from asyncio import _get_running_loop as find_event_loop  # without an error if there is none
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

from django.core.exceptions import SynchronousOnlyOperation

from .. import conf
from ..events import LOCK_LOST, LOCK_NOT_RELEASED
from ..exceptions import (
    CelerySafeError,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    WrongTransaction,
)
from ..foreign_errors import ExcInfo
from ..leases.clock import clock
from ..leases.holder import HeldLock, describe_lock_holder, holder_text
from ..leases.lease import Lease
from ..leases.renewer import renewer
from ..transactions import aliases_in_atomic
from . import misuse
from .acquisition import Thread, give_back, here, record_lost, try_acquire
from .decorated import check_done, check_guardable
from .stores import get_store
from .stores.base import Store

P = ParamSpec("P")
T = TypeVar("T")


class LockOptions(NamedTuple):
    """
    The validated options of a lock; see :func:`cache_lock`.

    Attributes:
        timeout: Length of the lease, s; unset: ``LOCK_TIMEOUT``.
        blocking_timeout: Longest time to wait, s; None: for ever.
        renew: Whether the lease is renewed.
        cache: Alias of the cache; unset: the place that the settings name.
        limit: How many may hold the lock at once.
    """

    timeout: float | conf.Unset = conf.UNSET
    blocking_timeout: float | None = 0.0
    renew: bool = True
    cache: str | conf.Unset = conf.UNSET
    limit: int = 1


class CacheLock(misuse.NotAsync):
    """
    A lock with an owner, in the cache or database that the settings name.

    Made by :func:`cache_lock`. An object has one owner at a time and can be acquired again
    after a release: it is not reentrant, and belongs to the thread that acquired it. A copy
    is a separate lock object with the same name, and is not held.
    """

    _describe_holder = staticmethod(describe_lock_holder)

    def __init__(self, name: str, options: LockOptions) -> None:
        if not isinstance(name, str) or not name:
            raise misuse.not_a_name(name)
        self.name, self._options = name, options
        #: The lease of the current acquisition; None: this object does not hold the lock.
        self.lease: Lease[Store] | None = None
        #: The thread that acquired the lock.
        self._thread: Thread | None = None
        #: The thread that is acquiring the lock, by process id: a fork copies this object.
        self._acquiring: dict[int, Thread] = {}
        #: Threads in a ``with`` block that started without the lock.
        self._without: set[Thread] = set()
        self._fence: int | None = None
        #: The lock as the last failed attempt saw it, with its holder.
        self._contender: HeldLock | None = None
        self._asked = False
        #: The decorated function that the lock guards; None: a block.
        self.function: Callable[..., Any] | None = None

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
            ConfigurationError: The configured cache can't hold locks; or this object holds the
                lock already, or another thread is using it; or this thread holds it through
                another object, and would wait for ever; or an event loop runs in this thread,
                and the call would block it.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``.
        """
        longest = self._options.blocking_timeout
        if not isinstance(blocking_timeout, conf.Unset):
            longest = conf.WAIT.seconds_or_none(blocking_timeout, "blocking_timeout")
        if find_event_loop() is not None:
            misuse.refuse_event_loop(self.name, "acquire")
        pid, thread = os.getpid(), here.thread
        try:
            # One atomic step: if two threads arrive at once, one of them is refused.
            if self._acquiring.setdefault(pid, thread) is not thread:
                raise misuse.used_elsewhere(self.name)
            return self._acquire(longest)
        finally:
            if self._acquiring.get(pid) is thread:
                del self._acquiring[pid]

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
            LockNotAcquired: This object never acquired the lock, or has released it already.
            ConfigurationError: Another thread or process acquired it; or its database can't be
                queried while an event loop runs in this thread, and the lock is still held.
            WrongTransaction: LOCK_DATABASE is inside ``atomic()``; the lock is
                still held, and can be released after the transaction.
        """
        lease = self._our_lease()
        try:
            self.lease = None
            renewer.remove(lease)
            released = lease.store.release(lease.name, lease.token, lease.remaining)
        except (WrongTransaction, SynchronousOnlyOperation):
            # No request was sent to the store, so the lock can still be released: after the
            # transaction, or outside the event loop.
            self.lease = lease
            self._keep_renewed(lease)
            misuse.refuse_event_loop(self.name, "release")
            raise
        except CelerySafeError:
            raise
        except BaseException:
            renewer.remove(lease)
            give_back(lease.store, lease.token, lease.name)
            raise
        if released:
            if aliases := aliases_in_atomic():
                misuse.warn_in_atomic(self.name, aliases[0], self.function)
            return True
        if not lease.lost:
            record_lost(lease)
        return False

    def extend(self, timeout: conf.Duration) -> None:
        """
        Make the lease end ``timeout`` from now, and use that length for later renewals.

        Args:
            timeout: Seconds or timedelta. If the lease is renewed, renewal continues.

        Raises:
            LockLost: The lock is no longer ours; nothing was changed.
            LockNotAcquired: This object does not hold it.
            LockBackendError: The store did not answer; the lease may have the old or the
                new length.
        """
        seconds = conf.LEASE.seconds(timeout, "timeout")
        lease = self._our_lease()
        misuse.refuse_event_loop(self.name, "extend")
        lease.store.check_lease(seconds)
        try:
            if lease.lost or not renewer.extend(lease, seconds):
                self._raise_lost(lease)
        finally:
            if not lease.lost:
                self._keep_renewed(lease)  # the next renewal may be due sooner now

    def ensure(self) -> None:
        """
        Check with the store, in one round trip, that the lock is still ours.

        Call it before each step that two processes must not both do. It costs a
        round trip because only the store knows whether an operator freed the lock or
        the cache lost its memory; :attr:`held` answers without a round trip.
        If the lock is renewed, this also renews its lease.

        Raises:
            LockLost: The lease is no longer ours.
            LockNotAcquired: This object does not hold the lock.
            LockBackendError: The store did not answer; whether it is ours is not known.
        """
        self._asked = True
        lease = self._our_lease()
        misuse.refuse_event_loop(self.name, "ensure")
        if self._options.renew:
            ours = not lease.lost and renewer.extend(lease, lease.seconds)
        else:
            lock = lease.store.peek(lease.name) if lease.remaining > 0 else None
            ours = lock is not None and lock.token == lease.token
        if not ours:
            self._raise_lost(lease)

    @property
    def held(self) -> bool:
        """
        Whether this thread acquired the lock, has not released it, and may still trust it.

        Raises:
            ConfigurationError: An event loop runs in this thread, and another thread acquired
                the lock for it, for example through ``await sync_to_async(lock.acquire)()``.
        """
        self._asked = True
        lease = self.lease
        if lease is not None and self._thread is not here.thread and lease.remaining > 0:
            misuse.refuse_question(self.name)
        return self.remaining > 0

    @property
    def remaining(self) -> float:
        """Seconds for which the lock is trusted without another renewal; 0 if it is not held."""
        lease = self.lease
        if lease is None or self._thread is not here.thread:
            return 0.0
        return lease.remaining

    @property
    def token(self) -> str | None:
        """The token of the current acquisition; None while this object does not hold the lock."""
        return None if self.lease is None else self.lease.token

    @property
    def fence(self) -> int | None:
        """
        The number of the acquisition, larger than every earlier acquisition's in this store.

        Write the fence along with the data that the lock protects, and refuse a write that
        carries a smaller fence. It is None before the first acquisition, and if the
        store can't count acquisitions.
        """
        return self._fence

    @property
    def contender(self) -> HeldLock | None:
        """The lock as the last :meth:`acquire` found it held; None: :meth:`acquire` succeeded."""
        self._asked = True
        return self._contender

    def __bool__(self) -> bool:
        return self.held

    def __enter__(self) -> Self:
        before = self.lease
        try:
            acquired = self.acquire()
        except BaseException:
            # A soft time limit may hit right after acquire(). Don't release a lock that another
            # thread or an outer block holds through this object.
            if self.lease is not before and self._thread is here.thread:
                self._take_back()
            raise
        if not acquired:
            self._without.add(here.thread)
        self._asked = False
        return self

    def __exit__(self, *exc_info: *ExcInfo) -> None:
        kind, without = exc_info[0], here.thread in self._without
        self._without.discard(here.thread)
        if self.lease is None or (without and self._thread is not here.thread):
            if kind is None and not self._asked and self._contender is not None:
                misuse.warn_not_asked(self.name, self._contender.holder)
            return
        try:
            self.release()
        except CelerySafeError as failure:
            if kind is None and not isinstance(failure, LockBackendError | WrongTransaction):
                raise  # a mistake in the code, and the body raised no error that this could hide
            # The body's own result or error matters more; the lease ends by itself.
            if self._thread is here.thread:  # otherwise another thread has acquired it since
                self._forget()
            LOCK_NOT_RELEASED.emit(CacheLock, name=self.name, reason=str(failure), leases=1)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate ``function``: each call acquires a new lock, or raises LockNotAcquired."""
        check_guardable(function)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            lock = CacheLock(self.name, self._options)
            lock.function = function
            with lock:
                if not lock:
                    raise lock.not_acquired()
                return check_done(function, function(*args, **kwargs))

        return locked

    def __repr__(self) -> str:
        state = f"held, {self.remaining:.3g} s left" if self.lease else "not held"
        return f"<CacheLock {self.name!r}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Used by pickle and by copy: a held lock stays with the original.
        return CacheLock, (self.name, self._options)

    def not_acquired(self) -> LockNotAcquired:
        """Return the error for a lock that was not acquired, which names the holder if known."""
        if self._contender is None:
            return LockNotAcquired(self.name)
        holder = str(self._contender.holder) or "someone else"
        return LockNotAcquired(self.name, holder, self._options.blocking_timeout or 0.0)

    def _keep_renewed(self, lease: Lease[Store]) -> None:
        if self._options.renew and lease.store.renews():
            renewer.add(lease)

    def _forget(self) -> None:
        """Drop the lease and stop renewing it; the lock ends when the lease expires."""
        lease, self.lease = self.lease, None
        if lease is not None:
            renewer.remove(lease)

    def _acquire(self, longest: float | None) -> bool:
        if self.remaining > 0:
            raise misuse.held_already(self.name)
        if self._is_held_elsewhere():
            raise misuse.used_elsewhere(self.name)
        self._forget()
        seconds, limit = self._options.timeout, self._options.limit
        if isinstance(seconds, conf.Unset):
            seconds = conf.lock_timeout()
        store = get_store(self._options.cache)
        store.check_lease(seconds)
        if limit > 1:
            store.check_limit(limit)
        started_at = clock.now()
        patience = None if longest == 0 else 0.0
        tries = 0
        try:
            while not self._try_acquire(store, seconds, patience):
                left = math.inf if longest is None else started_at + longest - clock.now()
                if left <= 0:
                    return False
                if longest is None and limit == 1 and self._waits_for_itself():
                    raise misuse.held_by_this_thread(self.name)
                patience = store.wait(left, self._held_for(), tries, seconds)
                tries += 1
        except BaseException:
            # The lock may have been acquired already, for example before a soft time limit.
            self._take_back()
            raise
        return True

    def _is_held_elsewhere(self) -> bool:
        """Return whether another thread that still runs holds the lock through this object."""
        thread_ended = self._thread is None or self._thread() is None
        return self.lease is not None and self.lease.remaining > 0 and not thread_ended

    def _waits_for_itself(self) -> bool:
        """Return whether this thread holds the lock, through another object, until it ends."""
        token = "" if self._contender is None else self._contender.token
        return renewer.renews_for(here.thread, token)

    def _take_back(self) -> None:
        """Free the lock if the interrupted attempt had acquired it."""
        lease = self.lease
        if lease is not None:
            self._forget()
            give_back(lease.store, lease.token, lease.name)

    def _try_acquire(self, store: Store, seconds: float, patience: float | None) -> bool:
        renew = self._options.renew and store.renews()
        acquired = try_acquire(
            self,
            store,
            self._options.limit,
            seconds,
            patience,
            renew=renew,
            describe=self._describe_holder,
            on_lost=_report_lost,
        )
        if isinstance(acquired, HeldLock):
            self._contender = acquired
            return False
        # In this order: a thread that sees the lease also sees which thread owns it.
        self._thread, self.lease = here.thread, acquired.lease
        self._fence, self._contender = acquired.fence, None
        if renew:
            renewer.add(acquired.lease)
        return True

    def _held_for(self) -> float:
        """Return the seconds until the holder's lease can expire, plus a margin."""
        left = self._contender.remaining if self._contender is not None else None
        return math.inf if left is None else left + 0.001

    def _our_lease(self) -> Lease[Store]:
        if self.lease is None:
            raise self.not_acquired()
        if self.lease.pid != os.getpid():
            raise misuse.of_another_process(self.name, self.lease.pid)
        if self._thread is not here.thread:
            raise misuse.of_another_thread(self.name)
        return self.lease

    def _raise_lost(self, lease: Lease[Store]) -> NoReturn:
        raise LockLost(self.name, holder_text(record_lost(lease)))


def _report_lost(lease: Lease[Store], now_held: HeldLock | None) -> None:
    # Gets only the lease: a lease with a reference to its lock would keep both alive, and
    # renewed, after the last reference to the lock is gone.
    lease.lost = True
    LOCK_LOST.emit(CacheLock, name=lease.name, holder=holder_text(now_held))
