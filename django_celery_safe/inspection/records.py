"""Records of work that is done once: what is known of each, and how one is forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.db.models import Q
from django.db.models.functions import Now

from ..idempotency.record_table import read_claim, record_table
from ..leases.holder import HASHED, plain_name
from ..models.idempotency import IdempotencyRecords
from .decision import Decision
from .row import LeasedRow, ago, duration, seconds_between


class RecordRow(LeasedRow):
    """A record; the result of the work is in ``result`` alone, its arguments are nowhere."""

    keys = (
        "key", "state", "task", "task_id", "host", "pid", "claims", "claimed_at", "ended_at",
        "age_s", "remaining_s", "expires_in_s", "error",
    )  # fmt: skip
    details = (
        "shown_state", "process", "claimed_at", "lease_left", "task", "task_id", "claims",
        "ended_at", "expires_at", "error", "result",
    )  # fmt: skip
    headings = {"shown_state": "state"}

    def __init__(self, record: Any) -> None:
        lease = read_claim(record)
        super().__init__(record, lease.name, lease, runs=record.state == record.State.RUNNING)
        #: The whole key, also where it is hashed in the table.
        self.key = lease.name
        gone = ", its process is gone" if self.remaining_s == 0 else ""
        self.shown_state = f"{record.state}{gone}"
        self.age_s = seconds_between(record.claimed_at, record.asked_at)
        self.claimed = ago(self.age_s)
        #: Seconds until the work would be done again; 0: the record has expired.
        self.expires_in_s = seconds_between(record.asked_at, record.expires_at)
        self.claimer = f"{self.task_id}, {self.process}" if self.task_id else self.process

    def parts(self) -> list[str | None]:
        parts = [self.shown_state, f"claimed {self.claimed}"]
        if self.remaining_s:
            parts.append(f"lease of {self.lease_left}")
        if self.claims > 1:
            parts.append(f"{self.claims} times")
        if (left := self.expires_in_s) is not None:
            parts.append(f"expires in {duration(left)}" if left else "expired")
        return [", ".join(parts), self.claimer, self.error]

    def describe(self) -> str:
        key = [] if self.key == self.source.pk else [self.key]
        return "; ".join([*key, *self.lines()])


def records_in(
    alias: str, state: str | None = None, prefix: str | None = None
) -> Iterator[RecordRow]:
    """Yield the records of a database, the newest first; None: of all states, or keys."""
    records = record_table(alias).all().annotate(asked_at=Now()).order_by("-claimed_at")
    if state:
        records = records.filter(state=state)
    if prefix is not None:
        # Hashed keys are with the holder; and SQLite takes small letters for large ones.
        hashed = Q(key__startswith=HASHED)
        plain = plain_name(prefix) == prefix
        records = records.filter(hashed | Q(key__startswith=prefix) if plain else hashed)
    rows = map(RecordRow, records.iterator())
    return (row for row in rows if prefix is None or row.key.startswith(prefix))


def records_of(alias: str, keys: Iterable[str]) -> list[RecordRow]:
    """Return the records of these keys, each whole or as it stands in the table."""
    plain = [plain_name(key) for key in keys]
    records = record_table(alias).all().filter(key__in=plain)
    return list(map(RecordRow, records.annotate(asked_at=Now())))


def _forget(row: Any, force: bool) -> int:
    # Only the very claim that was shown.
    records: IdempotencyRecords = record_table(str(row._state.db)).all()
    records = records.filter(pk=row.pk, token=row.token)
    return (records if force else records.idle()).forget()


FORGET: Final = Decision(
    name="forget",
    label="Forget",
    consequence="The work of these records will be done again when it is asked for the next time.",
    done="was forgotten",
    act=_forget,
    changed="it is gone, or was claimed just now",
    why_not=lambda row: (
        f"it is being worked on ({row.claimer}): forgotten now, what it stands for would be done "
        f"twice. Wait until that ends"
        if row.remaining_s
        else ""
    ),
    force="Also what is being done now: then it may be done twice.",
    deletes=True,
)
