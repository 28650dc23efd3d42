"""A lease as its holder sees it, and the owner of the lease."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from .holder import HeldLock
from .store import LeaseStore

if TYPE_CHECKING:
    from .renewer import Lane

#: A lease is renewed when this part of it has passed.
RENEW_AFTER: Final = 1 / 3


#: The kind of store that a holder knows its lease to be in.
S = TypeVar("S", bound=LeaseStore)


class Owner:
    """
    The owner of a lock: the object that can release it, its thread and its task.

    It keeps none of them alive.

    Args:
        lock: The lock's object.
        thread: A reference to something that lives as long as the thread.
        run: The request of the running task, which lives as long as the run; None: no task.
    """

    __slots__ = ("lock", "reported", "run", "thread")

    def __init__(self, lock: object, thread: weakref.ref[Any], run: object) -> None:
        self.lock = weakref.ref(lock)
        self.thread = thread
        self.run = None if run is None else weakref.ref(run)
        #: Whether it was reported that the lock's object is gone.
        self.reported = False

    def find_end(self) -> str | None:
        """Return what ended before it released the lock, as a clause; None: nothing did."""
        if self.thread() is None:
            return "the thread that took it ended without releasing it"
        if self.run is not None and self.run() is None and self.lock() is None:
            return "the task that took it ended without releasing it"
        return None

    @property
    def scope(self) -> str:
        """Name what ends the renewal of a lock whose object is gone: its thread or its task."""
        return "thread" if self.run is None else "task"

    def is_forgotten(self) -> bool:
        """Return True, once, if the lock's object is gone, so that nothing can release the lock."""
        if self.reported or self.lock() is not None:
            return False
        self.reported = True
        return True


class Lease(Generic[S]):
    """
    A lease as its holder sees it.

    Args:
        store: Where the lock lives.
        name: The lock's name.
        token: Which acquisition this is.
        seconds: Length of the lease.
        asked_at: When the last request that began a lease was sent, by the
            monotonic clock. The lease is trusted for ``seconds`` from then on, less
            what the store may end it ``early``: it can only have got the request later.
        renew_until: When the thread stops to renew it, monotonic; inf: never.
        on_lost: Called, with the lease and the new holder's lock or None, by the
            thread that finds the lease to be no longer ours. It must not refer to
            the holder's object.
        owner: The lock's owner: the lease is renewed until it is removed, or until the owner's
            thread or task ends. None: it is renewed for as long as anything refers to it.
    """

    __slots__ = (
        "__weakref__",
        "asked_at",
        "lane",
        "lost",
        "name",
        "on_lost",
        "owner",
        "pid",
        "renew_at",
        "renew_until",
        "seconds",
        "store",
        "token",
    )

    def __init__(
        self,
        store: S,
        name: str,
        token: str,
        seconds: float,
        asked_at: float,
        renew_until: float,
        on_lost: Callable[[Lease[Any], HeldLock | None], None],
        owner: Owner | None = None,
    ) -> None:
        self.store = store
        self.name = name
        self.token = token
        self.seconds = seconds
        self.renew_until = renew_until
        self.on_lost = on_lost
        self.owner = owner
        self.pid = os.getpid()
        self.lost = False
        #: The thread that renews it; None: none does.
        self.lane: Lane | None = None
        self.began(asked_at)

    def began(self, asked_at: float) -> None:
        """Record that the store began the lease again, as asked at ``asked_at``."""
        self.asked_at = asked_at
        self.renew_at = asked_at + self.seconds * RENEW_AFTER

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted; 0 when it is over, lost or another process's."""
        if self.lost or self.pid != os.getpid():
            return 0.0
        return max(0.0, self.asked_at + self.seconds - self.store.early - time.monotonic())
