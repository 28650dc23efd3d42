"""One attempt to acquire a lock: its options, its holder, the store's answer, and the lease."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from celery._state import get_current_task
from django.core.exceptions import SynchronousOnlyOperation

from .. import conf
from ..exceptions import CelerySafeError, LockBackendError, WrongTransaction
from ..leases.clock import clock
from ..leases.holder import HeldLock, describe_holder, place_name, place_names
from ..leases.lease import Lease
from ..leases.renewer import renewer
from .stores.base import Acquired, LockRequest, Store

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


class _Mark:
    """An object that lives as long as its thread, or greenlet."""

    __slots__ = ("__weakref__",)


#: Identity of a thread, compared with ``is``: thread ids are reused.
Thread: TypeAlias = weakref.ref[_Mark]


class _Here(threading.local):
    def __init__(self) -> None:
        self._mark = _Mark()
        #: Identity of the current thread, or greenlet.
        self.thread: Thread = weakref.ref(self._mark)


here = _Here()


def try_acquire(
    lock: Any,
    store: Store,
    limit: int,
    seconds: float,
    patience: float | None,
    on_lost: Callable[[Lease[Any], HeldLock | None], None],
) -> Lease[Store] | HeldLock:
    """
    Try once to acquire a lock for the running task and this thread.

    Args:
        lock: The object that will own the lock; its ``name`` is the lock's name, its ``run`` the
            task and the request that run, if they are known already, and ``along`` another lock
            that the request carries along, if the store does that.
        limit: How many may hold the lock at once.
        seconds: Length of the lease.
        patience: See ``LockRequest``.
        on_lost: See :class:`Lease`.

    Returns:
        The lease, or the lock with its current holder.

    Raises:
        LockBackendError: The store did not answer, or answered after the lease had expired.
    """
    token, renew = os.urandom(16).hex(), store.renews()
    task, request = lock.run or _find_run()
    holder = describe_holder(task, request, renew, seconds)
    along = lock.along if store.carries and limit == 1 else None
    if store.greets:
        store.connect()
    asked_at = clock.now()
    try:
        outcome = store.take(LockRequest(lock.name, token, seconds, holder, patience, limit, along))
        if not isinstance(outcome, Acquired):
            return outcome
        run = None if request is None else weakref.ref(request)
        ends = (weakref.ref(lock) if renew else None, here.thread, run)
        name = lock.name if outcome.place == 1 else place_name(lock.name, outcome.place)
        lease = Lease(store, name, token, seconds, asked_at, on_lost, outcome.fence, *ends)
        took = clock.now() - asked_at
        if took < seconds - store.early:
            if along is not None:
                lock.along = None
            return lease
    except CelerySafeError:
        raise
    except BaseException:
        # A soft time limit, most likely. If the store has set the lock already, no other
        # process could acquire it until the lease expires.
        give_back(store, token, *place_names(lock.name, limit))
        raise
    give_back(store, token, name)
    raise LockBackendError(
        store.where,
        "acquire",
        f"not in time: it took {took:.3g} s, and the lease of {seconds:.3g} s was over by then; "
        f"give the lock a longer timeout",
    )


def _find_run() -> tuple[Any, Any]:
    task = get_current_task()
    return task, None if task is None else task.request


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
