"""
The app's tables.

Nothing here is imported by the package's ``__init__``: a model there would keep
``django.setup()`` from working.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from django.db import connections, models, transaction
from django.db.models import Q
from django.db.models.functions import Now

#: Shortest and longest time until a message that could not be sent is tried again; it
#: doubles with each attempt.
SHORTEST_DELAY: Final = timedelta(seconds=5)
LONGEST_DELAY: Final = timedelta(minutes=10)
#: Longest time for which a database that has one lock for all is kept locked, s.
LONGEST_LOCK: Final = 1.0
#: Characters of an error that a row keeps.
LONGEST_ERROR: Final = 1000


class DatabaseLock(models.Model):
    """
    A lock that lives in the database of ``LOCK_DATABASE``.

    Written by :mod:`django_celery_safe.locks.stores.database` alone. A row whose
    ``ends_at_us`` has passed is free.
    """

    key = models.CharField(primary_key=True, max_length=255)
    token = models.CharField(max_length=32, unique=True)
    fence = models.BigIntegerField()
    #: Name and holder as JSON; see ``encode_holder``.
    holder = models.TextField()
    #: End of the lease by the database server's clock, µs since the epoch.
    ends_at_us = models.BigIntegerField(db_index=True)

    class Meta:
        verbose_name = "lock"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.key


class Fence(models.Model):
    """The one row that counts acquisitions in this database."""

    last = models.BigIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.last)


class OutboxMessages(models.QuerySet["OutboxMessage"]):
    """The states of outbox rows, and the steps from one to the next."""

    def pending(self) -> OutboxMessages:
        """Those that are still to be sent, due or not."""
        return self.filter(due_at__isnull=False)

    def due(self) -> OutboxMessages:
        """Those that a relay may send now, those first that have waited longest."""
        return self.filter(due_at__lte=Now()).order_by("due_at", "pk")

    def dead(self) -> OutboxMessages:
        """Those that could not be sent and are not tried again."""
        return self.filter(dead_at__isnull=False)

    def sent(self) -> OutboxMessages:
        """Those that were sent, kept for ``OUTBOX_RETENTION``."""
        return self.filter(sent_at__isnull=False)

    def failed(self) -> OutboxMessages:
        """Those that could not be sent so far, dead or not."""
        return self.unsent().filter(attempts__gt=0)

    def unsent(self) -> OutboxMessages:
        """Those that are pending or dead."""
        return self.filter(sent_at__isnull=True)

    def older(self, age: timedelta) -> OutboxMessages:
        """Those that were sent more than ``age`` ago."""
        return self.sent().filter(sent_at__lt=Now() - age)

    def claim(self, limit: int, lease: timedelta) -> list[OutboxMessage]:
        """
        Take up to ``limit`` rows, to send them within ``lease``; nobody else gets them meanwhile.

        Whoever dies with them loses nothing: they are due again when the lease is over.
        """
        features = connections[self.db].features
        if not features.has_select_for_update and not self.due().exists():
            return []  # without the lock that keeps all others from writing
        with transaction.atomic(using=self.db):
            if not features.has_select_for_update:
                # The database has one lock for all, which a write takes.
                self.filter(pk=0).update(attempts=0)
            skip = features.has_select_for_update_skip_locked
            rows = list(self.due().select_for_update(skip_locked=skip)[:limit])
            self.filter(pk__in=[row.pk for row in rows]).update(due_at=Now() + lease)
        return rows

    def release(self, delay: timedelta = timedelta()) -> int:
        """Give claimed rows back, to be due after ``delay``: nothing was wrong with them."""
        # SQLite's clock counts ms, and what is added to it µs: not "now + 0".
        return self.pending().update(due_at=Now() + delay if delay else Now())

    def put_off(self, delay: timedelta, error: str) -> int:
        """Give claimed rows back, to be due after ``delay``: something that they need is gone."""
        return self.pending().update(due_at=Now() + delay, error=storable(error))

    def tell_chord(
        self, chord: str, tell: Callable[[OutboxMessage | None, float], None], seconds: float
    ) -> None:
        """
        Let the result backend be told of a chord, unless it was.

        Not while anybody else does that, nor after one of its messages was sent:
        the backend would begin to count anew.

        Args:
            tell: Gets the row that says what to tell, and how long that may take.
            seconds: How long it may take at most, and less where the database has
                one lock for all.
        """
        has_row_locks = connections[self.db].features.has_select_for_update
        if not has_row_locks:
            seconds = min(seconds, LONGEST_LOCK)
        with transaction.atomic(using=self.db):
            untold = self.filter(chord=chord)
            if not has_row_locks:
                locked: object = untold.update(chord=chord)
            else:
                # In one order for all: an UPDATE takes them as it finds them, and two that
                # do that at once may end in a deadlock.
                locked = list(untold.order_by("pk").select_for_update().values_list("pk"))
            if locked:
                tell(untold.exclude(chord_calls="").first(), seconds)
                untold.update(chord="")

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
        return self.failed().update(dead_at=None, due_at=Now(), attempts=0)

    def discard(self) -> int:
        """Delete rows that were not sent, and never will be."""
        return self.unsent().erase()

    def prune(self, age: timedelta) -> int:
        """Delete the rows that were sent more than ``age`` ago."""
        return self.older(age).erase()


class OutboxMessage(models.Model):
    """
    A message that was sent with ``outbox=True``, until a broker has it.

    Written in the transaction that sends it; :mod:`django_celery_safe.sending.rows`
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
        indexes = (
            models.Index("due_at", "id", name="safe_outbox_due", condition=Q(due_at__isnull=False)),
            models.Index("dead_at", name="safe_outbox_dead", condition=Q(dead_at__isnull=False)),
            models.Index("chord", name="safe_outbox_chord", condition=~Q(chord="")),
            models.Index("sent_at", name="safe_outbox_sent", condition=Q(sent_at__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

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


def storable(text: str) -> str:
    """Return a text that every database can keep, cut to a sensible length."""
    cut = text[:LONGEST_ERROR].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return cut.encode("utf-8", "replace").decode("utf-8")


class OutboxRelay(models.Model):
    """The one row in which relays note that they are there."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


class IdempotencyRecords(models.QuerySet["IdempotencyRecord"]):
    """The states of records, and the steps from one to the next."""

    def running(self) -> IdempotencyRecords:
        """Those that somebody does now, or did when the process died."""
        return self.filter(state=IdempotencyRecord.State.RUNNING)

    def done(self) -> IdempotencyRecords:
        """Those whose work is done, and not done again until they expire."""
        return self.filter(state=IdempotencyRecord.State.DONE)

    def failed(self) -> IdempotencyRecords:
        """Those whose work failed the last time; the next who comes may do it."""
        return self.filter(state=IdempotencyRecord.State.FAILED)

    def free(self) -> IdempotencyRecords:
        """Those that anybody may claim: failed, expired, or of a holder that is gone."""
        return self.filter(Q(state=IdempotencyRecord.State.FAILED) | _gone() | _EXPIRED)

    def busy(self) -> IdempotencyRecords:
        """Those that somebody does now."""
        return self.running().filter(ends_at__gte=Now())

    def idle(self) -> IdempotencyRecords:
        """Those that nobody does now."""
        return self.exclude(state=IdempotencyRecord.State.RUNNING, ends_at__gte=Now())

    def claimed(self, token: str) -> IdempotencyRecords:
        """Those that the claim with this token still has."""
        return self.running().filter(token=token)

    def is_done_by(self, token: str) -> bool:
        """Tell whether it was the claim with this token that did it."""
        return self.done().filter(token=token).exists()

    def expired(self, age: timedelta | None) -> IdempotencyRecords:
        """Those that say nothing any more, or whose holder has been gone for ``age``; None: not."""
        return self.filter(_EXPIRED if age is None else _EXPIRED | _gone(age))

    def older(self, age: timedelta) -> IdempotencyRecords:
        """Those that ended more than ``age`` ago, or whose holder has been gone for so long."""
        return self.filter(Q(ended_at__lt=Now() - age) | _gone(age))

    def try_claim(
        self, token: str, lease: timedelta, *, holder: str, digest: str, claims: int
    ) -> bool:
        """Let the claim with this token have a record that is free; tell whether it has it."""
        return bool(
            self.free().update(
                state=IdempotencyRecord.State.RUNNING,
                token=token,
                ends_at=Now() + lease,
                holder=holder,
                digest=digest,
                claims=claims,
                claimed_at=Now(),
                ended_at=None,
                expires_at=None,
                result="",
                error="",
            )
        )

    def extend(self, token: str, lease: timedelta) -> int:
        """Let the lease of a claim begin anew."""
        return self.claimed(token).update(ends_at=Now() + lease)

    def finish(self, token: str, result: str, keep: timedelta | None, error: str = "") -> bool:
        """
        Note that what was claimed is done; tell whether that claim still had it.

        Args:
            result: What a repeat gets, as JSON; "": None.
            keep: For how long the record keeps it from being done again; None: for ever.
            error: Why there is no result.
        """
        return bool(
            self.claimed(token).update(
                state=IdempotencyRecord.State.DONE,
                result=result,
                error=storable(error),
                ended_at=Now(),
                expires_at=None if keep is None else Now() + keep,
            )
        )

    def fail(self, token: str, error: str, keep: timedelta | None) -> bool:
        """Note that what was claimed failed; tell whether that claim still had it."""
        return bool(
            self.claimed(token).update(
                state=IdempotencyRecord.State.FAILED,
                error=storable(error),
                ended_at=Now(),
                expires_at=None if keep is None else Now() + keep,
            )
        )

    def erase(self) -> int:
        """Delete them, without the signals that others' receivers could make fail."""
        return self._raw_delete(self.db) or 0


#: Of a record that ended; one that runs has its lease.
_EXPIRED: Final = Q(expires_at__lt=Now())


def _gone(age: timedelta = timedelta()) -> Q:
    """Return what is true of a record whose holder let its lease end, ``age`` ago or more."""
    return Q(state=IdempotencyRecord.State.RUNNING, ends_at__lt=Now() - age if age else Now())


class IdempotencyRecord(models.Model):
    """
    That a thing was done, or is being done, under a key; see ``idempotent``.

    Every moment is the database server's.
    """

    class State(models.TextChoices):
        """What is known of the work."""

        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"

    #: As it is, or hashed; the whole one stands with the holder.
    key = models.CharField(primary_key=True, max_length=255)
    state = models.CharField(max_length=8, choices=State.choices)
    #: Which claim has it, or had it last.
    token = models.CharField(max_length=32)
    #: End of its lease.
    ends_at = models.DateTimeField()
    #: Key and claimer as JSON; see ``encode_holder``.
    holder = models.TextField()
    #: What it was called with, hashed; "": not known, or all of it is the key.
    digest = models.CharField(max_length=32, default="")
    #: How often it was claimed, over all failures and deaths.
    claims = models.PositiveIntegerField(default=1)
    claimed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    #: When it says nothing any more; None: never, or it runs.
    expires_at = models.DateTimeField(null=True)
    #: What a repeat gets, as JSON; "": None.
    result = models.TextField(default="")
    #: What failed; of a record that is done, why there is no result.
    error = models.TextField(default="")

    objects = IdempotencyRecords.as_manager()

    class Meta:
        verbose_name = "idempotency record"
        indexes = (
            models.Index(
                "expires_at", name="safe_record_expires", condition=Q(expires_at__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return self.key
