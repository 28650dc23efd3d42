"""Outbox messages: the rows that operators see, and the decisions about them."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..databases import Now
from ..leases.holder import HeldLock, decode_holder
from ..models.message_states import OutboxMessages
from ..models.outbox import OutboxMessage
from ..sending.serialization import find_arguments
from ..texts import printable
from .decision import Decision
from .overview import find_relay
from .row import Row, duration, seconds_between
from .words import translate_state

#: Columns that no list shows and that may not fit into memory.
UNSEEN: Final = ("body", "properties", "chord_calls", "traceback")


#: The states of messages, each a method of their queryset.
STATES: Final = ("pending", "sent", "running", "done", "failed", "dead")


class MessageRow(Row):
    """An outbox message; only ``arguments`` shows the values of arguments."""

    keys = (
        "id", "database", "state", "task", "task_id", "age_s", "due_in_s", "attempts", "starts",
        "deaths", "error_type", "error",
    )  # fmt: skip
    details = (
        "task", "task_id", "state", "error_type", "error", "attempts", "starts",
        "deaths", "resent", "finished", "due_at", "created_at", "sent_at", "started_at",
        "ended_at", "dead_at", "process", "arguments",
    )  # fmt: skip

    headings = {**Row.headings, "trace": "traceback"}

    def __init__(self, message: Any) -> None:
        super().__init__(message, f"{message.pk}  {message.task}")
        self.age_s = seconds_between(message.created_at, message.asked_at)
        self.age = duration(self.age_s)
        #: Seconds until a relay may send the message; negative: a relay already may.
        self.due_in_s: float | None = None
        self.due: str | None = None
        if message.due_at is not None:
            left = self.due_in_s = round((message.due_at - message.asked_at).total_seconds(), 3)
            self.due = _("in {time}").format(time=duration(left)) if left > 0 else _("now")

    @property
    def arguments(self) -> str | None:
        """The arguments as Celery shows them; None without ``SHOW_ARGUMENTS``."""
        return find_arguments(self.source)

    @property
    def finished(self) -> str:
        """A text if the task called ``current_claim().finish()`` but has not succeeded; or ""."""
        if not self.source.result or self.source.state == "done":
            return ""
        return _("yes: another run returns its result")

    @property
    def process(self) -> str:
        """The process that runs the task, or ran it last; "": the row names no process."""
        if not self.source.holder:
            return ""
        return str(decode_holder(self.source.holder, HeldLock("")).holder._replace(task_id=None))

    @property
    def trace(self) -> str:
        """The end of the task's traceback, with its lines escaped one by one."""
        return "\n".join(map(printable, self.source.traceback.splitlines()))

    def parts(self) -> list[str | None]:
        # The due time of a carried task has a different meaning in each state.
        whens = {"sent": _("sent again {when}"), "running": _("lease ends {when}")}
        when = whens.get(self.state, _("due {when}"))
        facts = [
            _("{count} failed attempt(s)").format(count=self.attempts) if self.attempts else "",
            _("{count} death(s)").format(count=self.deaths) if self.deaths else "",
            when.format(when=self.due) if (self.due_in_s or 0.0) > 0 else "",
        ]
        state = translate_state(self.state)
        return [
            _("{state}, {age} old, {id}").format(state=state, age=self.age, id=self.task_id),
            ", ".join(filter(None, facts)),
            self.process if self.state == "running" else "",
            ": ".join(filter(None, [self.error_type, self.error])),
        ]


def messages_in(alias: str) -> OutboxMessages:
    """Return the messages of a database, annotated for :class:`MessageRow`, oldest first."""
    rows = OutboxMessage.objects.using(alias).annotate(asked_at=Now())
    return rows.defer(*UNSEEN).order_by("pk")


def status_of(alias: str) -> dict[str, Any]:
    """Return one outbox's status for ``--json``; docs/reference/commands.md lists the keys."""
    rows = OutboxMessage.objects.using(alias)
    # Ages are by the database's clock, which also wrote the moments.
    oldest = messages_in(alias).pending().order_by("created_at").first()
    relay = find_relay(alias)
    return {
        **{state: getattr(rows, state)().count() for state in STATES},
        "oldest_s": oldest and MessageRow(oldest).age_s,
        "relay": relay and relay.name,
        "relay_seen_s": relay and relay.ago_s,
    }


def _at(row: Any) -> OutboxMessages:
    return OutboxMessage.objects.using(row._state.db).filter(pk=row.pk)


RETRY: Final = Decision(
    name="retry",
    act=lambda row, force: _at(row).revive(),
    consequence=gettext_lazy(
        "These messages are due at once, and are tried as often as new ones. A relay "
        "sends them; without one they stay here."
    ),
    done=gettext_lazy("was made due"),
    changed=gettext_lazy("it did not fail, or was sent meanwhile: there is nothing to retry"),
    fits=lambda row: (
        row.state == "failed" or (row.state in ("pending", "dead") and row.attempts > 0)
    ),
)
DISCARD: Final = Decision(
    name="discard",
    act=lambda row, force: _at(row).discard(),
    consequence=gettext_lazy(
        "These messages are deleted, and their tasks never run. This can't be undone."
    ),
    done=gettext_lazy("was discarded"),
    changed=gettext_lazy("it was sent meanwhile, or runs now"),
    fits=lambda row: (
        row.state in ("pending", "failed", "dead")
        or (row.state == "sent" and row.due_at is not None)
    ),
    deletes=True,
)
