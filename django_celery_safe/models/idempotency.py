"""The records of work that is done once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from django.db import models, transaction
from django.db.models import Q
from django.db.models.functions import Now

from ..events import RECORD_FORGOTTEN
from ..leases.holder import HeldLock, decode_holder
from ..statements import change_returning
from .text import storable


class IdempotencyRecords(models.QuerySet["IdempotencyRecord"]):
    """The states of records, and the steps from one to the next."""

    def running(self) -> IdempotencyRecords:
        """Records whose work is running, or was when its process died."""
        return self.filter(state=IdempotencyRecord.State.RUNNING)

    def done(self) -> IdempotencyRecords:
        """Records whose work is done, and not repeated until they expire."""
        return self.filter(state=IdempotencyRecord.State.DONE)

    def failed(self) -> IdempotencyRecords:
        """Records whose work failed; the next caller may claim them."""
        return self.filter(state=IdempotencyRecord.State.FAILED)

    def free(self) -> IdempotencyRecords:
        """Records that any caller may claim: failed, expired, or orphaned."""
        return self.filter(Q(state=IdempotencyRecord.State.FAILED) | _gone() | _EXPIRED)

    def busy(self) -> IdempotencyRecords:
        """Records whose work is running: their lease has not expired."""
        return self.running().filter(ends_at__gte=Now())

    def idle(self) -> IdempotencyRecords:
        """Records whose work is not running."""
        return self.exclude(state=IdempotencyRecord.State.RUNNING, ends_at__gte=Now())

    def claimed(self, token: str) -> IdempotencyRecords:
        """Records still held by the claim with this token."""
        return self.running().filter(token=token)

    def is_done_by(self, token: str) -> bool:
        """Return whether the claim with this token finished the work."""
        return self.done().filter(token=token).exists()

    def expired(self, age: timedelta | None) -> IdempotencyRecords:
        """Records that expired, or were orphaned ``age`` ago; None: only those that expired."""
        return self.filter(_EXPIRED if age is None else _EXPIRED | _gone(age))

    def older(self, age: timedelta) -> IdempotencyRecords:
        """Records that ended, or were orphaned, more than ``age`` ago."""
        return self.filter(Q(ended_at__lt=Now() - age) | _gone(age))

    def try_claim(
        self, token: str, lease: timedelta, *, holder: str, digest: str, claims: int
    ) -> bool:
        """Give a free record to the claim with this token; False if another claim was faster."""
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
        """Renew the lease of a claim; return how many rows it still held."""
        return self.claimed(token).update(ends_at=Now() + lease)

    def finish(self, token: str, result: str, keep: timedelta | None, error: str = "") -> bool:
        """
        Record that the claimed work is done; False if the claim had lost the record.

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
        """Record that the claimed work failed; False if the claim had lost the record."""
        return bool(
            self.claimed(token).update(
                state=IdempotencyRecord.State.FAILED,
                error=storable(error),
                ended_at=Now(),
                expires_at=None if keep is None else Now() + keep,
            )
        )

    def forget(self) -> int:
        """Delete the records, so that the next caller does the work again; log each of them."""
        self._for_write = True  # what it was read from may be a replica
        rows = change_returning(self, None, "key", "state", "holder")

        def emit_all() -> None:
            for key, state, holder in rows:
                whole = decode_holder(holder, HeldLock(key)).name
                RECORD_FORGOTTEN.emit(IdempotencyRecord, key=whole, state=state)

        if rows:
            transaction.on_commit(emit_all, using=self.db)
        return len(rows)

    def erase(self) -> int:
        """Delete the records without Django's signals, whose receivers could fail."""
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
        """The state of the work."""

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
        default_permissions = ("view",)
        permissions = (("forget_idempotencyrecord", "Can forget idempotency record"),)
        indexes = (
            models.Index(
                "expires_at", name="safe_record_expires", condition=Q(expires_at__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return self.key

    def is_free(self, now: datetime) -> bool:
        """Return whether any caller may claim it, as :meth:`IdempotencyRecords.free`."""
        return (
            self.state == self.State.FAILED
            or (self.expires_at is not None and self.expires_at < now)
            or (self.state == self.State.RUNNING and self.ends_at < now)
        )
