"""Locks: the rows that operators see, and the release of a lock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from ..exceptions import ConfigurationError
from ..leases.holder import PLACE, TICK, HeldLock, split_place
from ..leases.lease import RENEW_AFTER
from ..locks import find_lock, iter_locks, release_lock
from .decision import Decision
from .row import LeasedRow, ago, duration

#: The holder of a message's lock: the store does not record which of these cases applies.
NO_PROCESS: Final = gettext_noop("no process: a message waits or runs, or its period lasts")


class LockRow(LeasedRow):
    """A lock that is held."""

    keys = (
        "name", "kind", "task", "arguments", "task_id", "host", "pid", "since", "age_s",
        "remaining_s", "lease_s", "renewed", "renewed_s", "overdue", "fence", "place", "limit",
    )  # fmt: skip
    details = (
        "kind", "task", "arguments", "task_id", "process", "held_since", "lease_left", "holder",
        "free", "fence", "place_of",
    )  # fmt: skip
    headings = {"age": "held for", "place_of": "place"}

    def __init__(self, lock: HeldLock) -> None:
        super().__init__(lock, lock.name, lock, runs=True)
        holder, left, ago_s = lock.holder, lock.remaining, lock.renewed_ago
        self.kind = kind_of(lock)
        #: The lock with several places and the number of this place; otherwise itself and 1.
        self.lock, self.place = split_place(lock.name) if lock.limit > 1 else (lock.name, 1)
        if self.kind != "run":
            self.process = _("a message")
        self.arguments, self.lease_s, self.renewed = holder.arguments, holder.lease, holder.renewed
        self.since = datetime.fromtimestamp(holder.since, UTC) if holder.since else None
        self.age_s = round(max(0.0, time.time() - holder.since), 3) if holder.since else None
        self.remaining_s = None if left is None else round(left, 3)
        self.renewed_s = None if ago_s is None else round(ago_s, 3)
        self.overdue = lock.overdue
        self.renewal = "overdue" if self.overdue else "yes" if self.renewed else "no"
        #: The holder's task, and its arguments.
        self.work = " ".join(filter(None, [self.task, self.arguments]))

    @property
    def age(self) -> str:
        """The time since the acquisition, for people."""
        return duration(self.age_s)

    @property
    def held_since(self) -> str | None:
        """When it was acquired, for people."""
        if self.since is None:
            return None
        return _("{moment} by its clock, {ago}").format(
            moment=self.text("since"), ago=ago(self.age_s)
        )

    @property
    def place_of(self) -> str:
        """The number of this place, and the number of all places."""
        return _("{number} of {total}").format(number=self.place, total=self.limit)

    @property
    def lease_left(self) -> str:
        text, lease, left = _("{time} left"), self.lease_s, self.remaining_s
        # A lease that was extended may be longer than the original lease.
        if lease is not None and (left is None or left <= lease + TICK):
            text = _("{time} left of {lease}")
        text = text.format(time=self.time_left, lease=duration(lease))
        if not self.renewed:
            return _("{lease}, not renewed").format(lease=text)
        if self.renewed_s is None:
            return _("{lease}, renewed").format(lease=text)
        return _("{lease}, renewed {ago}").format(lease=text, ago=ago(self.renewed_s))

    @property
    def holder(self) -> str:
        """A text that says whether the holder is alive, as far as its lease shows."""
        if not self.host:
            return _("not known") if self.kind == "run" else _(NO_PROCESS)
        if not self.renewed:
            return _("not known, because it does not renew this lease")
        if self.renewed_s is None or self.lease_s is None:
            return _("lives if the lease begins again from time to time: look again")
        if self.overdue:
            late = duration(self.renewed_s - self.lease_s * RENEW_AFTER)
            text = _("dead, stopped or cut off, most likely: its renewal is {time} late")
            return text.format(time=late)
        return _("lives, or died in the last {time}").format(time=duration(self.renewed_s))

    @property
    def free(self) -> str:
        """A text that says when the lock becomes free by itself."""
        if self.remaining_s is None:
            return _("when its lease ends; this store can't tell when that is")
        text = _("in {time} at the latest")
        if self.renewed:
            text = _("in {time} if the holder is dead, or when it is done")
        return text.format(time=duration(self.remaining_s))

    @property
    def time_left(self) -> str:
        """The rest of its lease, for people."""
        return duration(self.remaining_s)

    def parts(self) -> list[str | None]:
        left = self.time_left + {"overdue": "!", "yes": "+", "no": ""}[self.renewal]
        place = f", place {self.place_of}" if self.limit > 1 else ""
        times = f"{self.age:>7} {left:>9}  {self.kind:<7}  {self.process}{place}"
        return [times, self.work, self.task_id]

    def describe(self) -> str:
        parts = [
            _("held by {process}").format(process=self.process),
            _("place {place}").format(place=self.place_of) if self.limit > 1 else None,
            _("for {time}").format(time=self.age) if self.since else None,
            _("task {task}").format(task=self.work) if self.task else None,
            _("task id {id}").format(id=self.task_id) if self.task_id else None,
            self.lease_left,
        ]
        return "; ".join(filter(None, parts))


def kind_of(lock: HeldLock) -> str:
    """Return ``run`` if a process holds the lock, ``message`` for a message, or ``marker``."""
    holder = lock.holder
    if holder.host or not holder.task_id:
        return "run"
    is_marker = lock.name.startswith(f"{holder.task}:ended:")  # see delivery/copies
    return "marker" if is_marker else "message"


def iter_rows(
    prefix: str | None = None,
    task: str | None = None,
    *,
    markers: bool = False,
) -> Iterator[LockRow]:
    """Yield the locks of :func:`iter_locks`, one at a time; ``markers``: include markers."""
    for lock in iter_locks(prefix, task):
        if markers or kind_of(lock) != "marker":
            yield LockRow(lock)


def find_row(name: str) -> LockRow | None:
    """Return the lock of this name; None: it is free."""
    lock = find_lock(name)
    return None if lock is None else LockRow(lock)


def find_other_places(name: str) -> list[str]:
    """Return the names of a lock's held places, for a lock whose own name is free."""
    try:
        places = iter_locks(f"{name}{PLACE}")
        return sorted(lock.name for lock in places if LockRow(lock).lock == name)
    except ConfigurationError:  # the store lists nothing and has no places
        return []


def _why_not_release(row: Any) -> str:
    if not row.renewed:
        return ""
    if row.renewed_s is None:
        lives = _("{process} renews it while it lives")
    elif row.overdue:
        lives = _("{process} renewed it {ago} and not since, so it may be dead")
    else:
        lives = _("{process} renewed it {ago}, so it lives or died since")
    free = _("if it is dead the lock is free with its lease")
    if row.remaining_s is not None:
        free = _("if it is dead the lock is free in {time}")
    return _(
        "{lives}; {free}. Freed now, a second run may start beside it. Stop that process first"
    ).format(
        lives=lives.format(process=row.process, ago=ago(row.renewed_s)),
        free=free.format(time=duration(row.remaining_s)),
    )


RELEASE: Final = Decision(
    name="release",
    act=lambda row, force: release_lock(row.source),
    consequence=gettext_lazy(
        "The holders are not stopped: each finds out at its next renewal. "
        "Until then a second may run beside it."
    ),
    done=gettext_lazy("was released"),
    changed=gettext_lazy("it ended meanwhile, or someone else holds it now"),
    why_not=_why_not_release,
    force=gettext_lazy(
        "Also where the lease is being renewed, so that the holder most likely lives."
    ),
)
