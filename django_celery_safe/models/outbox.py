"""The outbox: messages that were committed, until a broker has them, or until they are done."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections, models, transaction
from django.db.models import Case, F, IntegerField, Q, When
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
#: How often the time until a message is sent again doubles, if no worker begins its task.
MOST_DOUBLINGS: Final = 7
#: Characters of an error's type, and of the end of its traceback, that a row keeps.
LONGEST_TYPE: Final = 255
LONGEST_TRACEBACK: Final = 4000


#: Columns of a claimed row, in their order: what a relay needs of it.
CLAIMED: Final = (
    "id", "task", "task_id", "body", "properties", "chord", "chord_calls", "attempts", "attempt",
    "deaths", "resent", "starts",
)  # fmt: skip
#: Bytes of a row: its texts are JSON, of ASCII.
SIZE: Final = Length("body") + Length("properties") + Length("chord_calls")


def count_death() -> dict[str, Any]:
    """Return what changes in a row that is taken while a run has it: its process has died."""
    return {
        "deaths": Case(
            When(~Q(token=""), then=F("deaths") + 1),
            default=F("deaths"),
            output_field=IntegerField(),
        ),
        "last_death": Case(When(~Q(token=""), then=F("holder")), default=F("last_death")),
    }


def _why_again(row: OutboxMessage, token: str, sent_at: datetime | None) -> str:
    """Return why a relay sends a carried message once more; "": for the first time."""
    if token:
        return f"its process died, {row.deaths} of them so far"
    return "" if sent_at is None else f"no worker began it, {row.resent} time(s) so far"


class OutboxMessages(models.QuerySet["OutboxMessage"]):
    """The states of outbox rows, and the steps from one to the next."""

    def pending(self) -> OutboxMessages:
        """Messages that are still to be sent, or to be sent again, due or not."""
        return self.filter(due_at__isnull=False, sent_at__isnull=True, token="")

    def running(self) -> OutboxMessages:
        """Messages whose task a worker runs now, or ran when its process died."""
        return self.filter(due_at__isnull=False).exclude(token="")

    def due(self) -> OutboxMessages:
        """Messages that a relay may send now, longest waiting first."""
        return self.filter(due_at__lte=Now()).order_by("due_at", "pk")

    def dead(self) -> OutboxMessages:
        """Messages that could not be sent and are not tried again."""
        return self.filter(dead_at__isnull=False)

    def sent(self) -> OutboxMessages:
        """Messages that a broker has, or had: kept for a while, or until their task begins."""
        return self.filter(sent_at__isnull=False, ended_at__isnull=True, token="")

    def done(self) -> OutboxMessages:
        """Messages whose task ended well, and that stay for ``OUTBOX_RETENTION``."""
        return self.filter(ended_at__isnull=False, error_type="")

    def failed(self) -> OutboxMessages:
        """Messages whose task ended in an error."""
        return self.filter(ended_at__isnull=False).exclude(error_type="")

    def given_up(self) -> OutboxMessages:
        """Messages that wait for an operator: they could not be sent, or their task failed."""
        failed = Q(ended_at__isnull=False) & ~Q(error_type="")
        return self.filter(failed | Q(dead_at__isnull=False))

    def retryable(self) -> OutboxMessages:
        """Messages that could not be sent at least once, dead or not, or whose task failed."""
        unsent = Q(sent_at__isnull=True, ended_at__isnull=True, attempts__gt=0, token="")
        return self.filter(unsent | (Q(ended_at__isnull=False) & ~Q(error_type="")))

    def discardable(self) -> OutboxMessages:
        """Messages whose task is not to run, or not again, once they are deleted."""
        waiting = Q(due_at__isnull=False, token="")
        failed = Q(ended_at__isnull=False) & ~Q(error_type="")
        return self.filter(waiting | failed | Q(dead_at__isnull=False))

    def older(self, age: timedelta) -> OutboxMessages:
        """Messages that were sent, or whose task ended well, more than ``age`` ago."""
        sent = Q(sent_at__lt=Now() - age, due_at__isnull=True, ended_at__isnull=True)
        return self.filter(sent | Q(ended_at__lt=Now() - age, error_type=""))

    def failed_before(self, age: timedelta) -> OutboxMessages:
        """Messages whose task failed more than ``age`` ago."""
        return self.failed().filter(ended_at__lt=Now() - age)

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
            found = due.annotate(size=SIZE).values_list("pk", "size", "due_at", "token", "sent_at")
            found = found.select_for_update(skip_locked=skip)[:limit]
            rows = next(in_batches(found, limit, lambda row: row[1]), [])
            taken = change_returning(
                self.filter(pk__in=[row[0] for row in rows]),
                {"due_at": Now() + lease, **self._brought_back()},
                *CLAIMED,
            )
        claimed = {values[0]: self.model.from_db(self.db, CLAIMED, values) for values in taken}
        for pk, _, due_at, token, sent_at in rows:
            claimed[pk].due_at = due_at
            claimed[pk].why_again = _why_again(claimed[pk], token, sent_at)
        return [claimed[row[0]] for row in rows]

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

    def carry(self, delay: timedelta, wait: timedelta) -> int:
        """
        Record that messages were sent whose rows stay until their tasks are done.

        Each is sent again if no worker has begun its task by then.

        Args:
            delay: How long from now their tasks are to begin.
            wait: ``OUTBOX_RESEND_AFTER``, which doubles each time.
        """
        again: list[When] = [
            When(resent=number, then=Now() + delay + wait * 2**number)
            for number in range(MOST_DOUBLINGS)
        ]
        due_at = Case(*again, default=Now() + delay + wait * 2**MOST_DOUBLINGS)
        return self.pending().update(due_at=due_at, sent_at=Now(), attempts=0)

    def extend(self, token: str, lease: timedelta) -> int:
        """Renew the lease of a claim; return how many rows it still held."""
        return self.filter(token=token).update(due_at=Now() + lease)

    def end(self, token: str) -> bool:
        """Record that a task ended well; True if the claim still held the message."""
        ours = self.filter(token=token)
        return bool(ours.update(ended_at=Now(), due_at=None, token="", error="", error_type=""))

    def end_or_erase(self, token: str, *, keep: bool) -> bool:
        """Record that a task ended well, in the row or without it; True if it was the claim's."""
        return self.end(token) if keep else bool(self.filter(token=token).erase())

    def fail_task(self, token: str, error_type: str, error: str, traceback: str) -> bool:
        """Record that a task ended in an error; True if the claim still held the message."""
        return bool(
            self.filter(token=token).update(
                ended_at=Now(),
                due_at=None,
                token="",
                error_type=error_type[:LONGEST_TYPE],
                error=storable(error),
                traceback=storable(traceback[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK),
            )
        )

    def put_back(self, token: str, delay: timedelta, error: str, *, died: bool = False) -> bool:
        """Let a task wait for its message, which is to be sent again after ``delay``."""
        sets: dict[str, Any] = {"due_at": Now() + delay if delay else Now()}
        if died:
            sets |= {"deaths": F("deaths") + 1, "last_death": F("holder")}
        ours = self.filter(token=token)
        return bool(ours.update(token="", sent_at=None, error=storable(error), **sets))

    def erase(self) -> int:
        """Delete them, without the signals that others' receivers could make fail."""
        return self._raw_delete(self.db) or 0

    def recall(self) -> int:
        """Let those be due that are due later than any can be: the clock was set back."""
        late = self.filter(due_at__gt=Now() + 2 * LONGEST_DELAY, attempt="")
        return late.update(due_at=Now())

    def revive(self) -> int:
        """Let what failed, the dead too, be tried again, now and as often as new ones."""
        self._for_write = True  # what it was read from may be a replica
        sets = {
            "dead_at": None, "ended_at": None, "sent_at": None, "due_at": Now(),
            "attempts": 0, "deaths": 0, "resent": 0, "error_type": "", "traceback": "",
        }  # fmt: skip
        rows = change_returning(self.retryable(), sets, "task", "task_id")
        self._emit(MESSAGE_RETRIED, rows)
        return len(rows)

    def discard(self) -> int:
        """Delete rows whose task is not to run, or not again."""
        self._for_write = True
        rows = change_returning(self.discardable(), None, "task", "task_id")
        self._emit(MESSAGE_DISCARDED, rows)
        return len(rows)

    def prune(self, age: timedelta) -> int:
        """Delete the rows that were sent, or whose task ended well, more than ``age`` ago."""
        return self.older(age).erase()

    @staticmethod
    def _brought_back() -> dict[str, Any]:
        """
        Return what a relay changes in a row that it is to send.

        A task whose lease has expired has died once more; a message that was sent, and whose
        task no worker began, is sent once more.
        """
        resent = Case(
            When(token="", sent_at__isnull=False, then=F("resent") + 1),
            default=F("resent"),
            output_field=IntegerField(),
        )
        return {**count_death(), "resent": resent, "token": "", "sent_at": None}

    def _emit(self, event: Event, rows: list[tuple[str, str]]) -> None:
        """Emit, at the commit, what was decided about messages."""
        for task, task_id in rows:
            event.emit_on_commit(OutboxMessage, using=self.db, task=task, task_id=task_id)


class OutboxMessage(models.Model):
    """
    A message that was sent with ``outbox=True``, until a broker has it.

    One that was sent with ``outbox="until_done"`` stays until its task has ended. Written in the
    transaction that sends it; :mod:`django_celery_safe.sending.serialization` says what the
    columns hold. Every moment is the database server's.
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
    #: When a relay is to send it, if nothing happens until then: at once, when no worker has
    #: begun its task for long, or when the lease of its run expires. None: never.
    due_at = models.DateTimeField(null=True)
    #: How often it could not be sent although the broker was there.
    attempts = models.PositiveSmallIntegerField(default=0)
    #: What was wrong the last time.
    error = models.TextField(default="")
    dead_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    #: Which attempt of its task it is, as its header says; "": the row ends with the sending.
    attempt = models.CharField(max_length=32, default="")
    #: The claim of the run; "": no worker runs the task.
    token = models.CharField(max_length=32, default="")
    #: The process that runs it, or ran it last, as JSON; see ``encode_holder``.
    holder = models.TextField(default="")
    #: How often the task was begun, how often its process died, and how often the message was
    #: sent again since no worker had begun the task.
    starts = models.PositiveIntegerField(default=0)
    deaths = models.PositiveIntegerField(default=0)
    resent = models.PositiveIntegerField(default=0)
    #: The last process that died in it, as JSON like ``holder``.
    last_death = models.TextField(default="")
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    #: The type of the error that the task failed with, and the end of the traceback; "": none.
    error_type = models.CharField(max_length=LONGEST_TYPE, default="")
    traceback = models.TextField(default="")

    objects = OutboxMessages.as_manager()

    #: The reason why a relay that has claimed the row sends it again; "": it is the first time.
    why_again: str = ""

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
            models.Index("attempt", name="safe_outbox_attempt"),
            models.Index("ended_at", name="safe_outbox_ended", condition=Q(ended_at__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def state(self) -> str:
        """``pending``, ``sent``, ``running``, ``done``, ``failed`` or ``dead``."""
        if self.ended_at:
            return "failed" if self.error_type else "done"
        if self.dead_at:
            return "dead"
        return "running" if self.token else "sent" if self.sent_at else "pending"

    @property
    def ends_at(self) -> datetime | None:
        """The end of the lease of its run."""
        return self.due_at

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
