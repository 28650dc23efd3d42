"""The holder of a lease: how a process describes itself, and how others read that."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Final, NamedTuple

from .. import conf

#: Longest name, in characters, that stands in a key as it is. memcached allows
#: 250 for the whole key; the rest is for KEY_PREFIX, the version and our prefix.
MAX_PLAIN_NAME: Final = 180

#: The beginning of a hashed name.
HASHED: Final = "sha256:"

#: Characters of a token: 16 random bytes, in hexadecimal. A lock's value begins with it.
TOKEN_LENGTH: Final = 32

#: Characters of a task's arguments that a holder keeps, so that many locks stay small.
LONGEST_ARGUMENTS: Final = 200

#: How a message shows that there are none.
NO_ARGUMENTS: Final = frozenset({"", "()", "[]", "{}"})

#: A moment, seconds since the epoch, beyond which no clock is: in the year 5138.
LATEST: Final = 1e11


class Holder(NamedTuple):
    """
    The holder of a lease, as its process described itself.

    Attributes:
        host: Name of its machine.
        pid: Its process id there.
        since: When it acquired the lock, by its own clock, seconds since the epoch.
        renewed: Whether its process renews the lease.
        task: Name of the Celery task it runs; None outside tasks.
        task_id: Id of that task; None outside tasks.
        arguments: The arguments of that task, as its message shows them, see
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
        # It ends up in logs, and logs in terminals, which foreign text must not control.
        return text if text.isprintable() else ascii(text)[1:-1]


#: Part of a lease after which a holder that lives has renewed it: it does at a third, and
#: tries again soon if that fails. Then a second more, since some clocks tick in seconds.
RENEWED_BY: Final = 1 / 2
TICK: Final = 1.0

#: An unknown holder.
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
        holder: The description of its holder.
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


def holder_text(lock: HeldLock | None) -> str:
    """Return the holder of a lock as text; empty: it is not known."""
    return "" if lock is None else str(lock.holder)


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
    Return whether a holder that lives would have renewed the lock; None: not known.

    Wrong after ``extend()`` to another length, of which the store's value says nothing.
    """
    ago, lease = seconds_since_renewal(lock), lock.holder.lease
    return None if ago is None or lease is None else ago > lease * RENEWED_BY + TICK


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


#: Errors of json for text that is not ours; RecursionError for very deep brackets.
GARBLED: Final = (ValueError, TypeError, RecursionError)


def decode_holder(text: str, lock: HeldLock) -> HeldLock:
    """Return ``lock`` with the name and holder in the text; unchanged if the text is garbled."""
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
    Return each lock with the name and holder in its text.

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
    # Another version, in a rolling deployment, may write fewer fields or more.
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


HOST: Final = socket.gethostname()


def time_limit(task: Any, request: Any) -> float:
    """
    Return after how many seconds a running task is to be ended; inf: never.

    Renewal stops at this limit, because pools other than prefork and gevent never end a hung
    task. Without a hard limit renewal goes on for as long as the process lives.
    """
    limits: Sequence[float | None] = request.timelimit or ()
    # As the message says it: the hard limit, then the soft one.
    limit = limits[0] if limits and limits[0] is not None else task.time_limit
    return math.inf if limit is None else float(limit)


def describe_holder(task: Any, request: Any, renewed: bool) -> Holder:
    """Return this process, and the task that it runs or None, as the holder of a claim."""
    if task is None:
        return Holder(HOST, os.getpid(), time.time(), renewed)
    return Holder(HOST, os.getpid(), time.time(), renewed, task.name, request.id)


def describe_lock_holder(task: Any, request: Any, renewed: bool, lease: float) -> Holder:
    """As :func:`describe_holder`, with what a lock has no other place for."""
    here = HOST, os.getpid(), time.time(), renewed
    if task is None:
        return Holder(*here, lease=lease)
    return Holder(*here, task.name, request.id, arguments_of(request), lease)


def arguments_of(request: Any) -> str | None:
    """Return a running task's arguments as its holder keeps them; None: it has no message."""
    # Set by messages alone.
    return describe_arguments(
        getattr(request, "argsrepr", None), getattr(request, "kwargsrepr", None)
    )
