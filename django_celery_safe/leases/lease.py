"""The holder's view of a lease."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from .. import process
from .clock import clock
from .holder import HeldLock
from .store import LeaseStore, Renewal

if TYPE_CHECKING:
    from .renewer import Lane

#: A lease is renewed when this part of it has passed.
RENEW_AFTER: Final = 1 / 3


#: The type of the store that keeps the lease.
S = TypeVar("S", bound=LeaseStore)


@dataclass(slots=True, eq=False)
class Lease(Generic[S]):
    """
    The holder's view of a lease.

    Attributes:
        store: Where the lock lives.
        name: The lock's name.
        token: The id of this acquisition.
        seconds: Length of the lease.
        asked_at: When the last request that started or renewed the lease was sent, by
            :data:`clock`. The lease is trusted for ``seconds`` from then on, less the
            store's ``early``: the store can only have got the request later.
        on_lost: Called with the lease and the new holder's lock, or None, by the
            thread that finds that the lease is no longer ours. It must not refer to
            the holder's object.
        fence: The number of the acquisition; None: the store has no fences.
        lock: The object that can release the lock; it is renewed until it is removed, or until
            its thread or run has ended. None: it is not renewed.
        thread: An object that lives as long as the thread that took it.
        run: The request of the running task, which lives as long as the run; None: no task.
        lane: The lane whose thread renews the lease; None: it is not renewed.
        along: Another lock that is renewed in the same requests, so on the same server, and whose
            loss is not reported; None: there is none. ``extend()`` of the lease is not for it.
    """

    store: S
    name: str
    token: str
    seconds: float
    asked_at: float
    on_lost: Callable[[Lease[Any], HeldLock | None], None]
    fence: int | None = None
    lock: weakref.ref[Any] | None = None
    thread: weakref.ref[Any] | None = None
    run: weakref.ref[Any] | None = None
    pid: int = field(init=False)
    lost: bool = field(default=False, init=False)
    lane: Lane | None = field(default=None, init=False)
    along: Renewal | None = field(default=None, init=False)
    renew_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.pid = process.pid
        self.began(self.asked_at)

    def began(self, asked_at: float) -> None:
        """Record that the store started or renewed the lease, with a request at ``asked_at``."""
        self.asked_at = asked_at
        self.renew_at = asked_at + self.seconds * RENEW_AFTER

    def find_end(self) -> str | None:
        """Return, as a clause, which owner ended without a release; None: none has ended."""
        if self.thread is not None and self.thread() is None:
            return "the thread that took it ended without releasing it"
        is_over = self.run is not None and self.run() is None
        if is_over and self.lock is not None and self.lock() is None:
            return "the task that took it ended without releasing it"
        return None

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted; 0: expired, lost or another process's."""
        if self.lost or self.pid != process.pid:
            return 0.0
        return max(0.0, self.asked_at + self.seconds - self.store.early - clock.now())
