"""
The contract of a lock store, and what it says about locks.

A store keeps, for each lock's name, who holds it and until when. Everything
that decides anything happens in one atomic step on the store's side. The suite
in tests/contract holds every store to this.
"""

from __future__ import annotations

import random
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Final, NamedTuple

from ... import conf
from ...exceptions import (
    BackendNotSupported,
    CelerySafeError,
    ConfigurationError,
    LockBackendError,
    describe_error,
)
from ...leases.holder import HeldLock, Holder
from ...leases.store import LeaseStore

#: First and longest pause between two tries of a waiter that nobody wakes, s.
FIRST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.5


class Acquired(NamedTuple):
    """The lock is ours; ``fence`` is None where the store has none."""

    fence: int | None


class Eviction(NamedTuple):
    """
    How a server makes room when its memory is short.

    Attributes:
        policy: Its own name for it, such as ``noeviction``.
        max_memory: Bytes that it may use; 0: no limit, so nothing is deleted yet.
        spares_locks: Whether no lock is ever deleted by it, however full the server is.
    """

    policy: str
    max_memory: int
    spares_locks: bool


class Store(LeaseStore):
    """Where locks live."""

    #: Whether every acquisition gets a number above all earlier ones.
    fences: ClassVar[bool] = True
    #: Whether :meth:`iter_locks` works.
    lists: ClassVar[bool] = True
    #: Whether processes other than this one see the locks.
    shared: ClassVar[bool] = True
    #: Whether a release wakes a waiter; without it waiters ask again and again.
    wakes: ClassVar[bool] = False
    #: Shortest and longest lease that the store can keep, s.
    shortest_lease: ClassVar[float] = conf.SHORTEST_LEASE
    longest_lease: ClassVar[float] = conf.LONGEST_LEASE
    #: How locks get lost there, as a clause for the checks; "": in no way of its own.
    weakness: ClassVar[str] = ""
    #: Errors of the client that say that the store did not answer, or refused.
    client_errors: ClassVar[tuple[type[Exception], ...]] = ()
    #: Patterns of a server's refusals; what each means, as a clause; and what to do, as a
    #: sentence.
    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @abstractmethod
    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        """
        Take the lock if nobody holds it.

        Asking again with a token that holds the lock already says Acquired,
        because a client may send a request twice when the answer got lost.

        Args:
            patience: None: this is the only try. Else the caller is a waiter, whom
                a release may wake: seconds to wait for one before the try; 0: try
                now. Only what :meth:`wait` returned, or 0.

        Returns:
            Acquired, or the lock of whoever holds it.
        """

    @abstractmethod
    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        """
        Free the lock if ``token`` holds it; return whether it did.

        Args:
            remaining: Seconds of the lease that are left for certain; None: not
                known. For stores that can't compare and delete in one step, and for a
                request that is repeated because its answer got lost: if the lease was
                certain and the lock is gone then, the first try has freed it.
        """

    def wait(self, left: float, held_for: float, tries: int, seconds: float) -> float:
        """
        Let time pass until the next try.

        Args:
            left: Longest time to wait, seconds; inf: for ever.
            held_for: Seconds until the holder's lease ends, if it is not renewed;
                inf where that is not known.
            tries: How often the waiter has tried, which decides how long to pause.
            seconds: Length of the lease that it wants.

        Returns:
            The patience for :meth:`acquire`, where it is that which waits; else 0.
        """
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 1.5 ** min(tries, 20))
        time.sleep(min(left, held_for, pause * random.uniform(0.5, 1.0)))  # noqa: S311
        return 0.0

    def release_and_peek(
        self, name: str, token: str, other: str, remaining: float | None = None
    ) -> tuple[bool, bool]:
        """
        Release, and look at another lock, in one request where possible.

        Returns:
            The result of :meth:`release`, and whether anybody holds ``other``.
        """
        return self.release(name, token, remaining), self.peek(other) is not None

    def iter_locks(self) -> Iterator[HeldLock]:
        """
        Yield every lock held in this store, a page at a time, in no order.

        Raises:
            BackendNotSupported: This store can't list its locks.
        """
        raise BackendNotSupported(
            self.where,
            "such a cache can't tell which keys it holds",
            "Locks work there, and find_lock() and `manage.py celery_locks release NAME` find one "
            "by its name; for a list use Redis or LOCK_DATABASE.",
            what="list its locks",
        )

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Turn the client's errors into :class:`LockBackendError` for ``action``."""
        try:
            yield
        except self.client_errors as error:
            raise self.explain(action, error) from error

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        """Return the error that says what the client's error means."""
        text = describe_error(error)
        for pattern, (meaning, hint) in self.refusals.items():
            if re.search(pattern, text):
                return LockBackendError(self.where, action, f"{meaning} ({text})", hint)
        return LockBackendError(self.where, action, text)

    def check_lease(self, seconds: float) -> None:
        """
        Refuse a lease that this store can't keep.

        Raises:
            ConfigurationError: It is too short or too long.
        """
        if not self.shortest_lease <= seconds <= self.longest_lease:
            raise ConfigurationError(
                f"A lease of {seconds:.10g} s can't be kept in {self.where}: it has to be from "
                f"{self.shortest_lease:g} s to {self.longest_lease:.10g} s there. Give another "
                f"timeout, or keep the locks in Redis or a database."
            )

    def nearest_lease(self, seconds: float) -> float:
        """Return the lease nearest to ``seconds`` that this store can keep."""
        return min(max(seconds, self.shortest_lease), self.longest_lease)

    def emptied_with(self) -> object:
        """Return what ``clear()`` empties as a whole, to compare with others; None: only itself."""
        return None

    def ask_eviction(self) -> Eviction | None:
        """Ask the server how it makes room when memory is short; None: it can't be asked that."""
        return None

    def ask_refused(self) -> list[str] | None:
        """
        Try what locks ask of the server; return what it refuses to this user, with its errors.

        None: it can't be tried.
        """
        return None

    def ask_time(self) -> float | None:
        """Ask for the server's clock, seconds since the epoch; None: it has none that tells."""
        return None
