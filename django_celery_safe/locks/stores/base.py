"""
The contract of a lock store, and what it says about locks.

A store keeps, for each lock's name, who holds it and until when. Everything
that decides anything happens in one atomic step on the store's side. The suite
in tests/contract holds every store to this.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from ... import conf
from ...exceptions import BackendNotSupported, ConfigurationError

#: Longest name, in characters, that stands in a key as it is. memcached allows
#: 250 for the whole key; the rest is for KEY_PREFIX, the version and our prefix.
MAX_PLAIN_NAME: Final = 180

#: What a hashed name begins with.
HASHED: Final = "sha256:"

#: Characters of a token: 16 random bytes, in hexadecimal. A lock's value begins with it.
TOKEN_LENGTH: Final = 32

#: Characters of a task's arguments that a holder keeps, so that many locks stay small.
LONGEST_ARGUMENTS: Final = 200

#: How a message shows that there are none.
NO_ARGUMENTS: Final = frozenset({"", "()", "[]", "{}"})

#: A moment, seconds since the epoch, beyond which no clock is: in the year 5138.
LATEST: Final = 1e11

#: First and longest pause between two tries of a waiter that nobody wakes, s.
FIRST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.5


class Holder(NamedTuple):
    """
    Who holds a lock, as the holder itself wrote it down.

    Attributes:
        host: Name of its machine.
        pid: Its process id there.
        since: When it acquired the lock, by its own clock, seconds since the epoch.
        renewed: Whether its process renews the lease.
        task: Name of the Celery task it runs; None outside tasks.
        task_id: Id of that task; None outside tasks.
        arguments: Those of that task, as its message shows them, see
            :func:`describe_arguments`; None: there is no message, or ``SHOW_ARGUMENTS``
            is off.
        lease: How long the lease was when it acquired the lock, s; None: not known.
    """

    host: str = ""
    pid: int = 0
    since: float = 0.0
    renewed: bool = False
    task: str | None = None
    task_id: str | None = None
    arguments: str | None = None
    lease: float | None = None

    def __str__(self) -> str:
        task = f"task {self.task_id} ({self.task})" if self.task_id else ""
        process = f"process {self.pid} on {self.host}" if self.host else ""
        # A message has no process.
        text = " in ".join(filter(None, [task, process]))
        # It ends up in logs, and those in terminals, which nobody else is to steer.
        return text if text.isprintable() else ascii(text)[1:-1]


#: Part of a lease after which a holder that lives has renewed it: it does at a third, and
#: tries again soon if that fails. Then a second more, since some clocks tick in seconds.
RENEWED_BY: Final = 1 / 2
TICK: Final = 1.0

#: A holder of whom nothing is known.
NOBODY: Final = Holder()


class HeldLock(NamedTuple):
    """
    A lock that someone holds.

    Attributes:
        name: Its name; the store's key where the name is not known.
        token: Which acquisition holds it.
        remaining: Seconds until its lease ends, by the store's clock; None
            where the store can't tell.
        fence: The acquisition's number; None where the store has none.
        holder: Who holds it.
    """

    name: str
    token: str = ""
    remaining: float | None = None
    fence: int | None = None
    holder: Holder = NOBODY

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as one flat dict, the holder's included."""
        fields = self._asdict()
        holder: Holder = fields.pop("holder")
        return {**fields, **holder._asdict()}


def seconds_since_renewal(lock: HeldLock) -> float | None:
    """
    Return how long ago its holder renewed a lock, or acquired it; it lived then.

    None where that is not known: the lease is not renewed, the store can't tell what is
    left of it, or ``extend()`` made it another one.
    """
    lease, left = lock.holder.lease, lock.remaining
    if not lock.holder.renewed or lease is None or left is None or left > lease + TICK:
        return None
    return max(0.0, lease - left)


def is_overdue(lock: HeldLock) -> bool | None:
    """
    Tell whether a holder that lives would have renewed the lock; None: not known.

    Wrong after ``extend()`` to another length, of which the store's value says nothing.
    """
    ago, lease = seconds_since_renewal(lock), lock.holder.lease
    return None if ago is None or lease is None else ago > lease * RENEWED_BY + TICK


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


class Renewable(Protocol):
    """A lease to extend: ``seconds`` from the moment the store gets it."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def seconds(self) -> float: ...


class Renewal(NamedTuple):
    """What :class:`Renewable` asks for, and nothing else."""

    name: str
    token: str
    seconds: float


class LeaseStore(ABC):
    """
    Where leases are kept, as the thread that renews them sees it. Threads may share one.

    Every method raises :class:`LockBackendError` if the store did not answer;
    the state of the lease is not known then.
    """

    #: Whether each thread that asks has a connection of its own, to be closed by it.
    connects_threads: ClassVar[bool] = False
    #: How much earlier than asked a lease may end, s. Nobody trusts that part of it.
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
        """Return who holds it, or None if nobody does."""

    def renews(self) -> bool:
        """Tell whether the renewing thread can see what this thread acquires now."""
        return True

    def leave_pool(self) -> None:  # noqa: B027 - most stores share nothing that runs short
        """Let this thread, which renews, connect outside of what the holders may have used up."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Close what this thread, or nobody in particular, has open to the store."""


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
        Free the lock if ``token`` holds it; tell whether it did.

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

    def acquire_along(
        self,
        along: Sequence[Renewable],
        name: str,
        token: str,
        seconds: float,
        holder: Holder,
        patience: float | None = None,
    ) -> Acquired | HeldLock:
        """Acquire; if that worked, :meth:`move` other locks, in the same step where possible."""
        outcome = self.acquire(name, token, seconds, holder, patience)
        if isinstance(outcome, Acquired):
            for lock in along:
                self.move(lock)
        return outcome

    def release_along(
        self, along: Sequence[Renewable], name: str, token: str, remaining: float | None = None
    ) -> bool:
        """
        Release, and :meth:`move` other locks, in the same step where possible.

        The others second, so that whoever waits for those finds this one free.
        """
        released = self.release(name, token, remaining)
        for lock in along:
            self.move(lock)
        return released

    def move(self, lock: Renewable) -> bool:
        """Let a lease end in ``seconds``, 0: now, if the token holds it; tell whether it did."""
        if lock.seconds:
            return self.extend([lock])[0]
        return self.release(lock.name, lock.token)

    @abstractmethod
    def iter_locks(self) -> Iterator[HeldLock]:
        """
        Yield every lock held in this store, a page at a time, in no order.

        Raises:
            BackendNotSupported: This store can't list its locks.
        """

    @abstractmethod
    def errors(self, action: str) -> AbstractContextManager[None]:
        """Turn the client's errors into :class:`LockBackendError` for ``action``."""

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

    def ask_weaknesses(self) -> list[str]:
        """Ask the server how its configuration can lose locks; clauses for the checks."""
        eviction = self.ask_eviction()
        if eviction is None or eviction.spares_locks or not eviction.max_memory:
            return []
        return [
            f"its maxmemory-policy is {eviction.policy}, which deletes locks when memory is short"
        ]

    def ask_refused(self) -> list[str] | None:
        """
        Try what locks ask of the server; return what it refuses to this user, with its errors.

        None: it can't be tried.
        """
        return None

    def ask_time(self) -> float | None:
        """Ask for the server's clock, seconds since the epoch; None: it has none that tells."""
        return None


def cant_list(where: str, reason: str) -> BackendNotSupported:
    """Return the error of a store that holds locks but can't list them."""
    return BackendNotSupported(
        where,
        reason,
        "Locks work there, and find_lock() and `manage.py celery_locks release NAME` find one by "
        "its name; for a list use Redis or LOCK_DATABASE.",
        what="list its locks",
    )


def plain_name(name: str) -> str:
    """
    Return how a lock's name stands in a key.

    Names that are long or hold anything but visible ASCII are hashed, since
    memcached refuses them and keys end up in terminals.
    """
    if len(name) <= MAX_PLAIN_NAME and name.isascii() and name.isprintable() and " " not in name:
        return name
    return hashed_name(name)


def hashed_name(name: str) -> str:
    """Return a text of 71 characters that stands for a lock's name in a key."""
    return HASHED + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def describe_arguments(args: object, kwargs: object) -> str | None:
    """
    Return a task's arguments as a holder keeps them, such as ``('a',) {'full': True}``.

    Only from what the message shows of them, so that what is redacted there is redacted
    here too. None if it shows nothing, or ``SHOW_ARGUMENTS`` is off.

    Args:
        args, kwargs: ``argsrepr`` and ``kwargsrepr`` of the message.
    """
    if not (isinstance(args, str) and isinstance(kwargs, str)) or not conf.get("SHOW_ARGUMENTS"):
        return None
    text = " ".join([part for part in (args, kwargs) if part not in NO_ARGUMENTS]) or "()"
    return text if len(text) <= LONGEST_ARGUMENTS else f"{text[: LONGEST_ARGUMENTS - 1]}…"


def encode_holder(name: str, holder: Holder) -> str:
    """Return the lock's name and its holder as JSON for the store."""
    # By hand, field by field: a fifth of the time of json.dumps, at every acquisition.
    task = "null" if holder.task is None else _quoted(holder.task)
    task_id = "null" if holder.task_id is None else _quoted(holder.task_id)
    arguments = "null" if holder.arguments is None else _quoted(holder.arguments)
    lease = "null" if holder.lease is None else repr(holder.lease)
    return (
        f"[{_quoted(name)},{_quoted(holder.host)},{holder.pid},{holder.since!r},"
        f"{'true' if holder.renewed else 'false'},{task},{task_id},{arguments},{lease}]"
    )


#: What json raises on text that is none of ours; RecursionError on very deep brackets.
GARBLED: Final = (ValueError, TypeError, RecursionError)


def decode_holder(text: str, lock: HeldLock) -> HeldLock:
    """Return ``lock`` with the name and holder that the text tells; as it is if it is garbled."""
    try:
        return decode_holders([text], [lock])[0]
    except GARBLED:
        return lock


def read_lock(name: str, text: str, remaining: float | None = None) -> HeldLock:
    """Return the lock whose value is ``text``: its token, and the holder right behind it."""
    lock = HeldLock(name, text[:TOKEN_LENGTH], remaining)
    return decode_holder(text[TOKEN_LENGTH:], lock)


def decode_holders(texts: Sequence[str], locks: Sequence[HeldLock]) -> list[HeldLock]:
    """
    Return each lock with the name and holder that its text tells.

    All at once, for a third of the time that one by one would take.

    Raises:
        One of GARBLED: One of the texts is none of ours.
    """
    decoded = json.loads(f"[{','.join(texts)}]")
    return [_described(lock, *fields) for fields, lock in zip(decoded, locks, strict=True)]


def _described(
    lock: HeldLock,
    name: object,
    host: object,
    pid: object,
    since: object,
    renewed: object,
    task: object,
    task_id: object,
    arguments: object = None,
    lease: object = None,
    *_later: object,
) -> HeldLock:
    # Of another version, in a rolling deployment, there may be fields less or more.
    if (
        isinstance(name, str)
        and isinstance(host, str)
        and isinstance(pid, int)
        and isinstance(since, float)
        and 0 <= since < LATEST
        and isinstance(task, str | None)
        and isinstance(task_id, str | None)
        and isinstance(arguments, str | None)
        and (lease is None or (isinstance(lease, float) and 0 < lease <= conf.LONGEST_LEASE))
    ):
        if arguments is not None and not conf.get("SHOW_ARGUMENTS"):
            arguments = None
        holder = Holder(host, pid, since, renewed is True, task, task_id, arguments, lease)
        return HeldLock(name, lock.token, lock.remaining, lock.fence, holder)
    raise TypeError("not written by this app")
