"""Records of work that is done once: the rows that operators see, and how to delete one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..databases import Now
from ..idempotency.record_table import read_claim, record_table
from ..leases.holder import HASHED, plain_name
from ..models.idempotency import IdempotencyRecords
from .decision import Decision
from .row import LeasedRow, ago, duration, seconds_between
from .words import translate_state


class RecordRow(LeasedRow):
    """A record; only ``result`` has the result of the work, and its arguments are not stored."""

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
        #: The whole key, even if the table has only its hash.
        self.key = lease.name
        state = _("{state}, its process is gone") if self.remaining_s == 0 else "{state}"
        self.shown_state = state.format(state=translate_state(record.state))
        self.age_s = seconds_between(record.claimed_at, record.asked_at)
        self.claimed = ago(self.age_s)
        #: Seconds until the work would be done again; 0: the record has expired.
        self.expires_in_s = seconds_between(record.asked_at, record.expires_at)
        self.claimer = f"{self.task_id}, {self.process}" if self.task_id else self.process

    def parts(self) -> list[str | None]:
        parts = [self.shown_state, _("claimed {ago}").format(ago=self.claimed)]
        if self.remaining_s:
            parts.append(_("lease of {time}").format(time=self.lease_left))
        if self.claims > 1:
            parts.append(_("{count} times").format(count=self.claims))
        if (left := self.expires_in_s) is not None:
            expires = _("expires in {time}") if left else _("expired")
            parts.append(expires.format(time=duration(left)))
        return [", ".join(parts), self.claimer, self.error]

    def describe(self) -> str:
        key = [] if self.key == self.source.pk else [self.key]
        return "; ".join([*key, *self.lines()])


def records_in(
    alias: str, state: str | None, prefix: str | None, most: int | None
) -> Iterator[RecordRow]:
    """
    Yield the records of a database, newest first.

    Args:
        state: Only these; None: all.
        prefix: Only keys that begin with this; None: all.
        most: How many are wanted at most; None: all. With ``prefix`` there may be more.
    """
    records = record_table(alias).all().annotate(asked_at=Now()).order_by("-claimed_at")
    if state:
        records = records.filter(state=state)
    if prefix is None:
        records = records[:most]
    else:
        # A hashed key is whole only in ``holder``; and SQLite's LIKE ignores case.
        hashed = Q(key__startswith=HASHED)
        plain = plain_name(prefix) == prefix
        records = records.filter(hashed | Q(key__startswith=prefix) if plain else hashed)
    rows = map(RecordRow, records.iterator())
    return (row for row in rows if prefix is None or row.key.startswith(prefix))


def records_of(alias: str, keys: Iterable[str]) -> list[RecordRow]:
    """Return the records of these keys, given in full or hashed as in the table."""
    plain = [plain_name(key) for key in keys]
    records = record_table(alias).all().filter(key__in=plain)
    return list(map(RecordRow, records.annotate(asked_at=Now())))


def _forget(row: Any, force: bool) -> int:
    # Delete only the claim that was shown.
    records: IdempotencyRecords = record_table(str(row._state.db)).all()
    records = records.filter(pk=row.pk, token=row.token)
    return (records if force else records.idle()).forget()


FORGET: Final = Decision(
    name="forget",
    act=_forget,
    consequence=gettext_lazy(
        "The work of these records will be done again when it is asked for the next time."
    ),
    done=gettext_lazy("was forgotten"),
    changed=gettext_lazy("it is gone, or was claimed just now"),
    why_not=lambda row: (
        _(
            "it is being worked on ({claimer}): forgotten now, what it stands for would be done "
            "twice. Wait until that ends"
        ).format(claimer=row.claimer)
        if row.remaining_s
        else ""
    ),
    force=gettext_lazy("Also what is being done now: then it may be done twice."),
    deletes=True,
)
