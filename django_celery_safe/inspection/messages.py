"""Messages of the outbox: what is known of each, and what is decided about it."""

from __future__ import annotations

from typing import Any, Final

from django.db.models.functions import Now

from ..leases.holder import HeldLock, decode_holder
from ..models.outbox import OutboxMessage, OutboxMessages, OutboxRelay
from ..sending.serialization import find_arguments
from ..texts import printable
from .decision import Decision
from .row import Row, duration, seconds_between

#: Columns that no list shows, and that may be larger than the memory.
UNSEEN: Final = ("body", "properties", "chord_calls", "traceback")


#: The states of messages, each a method of their queryset.
STATES: Final = ("pending", "sent", "running", "done", "failed", "dead")


class MessageRow(Row):
    """A message of the outbox; no argument's value is in it but in ``arguments``."""

    keys = (
        "id", "database", "state", "task", "task_id", "age_s", "due_in_s", "attempts", "starts",
        "deaths", "error_type", "error",
    )  # fmt: skip
    details = (
        "task", "task_id", "state", "error_type", "error", "attempts", "starts",
        "deaths", "resent", "due_at", "created_at", "sent_at", "started_at", "ended_at", "dead_at",
        "process", "arguments",
    )  # fmt: skip

    headings = {**Row.headings, "trace": "traceback"}

    def __init__(self, message: Any) -> None:
        super().__init__(message, f"{message.pk}  {message.task}")
        self.age_s = seconds_between(message.created_at, message.asked_at)
        self.age = duration(self.age_s)
        #: Seconds until a relay may send it; negative: it may already.
        self.due_in_s: float | None = None
        self.due: str | None = None
        if message.due_at is not None:
            left = self.due_in_s = round((message.due_at - message.asked_at).total_seconds(), 3)
            self.due = f"in {duration(left)}" if left > 0 else "now"

    @property
    def arguments(self) -> str | None:
        """The arguments as Celery shows them; nothing without ``SHOW_ARGUMENTS``."""
        return find_arguments(self.source)

    @property
    def process(self) -> str:
        """The process that runs its task, or ran it last; "": the row names none."""
        if not self.source.holder:
            return ""
        return str(decode_holder(self.source.holder, HeldLock("")).holder._replace(task_id=None))

    @property
    def trace(self) -> str:
        """The end of the traceback of its task, a line for each of its lines."""
        return "\n".join(map(printable, self.source.traceback.splitlines()))

    def parts(self) -> list[str | None]:
        # What the due time of a carried task means depends on its state.
        when = {"sent": "sent again", "running": "lease ends"}.get(self.state, "due")
        due = f"{when} {self.due}" if (self.due_in_s or 0.0) > 0 else ""
        failed = f"{self.attempts} failed attempt(s)" if self.attempts else ""
        died = f"{self.deaths} death(s)" if self.deaths else ""
        process = self.process if self.state == "running" else ""
        return [
            f"{self.state}, {self.age} old, {self.task_id}",
            ", ".join(filter(None, [failed, died, due])),
            process,
            ": ".join(filter(None, [self.error_type, self.error])),
        ]


def messages_in(alias: str) -> OutboxMessages:
    """Return the messages of a database as :class:`MessageRow` takes them, the oldest first."""
    rows = OutboxMessage.objects.using(alias).annotate(asked_at=Now())
    return rows.defer(*UNSEEN).order_by("pk")


def status_of(alias: str) -> dict[str, Any]:
    """Return what ``--json`` shows of one outbox; see docs/reference/commands.md for the keys."""
    rows = OutboxMessage.objects.using(alias)
    # Ages by the database's clock, which wrote the moments too.
    oldest = messages_in(alias).pending().order_by("created_at").first()
    relay: Any = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    return {
        **{state: getattr(rows, state)().count() for state in STATES},
        "oldest_s": oldest and MessageRow(oldest).age_s,
        "relay": relay and str(relay),
        "relay_seen_s": relay and seconds_between(relay.seen_at, relay.asked_at),
    }


def _at(row: Any) -> OutboxMessages:
    return OutboxMessage.objects.using(row._state.db).filter(pk=row.pk)


RETRY: Final = Decision(
    name="retry",
    label="Retry",
    consequence="These messages are due at once, and are tried as often as new ones. A relay "
    "sends them; without one they stay here.",
    done="was made due",
    act=lambda row, force: _at(row).revive(),
    changed="it did not fail, or was sent meanwhile: there is nothing to retry",
    fits=lambda row: (
        row.state == "failed" or (row.state in ("pending", "dead") and row.attempts > 0)
    ),
)
DISCARD: Final = Decision(
    name="discard",
    label="Discard",
    consequence="These messages are deleted, and their tasks never run. This can't be undone.",
    done="was discarded",
    act=lambda row, force: _at(row).discard(),
    changed="it was sent meanwhile, or runs now",
    fits=lambda row: (
        row.state in ("pending", "failed", "dead")
        or (row.state == "sent" and row.due_at is not None)
    ),
    deletes=True,
)
