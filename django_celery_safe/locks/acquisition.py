"""One try to acquire a lock: the holder is described to the store, which gives a lease."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from celery._state import get_current_task

from ..exceptions import CelerySafeError, LockBackendError
from ..leases.holder import HeldLock, Holder, time_limit
from ..leases.lease import Lease, Owner
from ..leases.renewer import renewer
from .stores.base import Acquired, Store


class _Mark:
    """Something that lives as long as its thread, or greenlet."""

    __slots__ = ("__weakref__",)


#: Identity of a thread. Thread ids are reused, so this object is compared, by ``is``.
Thread: TypeAlias = weakref.ref[_Mark]


class _Here(threading.local):
    def __init__(self) -> None:
        self._mark = _Mark()
        #: Identity of the current thread, or greenlet.
        self.thread: Thread = weakref.ref(self._mark)


here = _Here()


class Acquisition(NamedTuple):
    """A lock that was acquired: its lease, and the acquisition's number or None."""

    lease: Lease[Store]
    fence: int | None


def try_acquire(
    lock: Any,
    store: Store,
    seconds: float,
    patience: float | None,
    *,
    renew: bool,
    describe: Callable[..., Holder],
    on_lost: Callable[[Lease[Any], HeldLock | None], None],
) -> Acquisition | HeldLock:
    """
    Try once to acquire a lock for the running task and this thread.

    Args:
        lock: The object that owns it, whose ``name`` it has.
        seconds: Length of the lease.
        patience: As for ``Store.acquire``.
        describe: As ``leases.holder.describe_lock_holder``.
        on_lost: As for :class:`Lease`.

    Returns:
        The acquisition, or the lock with its present holder.

    Raises:
        LockBackendError: The store did not answer, or too late.
    """
    token, task = os.urandom(16).hex(), get_current_task()
    # Once: each look at it costs as much as all that is made of it.
    request = None if task is None else task.request
    holder = describe(task, request, renew, seconds)
    asked_at = time.monotonic()
    try:
        outcome = store.acquire(lock.name, token, seconds, holder, patience)
        if not isinstance(outcome, Acquired):
            return outcome
        renew_until = math.inf if task is None else asked_at + time_limit(task, request)
        owner = Owner(lock, here.thread, request) if renew else None
        lease = Lease(store, lock.name, token, seconds, asked_at, renew_until, on_lost, owner)
        if lease.remaining > 0:
            return Acquisition(lease, outcome.fence)
    except CelerySafeError:
        raise
    except BaseException:
        # A soft time limit, most likely. If the store has set the lock, no other process
        # could acquire it for a whole lease.
        give_back(store, lock.name, token)
        raise
    give_back(store, lock.name, token)
    took = time.monotonic() - asked_at
    raise LockBackendError(
        store.where,
        "acquire",
        f"not in time: it took {took:.3g} s, and the lease of {seconds:.3g} s was over by then; "
        f"give the lock a longer timeout",
    )


def record_lost(lease: Lease[Store]) -> HeldLock | None:
    """Report that the lease was lost, unless that was done; return the new holder's lock."""
    holder = None
    with suppress(LockBackendError):
        holder = lease.store.peek(lease.name)
    if not lease.lost:
        renewer.remove(lease)
        lease.on_lost(lease, holder)
    return holder


def give_back(store: Store, name: str, token: str) -> None:
    """Free what an interrupted request may have left; if that fails, it ends by its lease."""
    with suppress(CelerySafeError):
        store.release(name, token)
