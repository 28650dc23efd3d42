"""
The contract of a lock store, and the types that it uses.

A store keeps, for each lock's name, who holds it and until when. Every
decision happens in one atomic step on the store's side. The suite
in tests/contract tests every store against this contract.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from ... import conf
from ...exceptions import ConfigurationError
from ...leases.holder import HeldLock, Holder
from ...leases.lease import LeaseStore, Renewal, clock

#: The policy that never deletes a lock, however full the server is.
SPARES_LOCKS: Final = "noeviction"
#: First and longest pause between two tries of a waiter that polls, s.
FIRST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.5


class Acquired(NamedTuple):
    """
    A successful acquisition: the lock is ours.

    Attributes:
        fence: The number of the acquisition; None: the store has no fences.
        place: Which of the lock's places it is, from 1.
    """

    fence: int | None
    place: int = 1


class LockRequest(NamedTuple):
    """
    A try to acquire a lock, for :meth:`Store.take`.

    Attributes:
        patience: None: this is the only try. Otherwise the caller is a waiter that a release may
            wake: the seconds to wait for a release before the try; 0: try now. Pass only the
            result of :meth:`Store.wait`, or 0.
        limit: How many places the lock has; more than 1 only if the store ``limits``. A task id
            that holds a place gets no second one: its message was delivered twice.
        along: Another lock: if this one is acquired, it gets the same lease, of its ``seconds``
            at most; 0: it is freed. Only without ``limit``, if the store :attr:`~Store.carries`.
    """

    name: str
    token: str
    seconds: float
    holder: Holder
    patience: float | None = None
    limit: int = 1
    along: Renewal | None = None


def choose_place(
    held: Sequence[HeldLock | None], request: LockRequest
) -> int | Acquired | HeldLock:
    """
    Choose a free place, for stores that read all places of a lock before they acquire it.

    Args:
        held: The lock at each place, in order; None: the place is free.

    Returns:
        The number of the first free place; Acquired if this acquisition holds a place already;
        otherwise the lock that is in the way.
    """
    places = dict(enumerate(held, 1))
    for place, lock in places.items():
        if lock is not None and lock.token == request.token:
            return Acquired(lock.fence, place)
    locks = [lock for lock in held if lock is not None]
    task_id = request.holder.task_id if request.limit > 1 else None
    for lock in locks:
        if task_id is not None and lock.holder.task_id == task_id:
            return lock
    free = next((place for place, lock in places.items() if lock is None), None)
    return min(locks, key=lambda lock: lock.remaining or 0.0) if free is None else free


class Store(LeaseStore):
    """A place where locks live."""

    #: Whether a lock may have several holders.
    limits: ClassVar[bool] = False
    #: Whether processes other than this one see the locks.
    shared: ClassVar[bool] = True
    #: Falsy: the next request needs a new connection, whose greeting is not to be part of a lease.
    open_connections: Any = True
    #: Whether a request for one lock may carry another along, which is then no request of its own.
    carries: ClassVar[bool] = False
    #: Shortest and longest lease that the store can keep, s.
    shortest_lease: ClassVar[float] = conf.SHORTEST_LEASE
    longest_lease: ClassVar[float] = conf.LONGEST_LEASE
    #: How this store can lose locks, as a clause for the checks; "": no known weakness.
    weakness: ClassVar[str] = ""

    def connect(self) -> None:
        """Have an open connection for the next request."""

    @abstractmethod
    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """
        Acquire the lock, or one of its places, if it is free.

        A second request with a token that holds the lock already returns Acquired,
        because a client may repeat a request whose answer was lost.

        Returns:
            Acquired, or the lock with its holder. If there are several holders: the place held
            by the same task id, or else the place whose lease ends first.
        """

    @abstractmethod
    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        """
        Free the lock if ``token`` holds it; return whether it did.

        Args:
            remaining: Seconds for which the lease is certain to last; None: not
                known. Used by stores that can't compare and delete in one step, and for a
                request that is repeated because its answer was lost: if the lease could not
                have expired and the lock is gone, the first request freed it.
        """

    def release_along(
        self, name: str, token: str, remaining: float | None, along: Renewal | None
    ) -> bool:
        """Do what :meth:`release` does, and free another lock, in a store that :attr:`carries`."""
        raise NotImplementedError(self.where)

    def wait(self, left: float, held_for: float, tries: int, seconds: float) -> float:
        """
        Pause before the next try, or return how long the next :meth:`take` should wait.

        Args:
            left: Longest time to wait, seconds; inf: for ever.
            held_for: Seconds until the holder's lease ends, if it is not renewed;
                inf if that is not known.
            tries: How many times the waiter has tried, which decides how long to pause.
            seconds: Length of the lease that the waiter requests.

        Returns:
            The ``patience`` for :meth:`take`, in stores where that waits;
            otherwise 0.
        """
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 1.5 ** min(tries, 20))
        clock.sleep(min(left, held_for, pause * random.uniform(0.5, 1.0)))  # noqa: S311
        return 0.0

    def iter_locks(self) -> Iterator[HeldLock]:
        """
        Yield every lock held in this store, a page at a time, in no particular order.

        Raises:
            ConfigurationError: This store can't list its locks.
        """
        raise ConfigurationError(
            f"{self.where} can't list its locks: such a cache can't tell which keys it holds. "
            f"Locks work there, and find_lock() and `manage.py celery_locks release NAME` find one "
            f"by its name; for a list use Redis or LOCK_DATABASE."
        )

    def check(self, seconds: float, limit: int = 1) -> None:
        """
        Refuse a lock that this store can't keep.

        Raises:
            ConfigurationError: The lease is too short or too long, or the store can't count
                holders.
        """
        if not self.shortest_lease <= seconds <= self.longest_lease:
            raise ConfigurationError(
                f"A lease of {seconds:.10g} s can't be kept in {self.where}: it has to be from "
                f"{self.shortest_lease:g} s to {self.longest_lease:.10g} s there. Give another "
                f"one, or keep the locks in Redis or a database."
            )
        if limit > 1 and not self.limits:
            raise ConfigurationError(
                f"{self.where} can't hold a lock with limit={limit}: it can't tell in one step "
                f"which of several places is free. Keep the lock in Redis or a database, or leave "
                f"out limit."
            )

    def nearest_lease(self, seconds: float) -> float:
        """Return the lease nearest to ``seconds`` that this store can keep."""
        return min(max(seconds, self.shortest_lease), self.longest_lease)

    def ask_eviction(self) -> tuple[str, int] | None:
        """
        Ask the server how it makes room when memory is short; None: it can't say.

        Returns:
            Its name of the policy, and the bytes that it may use; 0: no limit, so nothing is
            evicted yet. Of several servers, those of the one that is most likely to delete locks.
        """
        return None

    def ask_refused(self) -> list[str] | None:
        """
        Try the commands that locks need; return those that the server refuses, with its errors.

        None: the store can't try them.
        """
        return None

    def ask_time(self) -> float | None:
        """Return the time of the server's clock, seconds since the epoch; None: it has no clock."""
        return None
