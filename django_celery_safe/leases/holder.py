"""The holder of a lease: how a process describes itself, and how others read the description."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from datetime import UTC, datetime
from itertools import product
from json.encoder import encode_basestring_ascii as _quoted
from types import NoneType
from typing import Any, Final, NamedTuple

from django.utils.translation import gettext as _

from .. import conf, process
from ..texts import duration

#: Longest name that a key has unchanged: memcached allows 250 characters for the whole key.
MAX_PLAIN_NAME: Final = 180

#: Characters of a token: 16 random bytes, in hexadecimal. A lock's value starts with it.
TOKEN_LENGTH: Final = 32
#: Characters of a task's arguments that a holder keeps, so that a lock's value stays small.
LONGEST_ARGUMENTS: Final = 200

#: How a message shows that there are no arguments.
NO_ARGUMENTS: Final = frozenset({"", "()", "[]", "{}"})

#: Separates a lock's name from the number of a place, from 2, if several may hold the lock. The
#: first place has the lock's own name.
PLACE: Final = ":place:"

#: Latest believable time, ms since the epoch (the year 5138).
LATEST: Final = 1e14


class Holder(NamedTuple):
    """
    The holder of a lease, as its process described itself.

    Attributes:
        host: Name of the holder's machine.
        pid: Process id on that machine.
        since: When the holder acquired the lock, by its own clock, seconds since the epoch.
        renewed: Whether the holder's process renews the lease.
        task: Name of the Celery task that holds the lock; None: no task.
        task_id: Id of that task; None: no task.
        arguments: The task's arguments, as its message shows them, see
            :func:`describe_arguments`; None: there is no message, or ``SHOW_ARGUMENTS``
            is off.
        lease: Length of the lease when the lock was acquired, s; None: not known.
    """

    host: str = ""
    pid: int = 0
    since: float = 0.0
    renewed: bool = False
    task: str | None = None
    task_id: str | None = None
    arguments: str | None = None
    lease: float | None = None

    @property
    def process(self) -> str:
        """The holder's process, such as ``web1 pid 4711``; "": not known, or a message."""
        return f"{self.host} pid {self.pid}" if self.host else ""

    def __str__(self) -> str:
        task = f"task {self.task_id} ({self.task})" if self.task_id else ""
        process = f"process {self.pid} on {self.host}" if self.host else ""
        # A message has no process.
        text = " in ".join(filter(None, [task, process]))
        # The text ends up in logs and so in terminals: it must not contain control characters.
        return text if text.isprintable() else ascii(text)[1:-1]


#: Part of a lease after which a live holder has renewed it: it renews after a third.
RENEWED_BY: Final = 1 / 2
#: Added to that, s, because some clocks tick in seconds.
TICK: Final = 1.0


class HeldLock(NamedTuple):
    """
    A lock that someone holds.

    Attributes:
        name: The lock's name; the store's key if the name is not known.
        token: The token of the acquisition that holds the lock.
        remaining: Seconds until the lease ends, by the store's clock; None:
            the store does not report it.
        fence: The acquisition's number; None: the store has no fences.
        holder: The description of the holder.
        limit: How many may hold the lock at once. If more than 1, each holder has a place,
            which is a separate lock: ``<name>``, ``<name>:place:2``, ``<name>:place:3``.
    """

    name: str
    token: str = ""
    remaining: float | None = None
    fence: int | None = None
    holder: Holder = Holder()
    limit: int = 1

    @property
    def kind(self) -> str:
        """
        The kind of its holder: ``run`` for a process, ``message`` for a message.

        ``marker``: it holds nothing up, and says that a long run has ended.
        """
        if self.holder.host or not self.holder.task_id:
            return "run"
        is_marker = self.name.startswith(f"{self.holder.task}:ended:")  # see delivery.copies
        return "marker" if is_marker else "message"

    @property
    def place(self) -> int:
        """The number of its place, from 1; see ``limit``."""
        return split_place(self.name)[1] if self.limit > 1 else 1

    @property
    def age(self) -> float | None:
        """Seconds since the acquisition, by the clocks of both machines; None: unknown."""
        return max(0.0, time.time() - self.holder.since) if self.holder.since else None

    @property
    def renewed_ago(self) -> float | None:
        """
        Seconds since the holder last renewed, or acquired, the lock, and so was alive.

        None: this is not known, because the lease is not renewed, the store does not report the
        time left, or ``extend()`` gave the lease another length.
        """
        lease, left = self.holder.lease, self.remaining
        if not self.holder.renewed or lease is None or left is None or left > lease + TICK:
            return None
        return max(0.0, lease - left)

    @property
    def overdue(self) -> bool | None:
        """
        Whether a live holder would have renewed the lock by now; None: not known.

        May be wrong after ``extend()`` to another length, which the store's value does not show.
        """
        ago, lease = self.renewed_ago, self.holder.lease
        return None if ago is None or lease is None else ago > lease * RENEWED_BY + TICK

    @property
    def liveness(self) -> str:
        """A sentence that says whether the holder is alive, as far as the lease shows."""
        if self.kind != "run":
            return _("A message holds it: the message waits or runs, or its period lasts.")
        if not self.holder.renewed:
            return _("Its holder does not renew it, so nothing shows whether the holder lives.")
        if self.renewed_ago is None:
            return _("Its holder renews it while it lives; when it last did is not known.")
        if self.overdue:
            return _("Its renewal is overdue: most likely its holder is dead, stopped or cut off.")
        ago = duration(self.renewed_ago)
        return _("Its holder renewed it {time} ago, so it lives or died since.").format(time=ago)

    def as_json(self) -> dict[str, Any]:
        """Return the lock as ``celery_locks list --json`` shows it."""
        holder = self.holder
        since = datetime.fromtimestamp(holder.since, UTC).isoformat() if holder.since else None
        return {
            "name": self.name,
            "kind": self.kind,
            "task": holder.task,
            "arguments": holder.arguments,
            "task_id": holder.task_id,
            "host": holder.host or None,
            "pid": holder.pid or None,
            "since": since,
            "age_s": rounded(self.age),
            "remaining_s": rounded(self.remaining),
            "lease_s": holder.lease,
            "renewed": holder.renewed,
            "renewed_ago_s": rounded(self.renewed_ago),
            "overdue": self.overdue,
            "fence": self.fence,
            "place": self.place,
            "limit": self.limit,
        }


def place_name(name: str, place: int) -> str:
    """Return the lock name of a place (from 1) of a lock that several may hold."""
    return name if place == 1 else f"{name}{PLACE}{place}"


def place_names(name: str, limit: int) -> list[str]:
    """Return the names of all places of a lock."""
    return [place_name(name, place) for place in range(1, limit + 1)]


def split_place(name: str) -> tuple[str, int]:
    """Return the name of the lock that a place belongs to, and the place's number, from 1."""
    lock, _, place = name.rpartition(PLACE)
    return (lock, int(place)) if lock and place.isdecimal() else (name, 1)


def rounded(seconds: float | None) -> float | None:
    """Return a duration with milliseconds."""
    return None if seconds is None else round(seconds, 3)


def holder_text(lock: HeldLock | None) -> str:
    """Return the holder of a lock as text; "": not known."""
    return "" if lock is None else str(lock.holder)


def plain_name(name: str) -> str:
    """
    Return the form of a lock's name that is used in a key.

    Names that are long or have anything but visible ASCII are hashed: memcached refuses them.
    """
    if len(name) <= MAX_PLAIN_NAME and name.isascii() and name.isprintable() and " " not in name:
        return name
    return hashed_name(name)


def hashed_name(name: str) -> str:
    """Return a text of 71 characters that replaces a lock's name in a key."""
    return "sha256:" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def describe_arguments(args: object, kwargs: object) -> str | None:
    """
    Return a task's arguments in a holder's format, such as ``('a',) {'full': True}``.

    The text comes from the message, so a value that is redacted there is redacted here too.
    None if the message shows nothing, or ``SHOW_ARGUMENTS`` is off.

    Args:
        args, kwargs: ``argsrepr`` and ``kwargsrepr`` of the message.
    """
    if not (isinstance(args, str) and isinstance(kwargs, str)) or not conf.get("SHOW_ARGUMENTS"):
        return None
    text = "()" if args in NO_ARGUMENTS else args
    if kwargs not in NO_ARGUMENTS:
        text = kwargs if args in NO_ARGUMENTS else f"{args} {kwargs}"
    return text if len(text) <= LONGEST_ARGUMENTS else f"{text[: LONGEST_ARGUMENTS - 1]}…"


def encode_holder(name: str, holder: Holder, limit: int = 1) -> str:
    """Return the lock's name, its holder and its limit as JSON for the store."""
    # Built by hand, in a fifth of the time of json.dumps: this runs at every acquisition.
    task = "null" if holder.task is None else _quoted(holder.task)
    task_id = "null" if holder.task_id is None else _quoted(holder.task_id)
    arguments = "null" if holder.arguments is None else _quoted(holder.arguments)
    # Whole milliseconds: the text of a float takes as long as all of the rest.
    lease = "null" if holder.lease is None else round(holder.lease * 1000)
    more = "" if limit == 1 else f",{limit}"
    return (
        f"[{_quoted(name)},{_quoted(holder.host)},{holder.pid},{int(holder.since * 1000)},"
        f"{'true' if holder.renewed else 'false'},{task},{task_id},{arguments},{lease}{more}]"
    )


#: Errors for text that this app did not write; RecursionError for deeply nested brackets.
GARBLED: Final = (ValueError, TypeError, RecursionError)
#: The types of all fields that this app writes.
_WRITTEN: Final = frozenset(
    product(
        (str,), (str,), (int,), (int,), (bool,), *[(str, NoneType)] * 3, (int, NoneType), (int,)
    )
)


def decode_holder(text: str, lock: HeldLock) -> HeldLock:
    """Return ``lock`` with the name and holder in the text; unchanged if the text is garbled."""
    try:
        # In a rolling deployment, a newer version may write more fields.
        fields = [*json.loads(text), 1][:10]
    except GARBLED:
        return lock
    # One look-up of all types takes half the time of a check of each field.
    if tuple(map(type, fields)) not in _WRITTEN:
        return lock
    name, host, pid, since, renewed, task, task_id, shown, lease, limit = fields
    if not (0 <= since < LATEST and 0 <= (lease or 0) <= conf.LONGEST_LEASE * 1000):
        return lock
    if shown is not None and not conf.get("SHOW_ARGUMENTS"):
        shown = None
    seconds = lease / 1000 if lease else None
    holder = Holder(host, pid, since / 1000, renewed, task, task_id, shown, seconds)
    return lock._replace(name=name, holder=holder, limit=limit)


def read_lock(name: str, text: str, remaining: float | None = None) -> HeldLock:
    """Return the lock whose value is ``text``: its token, directly followed by its holder."""
    lock = HeldLock(name, text[:TOKEN_LENGTH], remaining)
    return decode_holder(text[TOKEN_LENGTH:], lock)


def describe_claimer(key: str, task: Any, request: Any, renewed: bool) -> str:
    """Return a row's key, this process and its task (None: no task) as JSON for the row."""
    return encode_holder(key, describe_holder(task, request, renewed))


HOST: Final = socket.gethostname()


def describe_holder(task: Any, request: Any, renewed: bool, lease: float | None = None) -> Holder:
    """
    Return a holder that describes this process and its task (None: no task).

    Args:
        lease: Length of the lease, s, of a lock, whose holder has the task's arguments too; None:
            it is none.
    """
    pid, since, shown = process.pid, time.time(), None
    if task is None:
        return Holder(HOST, pid, since, renewed, lease=lease)
    if lease is not None:
        # Only messages have these attributes.
        shown = describe_arguments(
            getattr(request, "argsrepr", None), getattr(request, "kwargsrepr", None)
        )
    return Holder(HOST, pid, since, renewed, task.name, request.id, shown, lease)
