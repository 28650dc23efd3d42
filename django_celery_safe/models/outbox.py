"""
The outbox: committed messages, kept until a broker has them or until their task is done.

Their states are querysets, with the transitions between them. Beside them is the heartbeat of
their relays.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from django.db import connections, models, transaction
from django.db.models import Q
from django.db.models.functions import Length
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import conf, databases, queries
from ..databases import Now
from ..emitting import Event
from ..events import MESSAGE_DISCARDED, MESSAGE_RETRIED
from ..leases.holder import HeldLock, decode_holder, describe_arguments
from ..leases.lease_table import DIED
from ..resuming.checkpoints import Cursor
from ..sending.outbox import find_headers
from ..texts import LONGEST_TYPE, duration, error_columns, storable
from ..transactions import Attempts, change_locked, lock_whole
from .columns import ExactCharField, ExactTextField, partial_index
from .listing import ListedRow


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
#: Columns that no list shows and that may not fit into memory.
UNLISTED: Final = ("body", "properties", "result", "traceback")
#: Messages that are still looked at, and messages that wait for an operator.
LIVE: Final = Q(due_at__isnull=False)
GIVEN_UP: Final = Q(state__in=[State.FAILED, State.DEAD])
#: Messages whose row stays until their task has ended.
CARRIED: Final = ~Q(attempt="")
#: Bytes of a row; one character is one byte, because the texts are ASCII JSON.
SIZE: Final = Length("body") + Length("properties")


class ClaimedRow(NamedTuple):
    """
    A row that a relay has claimed; making an ``OutboxMessage`` of it would take longer.

    Attributes:
        due_at, state: As they were before.
    """

    pk: int
    task: str
    task_id: str
    body: Any
    properties: str
    attempts: int
    sent_at: Any
    attempt: str
    starts: int
    deaths: int
    resent: int
    due_at: datetime
    state: str

    @property
    def why_again(self) -> str:
        """Why the relay sends the message again; "": it is the first time."""
        if self.state == State.RUNNING:
            return f"its process died (death {self.deaths})"
        again = f"no worker began it, {self.resent} time(s) so far"
        return again if self.state == State.SENT else ""


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
    ) -> list[ClaimedRow]:
        """
        Claim due rows, to send them within ``lease``; no other relay gets them until then.

        If the relay dies, nothing is lost: the rows are due again when the lease has expired.

        Args:
            limit: The maximum number of rows. Together they also have at most ``BATCH_BYTES``,
                unless it is a single row.
            token: The claim of the relay.
            since: Skip rows that were due before this moment. Otherwise PostgreSQL would read
                past all deleted rows that an older snapshot might still see.
        """
        connection = connections[self.db]
        due = self.due() if since is None else self.due().filter(due_at__gte=since)
        if not connection.features.has_select_for_update and not due.exists():
            return []  # without taking the lock that would block all other writers
        for attempt in Attempts(self.db, "The claim of messages"):
            with attempt, transaction.atomic(using=self.db):
                before, taken = self._lock_fitting(due, limit), list[Any]()
                if before:
                    values = {"token": token, "lease": lease.total_seconds()}
                    taken = queries.fetch(self.db, "claim_due", [*before], **values)
        claimed = {row[0]: row for row in taken}
        return [ClaimedRow._make((*claimed[pk], *was)) for pk, was in before.items()]

    def _lock_fitting(self, due: OutboxMessages, limit: int) -> dict[int, tuple[datetime, str]]:
        """Lock rows that together fit into memory; return their due times and states, by keys."""
        lock_whole(self.db, self.model)
        skip = connections[self.db].features.has_select_for_update_skip_locked
        # Read only sizes here: a hundred whole rows may not fit into memory.
        sized = due.annotate(size=SIZE).values_list("pk", "size", "due_at", "state")
        found, left = dict[int, Any](), databases.BATCH_BYTES
        for pk, size, *was in sized.select_for_update(skip_locked=skip)[:limit]:
            left -= size
            if found and left < 0:
                break
            found[pk] = was
        return found

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


class OutboxMessage(ListedRow):
    """
    A message that was sent with ``outbox=True``, until a broker has it.

    A message that was sent with ``outbox="until_done"`` stays until its task has ended. The row
    is written in the transaction that sends the message;
    :mod:`django_celery_safe.sending.outbox` describes the columns. All moments are by
    the database server's clock.
    """

    State = State

    json_keys = (
        "id", "database", "state", "task", "task_id", "age_s", "due_in_s", "process", "attempts",
        "starts", "deaths", "resent", "progress", "checkpoint_at", "error_type", "error",
    )  # fmt: skip

    task = ExactCharField(_("task"), max_length=255)
    task_id = ExactCharField(_("task id"), max_length=255)
    #: The serialized arguments.
    body = models.BinaryField()
    #: Everything else of the message, as JSON.
    properties = ExactTextField()
    created_at = models.DateTimeField(_("created at"))
    state = ExactCharField(_("state"), max_length=8, choices=State.choices, default=State.PENDING)
    #: The next look of a relay at it; see ``State``. None: none.
    due_at = models.DateTimeField(_("due at"), null=True)
    #: How many times sending failed although the broker was available.
    attempts = models.PositiveSmallIntegerField(_("attempts"), default=0)
    #: The last error.
    error = ExactTextField(_("error"), default="")
    #: When it was sent last, even if it is pending again; or when it will be, because of its eta.
    sent_at = models.DateTimeField(_("sent at"), null=True)
    #: The id of this attempt of its task, from the header; "": not carried until done.
    attempt = ExactCharField(max_length=32, default="")
    #: The claim of whoever sends it or runs its task; "": nobody does.
    token = ExactCharField(max_length=32, default="")
    #: The process that runs the task, or ran it last, as JSON; see ``encode_holder``.
    holder = ExactTextField(default="")
    #: How many times the task was started, its process died, and the message was re-sent
    #: because no worker had started the task.
    starts = models.PositiveIntegerField(_("starts"), default=0)
    deaths = models.PositiveIntegerField(_("deaths"), default=0)
    resent = models.PositiveIntegerField(_("resent"), default=0)
    #: The last process that died in the task, as JSON like ``holder``.
    last_death = ExactTextField(default="")
    started_at = models.DateTimeField(_("started at"), null=True)
    #: When its task ended, or sending it was given up.
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: The argument of ``current_claim().finish()``, as JSON; "": the task did not call it. A task
    #: with a result is not run again. For a successful Django task: its return value.
    result = ExactTextField(default="")
    #: The type of the error that the task failed with, and the end of the traceback; "": none.
    error_type = ExactCharField(_("error type"), max_length=LONGEST_TYPE, default="")
    traceback = ExactTextField(_("traceback"), default="")
    #: How far its task got with ``resumable()`` or ``checkpoint()``, as JSON; "": not at all.
    cursor = ExactTextField(default="")
    #: When that was recorded last.
    checkpoint_at = models.DateTimeField(_("last checkpoint"), null=True)

    objects = OutboxMessages.as_manager()

    class Meta:
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxmessage", "Can retry outbox message"),
            ("discard_outboxmessage", "Can discard outbox message"),
        )
        indexes = (
            partial_index("safe_outbox_due", LIVE, "due_at id"),
            partial_index("safe_outbox_sent", Q(state=State.SENT), "sent_at", "state sent_at"),
            models.Index(fields=["attempt"], name="safe_outbox_attempt"),
            partial_index("safe_outbox_task_id", CARRIED, "task_id"),
            # Done, failed and dead messages are listed, counted and deleted apart.
            partial_index("safe_outbox_done", Q(state=State.DONE), "ended_at", "state ended_at"),
            partial_index("safe_outbox_failed", Q(state=State.FAILED), "ended_at"),
            partial_index("safe_outbox_dead", Q(state=State.DEAD), "ended_at", "ended_at state"),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def age_s(self) -> float:
        """Seconds since it was sent by the project."""
        return self.seconds_since(self.created_at) or 0.0

    @property
    def due_in_s(self) -> float | None:
        """Seconds until a relay may send it; 0: a relay already may; None: it is not due."""
        since = self.seconds_since(self.due_at)
        return None if since is None else max(0.0, -since)

    @property
    def process(self) -> str:
        """The process that runs the task, or ran it last; "": none."""
        return decode_holder(self.holder, HeldLock("")).holder.process

    @property
    def arguments(self) -> str | None:
        """The arguments as Celery shows them; None without ``SHOW_ARGUMENTS``."""
        headers = find_headers(self.properties)
        return describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))

    @property
    def progress(self) -> str:
        """How far its task got, such as ``1,500/20,000``; "": it does not say."""
        cursor = Cursor.read(self.cursor)
        return "" if cursor is None else cursor.progress

    @property
    def finished(self) -> bool:
        """Whether the task called ``current_claim().finish()`` and has not ended well since."""
        return bool(self.result) and self.state != State.DONE

    @property
    def reason(self) -> str:
        """Why it is in its state and what comes next, for a list; "": nothing to report."""
        facts = [self.progress]
        if self.state == State.RUNNING:
            facts.append(self.process)
        elif self.due_in_s:
            is_sent = self.state == State.SENT
            due = gettext("sent again in {time}") if is_sent else gettext("due in {time}")
            facts.append(due.format(time=duration(self.due_in_s)))
        if self.attempts:
            facts.append(gettext("{count} failed attempt(s)").format(count=self.attempts))
        if self.deaths:
            facts.append(gettext("{count} death(s)").format(count=self.deaths))
        error = ": ".join(filter(None, [self.error_type, self.error]))
        return ", ".join(filter(None, [*facts, error]))

    def fail(self, error: str, *, attempts: int) -> bool:
        """
        Record that the message could not be sent; it is due again later, or dead.

        Args:
            error: The text of the error.
            attempts: The number of attempts after which the message is dead.

        Returns:
            True if the message is dead now.
        """
        row = type(self).objects.using(self._state.db).claimed(self.token).filter(pk=self.pk)
        delay = min(SHORTEST_DELAY * 2**self.attempts, LONGEST_DELAY)
        self.attempts += 1
        is_dead = self.attempts >= attempts
        values: dict[str, Any] = {"due_at": Now() + delay}
        if is_dead:
            values = {"state": State.DEAD, "due_at": None, "ended_at": Now()}
        row.update(attempts=self.attempts, error=storable(error), token="", **values)
        return is_dead


class OutboxRelay(ListedRow):
    """The relays' heartbeat: one row that every relay updates."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    objects: ClassVar[models.Manager[OutboxRelay]] = models.Manager()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"

    @property
    def ago_s(self) -> float:
        """Seconds since it was seen."""
        return max(0.0, self.seconds_since(self.seen_at) or 0.0)
