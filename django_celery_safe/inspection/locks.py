"""Locks: which are shown, what is known of each, and their release."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from .. import conf
from ..leases.holder import TICK, HeldLock, is_overdue, seconds_since_renewal
from ..leases.lease import RENEW_AFTER
from ..locks import find_lock, iter_locks, release_lock
from .decision import Decision
from .row import LeasedRow, ago, duration

#: The word between a task's name and an id in a marker's name; see delivery/copies.
MARKERS: Final = ("copy", "claim_copy", "ended")


class LockRow(LeasedRow):
    """A lock that somebody holds, in the cache or database of ``cache``."""

    keys = (
        "name", "kind", "task", "arguments", "task_id", "host", "pid", "since", "age_s",
        "remaining_s", "lease_s", "renewed", "renewed_s", "overdue", "fence",
    )  # fmt: skip
    details = (
        "kind", "task", "arguments", "task_id", "process", "held_since", "lease_left", "holder",
        "free", "fence",
    )  # fmt: skip
    headings = {"age": "held for"}

    def __init__(self, lock: HeldLock, cache: str | conf.Unset = conf.UNSET) -> None:
        super().__init__(lock, lock.name, lock, runs=True)
        holder, left, ago_s = lock.holder, lock.remaining, seconds_since_renewal(lock)
        self.cache, self.kind = cache, kind_of(lock)
        if self.kind != "run":
            self.process = "a message under way"
        self.arguments, self.lease_s, self.renewed = holder.arguments, holder.lease, holder.renewed
        self.since = datetime.fromtimestamp(holder.since, UTC) if holder.since else None
        self.age_s = round(max(0.0, time.time() - holder.since), 3) if holder.since else None
        self.age = duration(self.age_s)
        self.remaining_s = None if left is None else round(left, 3)
        self.time_left = duration(left)
        self.renewed_s = None if ago_s is None else round(ago_s, 3)
        self.overdue = is_overdue(lock)
        self.renewal = "overdue" if self.overdue else "yes" if self.renewed else "no"
        #: The holder's task, and its arguments.
        self.work = " ".join(filter(None, [self.task, self.arguments]))

    @property
    def held_since(self) -> str | None:
        """When it was acquired, for people."""
        if self.since is None:
            return None
        return f"{self.text('since')} by its clock, {ago(self.age_s)}"

    @property
    def lease_left(self) -> str:
        text, lease, left = f"{self.time_left} left", self.lease_s, self.remaining_s
        # One that was extended is of another length than at first.
        if lease is not None and (left is None or left <= lease + TICK):
            text += f" of {duration(lease)}"
        if not self.renewed:
            return f"{text}, not renewed"
        return " ".join(filter(None, [f"{text}, renewed", ago(self.renewed_s)]))

    @property
    def holder(self) -> str:
        """Whether the holder lives, as far as its lease tells."""
        if not self.host:
            return "not known" if self.kind == "run" else "no process yet: a message holds it"
        if not self.renewed:
            return "not known: it does not renew this lease, so nothing tells whether it lives"
        if self.renewed_s is None or self.lease_s is None:
            return "lives if the lease begins anew from time to time: look again"
        if self.overdue:
            late = duration(self.renewed_s - self.lease_s * RENEW_AFTER)
            return f"dead, stopped or cut off, most likely: its renewal is {late} late"
        return f"lives, or died in the last {duration(self.renewed_s)}"

    @property
    def free(self) -> str:
        """When it will be free by itself."""
        if self.remaining_s is None:
            return "when its lease ends; this store can't tell when that is"
        if self.renewed:
            return f"in {duration(self.remaining_s)} if the holder is dead, or when it is done"
        return f"in {duration(self.remaining_s)} at the latest"

    def parts(self) -> list[str | None]:
        left = self.time_left + {"overdue": "!", "yes": "+", "no": ""}[self.renewal]
        times = f"{self.age:>7} {left:>9}  {self.kind:<7}  {self.process}"
        return [times, self.work, self.task_id]

    def describe(self) -> str:
        parts = [
            f"held by {self.process}",
            f"for {self.age}" if self.since else None,
            f"task {self.work}" if self.task else None,
            f"task id {self.task_id}" if self.task_id else None,
            self.lease_left,
        ]
        return "; ".join(filter(None, parts))


def kind_of(lock: HeldLock) -> str:
    """Return ``run``: a process holds it; ``message``: a message does; or ``marker``: of a copy."""
    holder = lock.holder
    if holder.host or not holder.task_id:
        return "run"
    is_marker = lock.name.startswith(tuple(f"{holder.task}:{each}:" for each in MARKERS))
    return "marker" if is_marker else "message"


def iter_rows(
    prefix: str | None = None,
    task: str | None = None,
    cache: str | conf.Unset = conf.UNSET,
    *,
    markers: bool = False,
) -> Iterator[LockRow]:
    """Yield the locks that :func:`iter_locks` yields, one at a time; ``markers``: those too."""
    for lock in iter_locks(prefix, task, cache=cache):
        if markers or kind_of(lock) != "marker":
            yield LockRow(lock, cache)


def find_row(name: str, cache: str | conf.Unset = conf.UNSET) -> LockRow | None:
    """Return the lock of this name; None: nobody holds it."""
    lock = find_lock(name, cache)
    return None if lock is None else LockRow(lock, cache)


def _why_not_release(row: Any) -> str:
    if not row.renewed:
        return ""
    if row.renewed_s is None:
        lives = f"{row.process} renews it while it lives"
    elif row.overdue:
        lives = f"{row.process} renewed it {ago(row.renewed_s)} and not since, so it may be dead"
    else:
        lives = f"{row.process} renewed it {ago(row.renewed_s)}, so it lives or died since"
    free = "with its lease" if row.remaining_s is None else f"in {duration(row.remaining_s)}"
    return (
        f"{lives}; if it is dead the lock is free {free}. Freed now, a second run may start beside "
        f"it. Stop that process first"
    )


RELEASE: Final = Decision(
    name="release",
    label="Release",
    consequence="The holders are not stopped: each finds out at its next renewal. "
    "Until then a second may run beside it.",
    done="was released",
    act=lambda row, force: release_lock(row.source, row.cache),
    changed="it ended meanwhile, or someone else holds it now",
    why_not=_why_not_release,
    force="Also where the lease is being renewed, so that the holder most likely lives.",
)
