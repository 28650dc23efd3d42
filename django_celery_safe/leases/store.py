"""The interface that the renewing thread requires of a place that keeps leases."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, TypeAlias

from ..exceptions import CelerySafeError, LockBackendError
from ..texts import describe_error
from .holder import HeldLock


class Renewal(NamedTuple):
    """A lease to extend, so that it ends ``seconds`` after the store gets the request."""

    name: str
    token: str
    seconds: float


#: What stores extend: plain tuples will do, because a thousand of them are made faster.
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

    #: Whether the store consists of several servers, which :meth:`part` tells apart.
    has_parts: ClassVar[bool] = False

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

    def part(self, name: str) -> object:
        """
        Return which of the store's servers keeps a lease; None: not known, or only one server.

        Each server's leases have a renewing thread of their own, so a server that does not answer
        costs no lease on the other servers. The result may be out of date.
        """
        return None

    def renews(self) -> bool:
        """Return whether the renewing thread can see what this thread acquires now."""
        return True

    def leave_pool(self) -> None:  # noqa: B027 - most stores share nothing that runs short
        """Connect this renewing thread outside a pool that lock holders may have used up."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Close this thread's connection to the store, and connections that no thread uses."""

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
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
