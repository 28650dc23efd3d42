"""The records of work that is done once."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from django.db import models, transaction
from django.db.models import Q
from django.db.models.functions import Now

from ..locks.stores.base import HeldLock, decode_holder
from ..signals import emit, record_forgotten
from ..statements import change_returning
from ..texts import get_logger
from .text import storable

logger = get_logger(__name__)


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

    def forget(self) -> int:
        """Delete them, so that each is done again by the next who comes, and tell of it."""
        self._for_write = True  # what it was read from may be a replica
        rows = change_returning(self, None, "key", "state", "holder")

        def tell() -> None:
            for key, state, holder in rows:
                whole = decode_holder(holder, HeldLock(key)).name
                emit(
                    record_forgotten, logger, logging.WARNING,
                    "The record of %r was forgotten, as decided; it was %s.", whole, state,
                    sender=IdempotencyRecord, key=whole, state=state,
                )  # fmt: skip

        if rows:
            transaction.on_commit(tell, using=self.db)
        return len(rows)

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
        default_permissions = ("view",)
        permissions = (("forget_idempotencyrecord", "Can forget idempotency record"),)
        indexes = (
            models.Index(
                "expires_at", name="safe_record_expires", condition=Q(expires_at__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return self.key
