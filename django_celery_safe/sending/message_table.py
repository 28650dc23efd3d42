"""The outbox as a table of leases, for senders, relays, and the runs of carried tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from .. import conf, queries
from ..databases import Now
from ..leases.holder import HeldLock, decode_holder
from ..leases.lease_table import LeaseTable
from ..texts import storable

#: The states of a message whose task has ended.
ENDED: Final = ("done", "failed")


class Claimed(NamedTuple):
    """
    The columns of a claimed row that its run needs.

    Attributes:
        deaths: How many processes died in the task.
        last_death: The process that died last, as JSON like ``holder``.
        result: The result that the task was finished with, as JSON; "": it was not finished.
        starts: How many times the task was started, this run included.
    """

    deaths: int
    last_death: str
    result: str
    starts: int


class Next(NamedTuple):
    """
    What becomes of a message that a sender or a relay has claimed.

    Attributes:
        after: Seconds from now until a relay looks at it again; None: never, its row ends.
        how: The statement that records it: the broker has the message; or does not have it yet,
            ``await_eta``; or a relay has to try again, ``give_back``.
        error: Why it could not be sent; None: the row keeps its error.
    """

    after: float | None
    how: str = "keep_sent"
    error: str | None = None


#: The message was not reached: any relay may send it.
NOT_REACHED: Final = Next(0.0, "give_back")


class MessageTable(LeaseTable):
    """The outbox of one database."""

    purpose = "hold an outbox"
    models = ("OutboxMessage",)
    rows, named, ends = "messages", "attempt", "due_at"

    def find(self, name: str) -> Any:
        """Return a message, with the server's time as ``asked_at``; None: it was deleted."""
        return self.at(name).defer("body", "properties").annotate(asked_at=Now()).first()

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            row = self.find(name)
        if row is None:
            return None
        return decode_holder(row.holder, HeldLock(name, row.token, row.due_in_s or 0.0))

    def claim(self, name: str, token: str, seconds: float, holder: str) -> Claimed | None:
        """
        Claim a message for a run, if no other run has it and its task has not ended.

        Returns:
            The claimed columns; None: the message must not run.
        """
        values = {"attempt": name, "token": token, "lease": seconds, "holder": holder}
        rows = queries.fetch(self.alias, "claim_message", **values)
        return Claimed(*rows[0]) if rows else None

    def end(self, name: str, token: str, returned: str = "") -> bool:
        """
        Record that a task succeeded, or delete its message if none is kept.

        Args:
            returned: The return value of the task, as JSON; "": the row keeps its result.

        Returns:
            Whether the claim still held the message.
        """
        ends = "end_message" if conf.keeps_sent() else "erase_message"
        values = {"attempt": name, "token": token, "result": returned or None}
        return bool(queries.execute(self.alias, ends, **values))

    def has_ended(self, name: str) -> bool:
        """Return whether the task of a message has ended, or its message is gone."""
        return not self.at(name).exclude(state__in=ENDED).exists()

    def record_sent(self, token: str, outcomes: Mapping[int, Next]) -> None:
        """
        Record what became of messages that a sender or a relay has claimed, by their keys.

        Args:
            token: The token of the claim. Rows that another has claimed since are not changed.
        """
        alike: dict[Next, list[int]] = {}
        for pk, then in outcomes.items():
            alike.setdefault(then, []).append(pk)
        # What was sent first: if the process dies in between, the others only wait longer.
        for then in sorted(alike, key=lambda one: one.how == "give_back"):
            name, error = then.how, then.error and storable(then.error)
            if then.after is None:
                name, error = "keep_sent" if conf.keeps_sent() else "erase_sent", ""
            values = {"token": token, "wait": then.after, "error": error}
            queries.execute(self.alias, name, alike[then], **values)


#: Returns the one table of a database: the renewing thread tells stores apart by identity.
message_table = lru_cache(MessageTable)
