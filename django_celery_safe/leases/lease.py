"""
A lease: the clock by which a holder trusts it, the store that keeps it, and the holder's view.

``renewer`` renews leases; ``lease_table`` keeps them in a database table, ``locks.stores`` in other
places.
"""

from __future__ import annotations

import _thread
import math
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

from .. import process
from ..exceptions import CelerySafeError, LockBackendError
from ..texts import describe_error
from .holder import HeldLock

if TYPE_CHECKING:
    from .renewer import Lane

#: Return the time by a clock that is never set, s; all moments of a lease are by this clock.
#: Where the system can, it counts on while the machine is suspended: other clocks stand
#: still, so a lease would be trusted after others have taken it.
boottime: Final = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # looked up at each call: gevent may replace it after this import


def _call_later(seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    # For half of threading.Timer's CPU.
    is_cancelled = _thread.allocate_lock()
    is_cancelled.acquire()

    def wait() -> None:
        if not is_cancelled.acquire(timeout=seconds):
            function()

    _thread.start_new_thread(wait, ())
    return is_cancelled.release


@dataclass(slots=True)
class Clock:
    """
    The time of leases, and all waiting for it.

    Attributes:
        now: Return the time, s.
        wait: Wait for a notification of a condition, for some seconds at most; return whether
            it came.
        sleep: Wait for some seconds.
        call_later: Call a function after some seconds, on a thread that keeps no process alive;
            return what cancels that.
    """

    now: Callable[[], float] = boottime
    wait: Callable[[Condition, float], bool] = Condition.wait
    sleep: Callable[[float], None] = _sleep
    call_later: Callable[[float, Callable[[], object]], Callable[[], object]] = _call_later


#: The clock of this process. A test may give it other functions, by which it lets time pass.
clock: Final = Clock()


class Renewal(NamedTuple):
    """A lease to extend, so that it ends ``seconds`` after the store gets the request."""

    name: str
    token: str
    seconds: float


#: Leases to extend. Plain tuples have the same fields, and are made faster.
Renewals: TypeAlias = Sequence[tuple[str, str, float]]


class LeaseStore(ABC):
    """
    A place that keeps leases. Threads may share it.

    Every method raises :class:`LockBackendError` if the store did not answer;
    the state of the lease is then not known.
    """

    #: Whether each thread has its own connection to the store, and has to close it.
    connects_threads: ClassVar[bool] = False
    #: How much earlier than requested a lease may end, s. Holders do not trust that last part.
    early: ClassVar[float] = 0.0

    #: Whether a request may last for ever: a store on another machine has no limit, or the limits
    #: of its client do not hold in each of its steps.
    may_hang: ClassVar[bool] = True

    #: Whether the renewing thread can see what this thread acquires now.
    renews: bool = True

    #: Client errors that mean that the store did not answer, or refused the request.
    client_errors: tuple[type[Exception], ...] = ()
    #: Patterns of a server's refusals, each with its meaning (a clause) and advice (a
    #: sentence).
    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {}
    #: The store's name in messages, such as ``CACHES["default"] (redis)``.
    where: str

    @abstractmethod
    def extend(self, renewals: Renewals, within: float | None = None) -> Sequence[bool | None]:
        """
        Extend each lease to end ``seconds`` from now, if its token still holds it.

        The store extends them together if it can. A lease that has expired may be extended if no
        other holder took it, because nothing else relied on it in between.

        Args:
            within: Give up if the answer takes longer than this, s, if the store supports
                that; None: use the timeouts in the cache's settings.

        Returns:
            Whether each is still held; None: it is, and a transaction has it locked.
        """

    @abstractmethod
    def peek(self, name: str) -> HeldLock | None:
        """Return the lock called ``name``, with its holder; None: it is free."""

    def leave_pool(self) -> None:  # noqa: B027 - most stores share nothing that runs short
        """Connect this renewing thread outside a pool that lock holders may have used up."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Close this thread's connection to the store, and connections that no thread uses."""

    @contextmanager
    def errors(self, action: str) -> Iterator[Any]:
        """Turn the client's errors into :class:`LockBackendError` for ``action``."""
        try:
            yield
        except self.client_errors as error:
            raise self.explain(action, error) from error

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        """Return an error that explains the client's error."""
        text = describe_error(error)
        for pattern, (meaning, hint) in self.refusals.items():
            if re.search(pattern, text):
                return LockBackendError(self.where, action, f"{meaning} ({text})", hint)
        return LockBackendError(self.where, action, text)


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
        renew_at: When to renew the lease, by :data:`clock`; inf: the renewer has not got it yet.
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
    pid: int = field(default_factory=partial(getattr, process, "pid"), init=False)
    lost: bool = field(default=False, init=False)
    lane: Lane | None = field(default=None, init=False)
    along: Renewal | None = field(default=None, init=False)
    renew_at: float = field(default=math.inf, init=False)

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
