"""The outbox: messages that were committed, until a broker has them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from django.db import connections, models, transaction
from django.db.models import Q
from django.db.models.functions import Length, Now

from ..batches import in_batches
from ..emitting import Event
from ..events import MESSAGE_DISCARDED, MESSAGE_RETRIED
from ..statements import change_returning
from .text import storable

#: Shortest and longest time until a message that could not be sent is tried again; it
#: doubles with each attempt.
SHORTEST_DELAY: Final = timedelta(seconds=5)
LONGEST_DELAY: Final = timedelta(minutes=10)
#: Longest time for which a database that has one lock for all is kept locked, s.
LONGEST_LOCK: Final = 1.0


#: Columns of a claimed row, in their order: what a relay needs of it.
CLAIMED: Final = ("id", "task", "task_id", "body", "properties", "chord", "chord_calls", "attempts")
#: Bytes of a row: its texts are JSON, of ASCII.
SIZE: Final = Length("body") + Length("properties") + Length("chord_calls")


class OutboxMessages(models.QuerySet["OutboxMessage"]):
    """The states of outbox rows, and the steps from one to the next."""

    def pending(self) -> OutboxMessages:
        """Messages that are still to be sent, due or not."""
        return self.filter(due_at__isnull=False)

    def due(self) -> OutboxMessages:
        """Messages that a relay may send now, longest waiting first."""
        return self.filter(due_at__lte=Now()).order_by("due_at", "pk")

    def dead(self) -> OutboxMessages:
        """Messages that could not be sent and are not tried again."""
        return self.filter(dead_at__isnull=False)

    def sent(self) -> OutboxMessages:
        """Messages that were sent, and stay for ``OUTBOX_RETENTION``."""
        return self.filter(sent_at__isnull=False)

    def failed(self) -> OutboxMessages:
        """Messages with at least one failed attempt, dead or not."""
        return self.unsent().filter(attempts__gt=0)

    def unsent(self) -> OutboxMessages:
        """Messages that are pending or dead."""
        return self.filter(sent_at__isnull=True)

    def older(self, age: timedelta) -> OutboxMessages:
        """Messages that were sent more than ``age`` ago."""
        return self.sent().filter(sent_at__lt=Now() - age)

    def claim(
        self, limit: int, lease: timedelta, *, since: datetime | None = None
    ) -> list[OutboxMessage]:
        """
        Take rows that are due, to send them within ``lease``; nobody else gets them meanwhile.

        Whoever dies with them loses nothing: they are due again when the lease is over.

        Args:
            limit: How many rows at most. Together they have ``BATCH_BYTES`` at most, too, or
                it is a single row.
            since: Passes by what was due before this moment. PostgreSQL reads past every row
                that was deleted there, for as long as an older snapshot might see it.

        Returns:
            The rows that were taken, with what a relay needs of them, and ``due_at`` as it was.
        """
        features = connections[self.db].features
        due = self.due() if since is None else self.due().filter(due_at__gte=since)
        if not features.has_select_for_update and not due.exists():
            return []  # without the lock that keeps all others from writing
        with transaction.atomic(using=self.db):
            if not features.has_select_for_update:
                # The database has one lock for all, which a write takes.
                self.filter(pk=0).update(attempts=0)
            skip = features.has_select_for_update_skip_locked
            # Not the rows themselves: a hundred of them may be larger than the memory.
            found = due.annotate(size=SIZE).values_list("pk", "due_at", "size")
            found = found.select_for_update(skip_locked=skip)[:limit]
            rows = next(in_batches(found, limit, lambda row: row[2]), [])
            moments = {pk: due_at for pk, due_at, _ in rows}
            taken = change_returning(
                self.filter(pk__in=list(moments)), {"due_at": Now() + lease}, *CLAIMED
            )
        claimed = {values[0]: self.model.from_db(self.db, CLAIMED, values) for values in taken}
        for pk, row in claimed.items():
            row.due_at = moments[pk]
        return [claimed[pk] for pk in moments]

    def release(self, delay: timedelta = timedelta()) -> int:
        """Give claimed rows back, to be due after ``delay``: nothing was wrong with them."""
        # SQLite's clock counts ms, and what is added to it µs: not "now + 0".
        return self.pending().update(due_at=Now() + delay if delay else Now())

    def put_off(self, delay: timedelta, error: str) -> int:
        """Give claimed rows back, to be due after ``delay``: something that they need is gone."""
        return self.pending().update(due_at=Now() + delay, error=storable(error))

    def register_chord(
        self, chord: str, register: Callable[[OutboxMessage | None, float], None], seconds: float
    ) -> None:
        """
        Make a chord known to the result backend, unless it is.

        Not while anybody else does that, nor after one of its messages was sent:
        the backend would begin to count anew.

        Args:
            register: Gets the row that says what to make known, and how long that may take.
            seconds: How long it may take at most, and less where the database has
                one lock for all.
        """
        has_row_locks = connections[self.db].features.has_select_for_update
        if not has_row_locks:
            seconds = min(seconds, LONGEST_LOCK)
        with transaction.atomic(using=self.db):
            unregistered = self.filter(chord=chord)
            if not has_row_locks:
                locked: object = unregistered.update(chord=chord)
            else:
                # In one order for all: an UPDATE takes them as it finds them, and two that
                # do that at once may end in a deadlock.
                locked = list(unregistered.order_by("pk").select_for_update().values_list("pk"))
            if locked:
                register(unregistered.exclude(chord_calls="").first(), seconds)
                unregistered.update(chord="")

    def settle(self, *, keep: bool) -> int:
        """Note that they were sent: delete them, or ``keep`` them for the retention."""
        if keep:
            return self.pending().update(due_at=None, sent_at=Now(), error="")
        return self.pending().erase()

    def erase(self) -> int:
        """Delete them, without the signals that others' receivers could make fail."""
        return self._raw_delete(self.db) or 0

    def recall(self) -> int:
        """Let those be due that are due later than any can be: the clock was set back."""
        return self.filter(due_at__gt=Now() + 2 * LONGEST_DELAY).update(due_at=Now())

    def revive(self) -> int:
        """Let what failed, the dead too, be tried again, now and as often as new ones."""
        self._for_write = True  # what it was read from may be a replica
        sets = {"dead_at": None, "due_at": Now(), "attempts": 0}
        rows = change_returning(self.failed(), sets, "task", "task_id")
        self._emit(MESSAGE_RETRIED, rows)
        return len(rows)

    def discard(self) -> int:
        """Delete rows that were not sent, and never will be."""
        self._for_write = True
        rows = change_returning(self.unsent(), None, "task", "task_id")
        self._emit(MESSAGE_DISCARDED, rows)
        return len(rows)

    def prune(self, age: timedelta) -> int:
        """Delete the rows that were sent more than ``age`` ago."""
        return self.older(age).erase()

    def _emit(self, event: Event, rows: list[tuple[str, str]]) -> None:
        """Emit, at the commit, what was decided about messages."""
        for task, task_id in rows:
            event.emit_on_commit(OutboxMessage, using=self.db, task=task, task_id=task_id)


class OutboxMessage(models.Model):
    """
    A message that was sent with ``outbox=True``, until a broker has it.

    Written in the transaction that sends it; :mod:`django_celery_safe.sending.serialization`
    says what the columns hold. Every moment is the database server's.
    """

    task = models.CharField(max_length=255)
    task_id = models.CharField(max_length=255)
    #: The serialized arguments.
    body = models.BinaryField()
    #: What else a message has, as JSON.
    properties = models.TextField()
    created_at = models.DateTimeField()
    #: Which chord the result backend has to know of before this is sent; "": of none.
    chord = models.CharField(max_length=32, default="")
    #: What it has to know, as JSON, in one row for all of that chord.
    chord_calls = models.TextField(default="")
    #: When a relay may send it; None: dead, or sent.
    due_at = models.DateTimeField(null=True)
    #: How often it could not be sent although the broker was there.
    attempts = models.PositiveSmallIntegerField(default=0)
    #: What was wrong the last time.
    error = models.TextField(default="")
    dead_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)

    objects = OutboxMessages.as_manager()

    class Meta:
        verbose_name = "outbox message"
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxmessage", "Can retry outbox message"),
            ("discard_outboxmessage", "Can discard outbox message"),
        )
        indexes = (
            models.Index("due_at", "id", name="safe_outbox_due", condition=Q(due_at__isnull=False)),
            models.Index("dead_at", name="safe_outbox_dead", condition=Q(dead_at__isnull=False)),
            models.Index("chord", name="safe_outbox_chord", condition=~Q(chord="")),
            models.Index("sent_at", name="safe_outbox_sent", condition=Q(sent_at__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def state(self) -> str:
        """The message's state: ``pending``, ``dead`` or ``sent``."""
        return "sent" if self.sent_at else "dead" if self.dead_at else "pending"

    def fail(self, error: str, *, attempts: int) -> bool:
        """
        Note that it could not be sent: it is due again later, or dead.

        Args:
            error: What was wrong.
            attempts: How many there are before it is dead.

        Returns:
            Whether it is dead now.
        """
        row = type(self).objects.using(self._state.db).pending().filter(pk=self.pk)
        self.attempts += 1
        self.error = error = storable(error)
        if self.attempts >= attempts:
            row.update(attempts=self.attempts, error=error, due_at=None, dead_at=Now())
            return True
        delay = min(SHORTEST_DELAY * 2 ** (self.attempts - 1), LONGEST_DELAY)
        row.update(attempts=self.attempts, error=error, due_at=Now() + delay)
        return False


class OutboxRelay(models.Model):
    """The one row in which relays note that they are there."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"
