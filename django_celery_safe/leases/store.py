"""The interface of a place that keeps leases, for the thread that renews them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from .holder import HeldLock


class Renewable(Protocol):
    """A lease to extend: ``seconds`` from the moment the store gets it."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def seconds(self) -> float: ...


class Renewal(NamedTuple):
    """One request to renew: the fields of :class:`Renewable`, and no more."""

    name: str
    token: str
    seconds: float


class LeaseStore(ABC):
    """
    A place that keeps leases, for the thread that renews them. Threads may share one.

    Every method raises :class:`LockBackendError` if the store did not answer;
    the state of the lease is not known then.
    """

    #: Whether each thread that asks has a connection of its own, to be closed by it.
    connects_threads: ClassVar[bool] = False
    #: How much earlier than asked a lease may end, s. Holders do not trust that part of it.
    early: ClassVar[float] = 0.0

    #: How messages call it, such as ``CACHES["default"] (redis)``.
    where: str

    @abstractmethod
    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        """
        Let each lease end ``seconds`` from now if its token still holds it.

        All of them together where the store can. A lease that ended and was taken by
        nobody may be extended: no one else was trusted in between.

        Args:
            within: Give up if the answer takes longer than so many seconds, where
                the store can; None: as the cache's own settings say.
        """

    @abstractmethod
    def peek(self, name: str) -> HeldLock | None:
        """Return the lock with its holder; None: it is free."""

    def renews(self) -> bool:
        """Return whether the renewing thread can see what this thread acquires now."""
        return True

    def leave_pool(self) -> None:  # noqa: B027 - most stores share nothing that runs short
        """Let this thread, which renews, connect outside of what the holders may have used up."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Close the connections to the store of this thread, and those that no thread uses."""
