"""The states of outbox messages, as querysets, and the transitions between them."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, models, transaction
from django.db.models import Q
from django.db.models.functions import Length
from django.utils.translation import gettext_lazy as _

from .. import conf, databases, queries
from ..databases import Now
from ..emitting import Event
from ..events import MESSAGE_DISCARDED, MESSAGE_RETRIED
from ..leases.lease_table import DIED
from ..texts import error_columns, storable
from ..transactions import Attempts, change_locked, lock_whole

if TYPE_CHECKING:
    from .outbox import OutboxMessage


class State(models.TextChoices):
    """
    The states of messages.

    ``due_at`` is the next look at a message, whatever its state: when it is to be sent, to be
    sent again because no worker has started its task, or when the lease of its run expires.
    """

    PENDING = "pending", _("Pending")
    SENT = "sent", _("Sent")
    RUNNING = "running", _("Running")
    DONE = "done", _("Done")
    FAILED = "failed", _("Failed")
    DEAD = "dead", _("Dead")


#: Shortest and longest time until a message that could not be sent is tried again; it
#: doubles with each attempt.
SHORTEST_DELAY: Final = timedelta(seconds=5)
LONGEST_DELAY: Final = timedelta(minutes=10)
#: The columns of a claimed row that a relay needs, in the order of the model's fields.
CLAIMED: Final = (
    "id", "task", "task_id", "body", "properties", "attempts", "sent_at", "attempt", "starts",
    "deaths", "resent",
)  # fmt: skip
#: Columns that no list shows and that may not fit into memory.
UNLISTED: Final = ("body", "properties", "result", "traceback")
#: Messages that are still looked at, and messages that wait for an operator.
LIVE: Final = Q(due_at__isnull=False)
GIVEN_UP: Final = Q(state__in=[State.FAILED, State.DEAD])
#: Messages whose row stays until their task has ended.
CARRIED: Final = ~Q(attempt="")
#: Bytes of a row; one character is one byte, because the texts are ASCII JSON.
SIZE: Final = Length("body") + Length("properties")


def _why_again(row: OutboxMessage, before: str) -> str:
    """Return why a relay re-sends a message that was in that state; "": it is the first time."""
    if before == State.RUNNING:
        return f"its process died (death {row.deaths})"
    return f"no worker began it, {row.resent} time(s) so far" if before == State.SENT else ""


class OutboxMessages(models.QuerySet["OutboxMessage"]):
    """The states of outbox rows, and the transitions between them."""

    def listed(self) -> OutboxMessages:
        """Messages as lists show them: see :class:`ListedRow`."""
        return self.annotate(asked_at=Now()).defer(*UNLISTED)

    def pending(self) -> OutboxMessages:
        """Messages that a relay still has to send or re-send, due or not."""
        return self.filter(LIVE, state=State.PENDING)

    def running(self) -> OutboxMessages:
        """Messages whose task a worker runs now, or ran when its process died."""
        return self.filter(LIVE, state=State.RUNNING)

    def due(self) -> OutboxMessages:
        """Messages that a relay may send now, longest waiting first."""
        return self.filter(due_at__lte=Now()).order_by("due_at", "pk")

    def dead(self) -> OutboxMessages:
        """Messages that could not be sent and are not tried again."""
        return self.filter(state=State.DEAD)

    def sent(self) -> OutboxMessages:
        """Messages that a broker has or had: kept for a while, or until their task starts."""
        return self.filter(state=State.SENT)

    def done(self) -> OutboxMessages:
        """Messages whose task succeeded; they stay for ``RETENTION["sent"]``."""
        return self.filter(state=State.DONE)

    def failed(self) -> OutboxMessages:
        """Messages whose task ended in an error."""
        return self.filter(state=State.FAILED)

    def carried(self, *task_ids: str) -> OutboxMessages:
        """The messages of tasks that are carried until done: one row or none for each."""
        return self.filter(CARRIED, task_id__in=task_ids)

    def given_up(self) -> OutboxMessages:
        """Messages that wait for an operator: they could not be sent, or their task failed."""
        return self.filter(GIVEN_UP)

    def retryable(self) -> OutboxMessages:
        """Messages that could not be sent at least once, dead or not, or whose task failed."""
        return self.filter(Q(state=State.PENDING, attempts__gt=0) | GIVEN_UP)

    def discardable(self) -> OutboxMessages:
        """Messages that an operator may delete so that their task does not run, or run again."""
        carried = Q(state=State.SENT, due_at__isnull=False)
        return self.filter(carried | Q(state=State.PENDING) | GIVEN_UP)

    def prunable(self) -> list[OutboxMessages]:
        """Return the messages whose retention has expired; each part is found by an index."""
        found = list[OutboxMessages]()
        if (age := conf.retention("sent")) is not None:
            found += [self.sent_before(age), self.done().ended_before(age)]
        if (age := conf.retention("failed")) is not None:
            found += [self.failed().ended_before(age)]
        return found

    def sent_before(self, age: timedelta) -> OutboxMessages:
        """Messages sent more than ``age`` ago that are not carried until done, oldest first."""
        sent = self.sent().filter(due_at__isnull=True, sent_at__lt=Now() - age)
        return sent.order_by("sent_at")

    def ended_before(self, age: timedelta) -> OutboxMessages:
        """Messages whose task ended, or that were given up, more than ``age`` ago, oldest first."""
        return self.filter(ended_at__lt=Now() - age).order_by("ended_at")

    def claim(
        self, limit: int, lease: timedelta, token: str, *, since: datetime | None = None
    ) -> list[OutboxMessage]:
        """
        Claim due rows, to send them within ``lease``; no other relay gets them until then.

        If the relay dies, nothing is lost: the rows are due again when the lease has expired.

        Args:
            limit: The maximum number of rows. Together they also have at most ``BATCH_BYTES``,
                unless it is a single row.
            token: The claim of the relay.
            since: Skip rows that were due before this moment. Otherwise PostgreSQL would read
                past all deleted rows that an older snapshot might still see.

        Returns:
            The claimed rows with the columns of ``CLAIMED``, and ``due_at`` as it was before.
        """
        connection = connections[self.db]
        due = self.due() if since is None else self.due().filter(due_at__gte=since)
        if not connection.features.has_select_for_update and not due.exists():
            return []  # without taking the lock that would block all other writers
        for attempt in Attempts(self.db, "The claim of messages"):
            with attempt, transaction.atomic(using=self.db):
                rows = self._lock_fitting(due, limit)
                ids, seconds = [row[0] for row in rows], lease.total_seconds()
                taken = ids and queries.fetch(self.db, "claim_due", ids, token=token, lease=seconds)
        claimed = {values[0]: self.model.from_db(self.db, CLAIMED, values) for values in taken}
        for pk, _size, due_at, state in rows:
            claimed[pk].due_at, claimed[pk].token = due_at, token
            claimed[pk].why_again = _why_again(claimed[pk], state)
        return [claimed[row[0]] for row in rows]

    def _lock_fitting(self, due: OutboxMessages, limit: int) -> Any:
        """Lock rows that together fit into memory; return keys, sizes, due times and states."""
        lock_whole(self.db, self.model)
        skip = connections[self.db].features.has_select_for_update_skip_locked
        # Read only sizes here: a hundred whole rows may not fit into memory.
        sized = due.annotate(size=SIZE).values_list("pk", "size", "due_at", "state")
        found = list(sized.select_for_update(skip_locked=skip)[:limit])
        most, totals = databases.BATCH_BYTES, accumulate(size for _, size, *_ in found)
        rows = [row for row, total in zip(found, totals, strict=True) if total <= most]
        return rows or found[:1]

    def claimed(self, *tokens: str) -> OutboxMessages:
        """Messages still held by the claims with these tokens."""
        return self.filter(token__in=tokens)

    def is_done_by(self, token: str) -> bool:
        """Return whether the claim with this token finished its work."""
        return self.claimed(token).exclude(result="").exists()

    def uncount(self, token: str, starts: int) -> None:
        """Take back that a claim counted as start number ``starts``: its task did not begin."""
        never: dict[str, Any] = {"started_at": None} if starts == 1 else {}
        self.claimed(token).update(starts=starts - 1, holder="", **never)

    def fail_task(self, token: str, error_type: str, error: str, traceback: str) -> bool:
        """Record that a task ended in an error; True if the claim still held the message."""
        sets = {"state": State.FAILED, "ended_at": Now(), "due_at": None, "token": ""}
        kept = error_columns(error_type, error, traceback)
        return bool(self.claimed(token).update(**sets, **kept))

    def put_back(self, token: str, delay: timedelta, error: str, *, died: bool = False) -> bool:
        """End the claim and re-send the message after ``delay``; True if it was still held."""
        sets: dict[str, Any] = {"due_at": Now() + delay if delay else Now()}
        if died:
            sets |= DIED
        ours = self.claimed(token)
        return bool(ours.update(state=State.PENDING, token="", error=storable(error), **sets))

    def was_put_back(self, error: str) -> bool:
        """Return whether a message was put back with this error, and no run has begun since."""
        return self.filter(token="", error=storable(error)).exists()

    def erase(self) -> int:
        """Delete the rows without Django's signals, whose receivers could fail."""
        return self._raw_delete(self.db) or 0

    def recall(self) -> int:
        """Make rows due now if their ``due_at`` is too far away: the clock was set back."""
        late = self.filter(due_at__gt=Now() + 2 * LONGEST_DELAY, attempt="")
        return late.update(due_at=Now())

    def revive(self) -> int:
        """Make failed and dead messages due now, with as many attempts as new messages."""
        self._for_write = True  # the rows may have been read from a replica
        sets = {
            "state": State.PENDING, "ended_at": None, "due_at": Now(),
            "attempts": 0, "deaths": 0, "resent": 0, "error_type": "", "traceback": "",
        }  # fmt: skip
        rows = change_locked(self.retryable(), ("task", "task_id"), **sets)
        self._emit(MESSAGE_RETRIED, rows)
        return len(rows)

    def discard(self) -> int:
        """Delete rows so that their tasks do not run (again), and free the locks of their sends."""
        from ..sending.deduplicate import free_locks  # needs the app registry

        self._for_write = True
        rows = change_locked(self.discardable(), ("task", "task_id", "state", "properties"))
        self._emit(MESSAGE_DISCARDED, [row[:2] for row in rows])
        waiting = [(row[0], row[3]) for row in rows if row[2] in (State.PENDING, State.SENT)]
        transaction.on_commit(partial(free_locks, waiting), using=self.db)
        return len(rows)

    def _emit(self, event: Event, rows: list[tuple[str, str]]) -> None:
        """Emit an event at the commit for each message that an operator retried or discarded."""
        for task, task_id in rows:
            event.emit_on_commit(self.model, using=self.db, task=task, task_id=task_id)
