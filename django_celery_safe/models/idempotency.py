"""The records of work that is done once."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..databases import Now
from ..events import RECORD_FORGOTTEN
from ..leases.holder import HeldLock, decode_holder
from ..transactions import change_locked
from .columns import ExactCharField, ExactTextField, partial_index
from .listing import ListedRow


class IdempotencyRecords(models.QuerySet["IdempotencyRecord"]):
    """The states of records, and the transitions between them."""

    def listed(self) -> IdempotencyRecords:
        """Records as the admin shows them: see :class:`ListedRow`."""
        return self.annotate(asked_at=Now())

    def running(self) -> IdempotencyRecords:
        """Records whose work is running, or was when its process died."""
        return self.filter(state=IdempotencyRecord.State.RUNNING)

    def done(self) -> IdempotencyRecords:
        """Records whose work is done; it is not repeated until they expire."""
        return self.filter(state=IdempotencyRecord.State.DONE)

    def failed(self) -> IdempotencyRecords:
        """Records whose work failed; the next caller may claim them."""
        return self.filter(state=IdempotencyRecord.State.FAILED)

    def idle(self) -> IdempotencyRecords:
        """Records whose work is not running."""
        return self.exclude(state=IdempotencyRecord.State.RUNNING, ends_at__gte=Now())

    def claimed(self, *tokens: str) -> IdempotencyRecords:
        """Records still held by the claims with these tokens."""
        return self.running().filter(token__in=tokens)

    def is_done_by(self, token: str) -> bool:
        """Return whether the claim with this token finished the work."""
        return self.done().filter(token=token).exists()

    def prunable(self) -> list[IdempotencyRecords]:
        """
        Return the records that expired, and those that were orphaned long ago, each oldest first.

        Each part is found by an index.
        """
        expired = self.filter(expires_at__lt=Now()).order_by("expires_at")
        if (age := conf.retention("records")) is None:
            return [expired]
        return [expired, self.running().filter(ends_at__lt=Now() - age).order_by("ends_at")]

    def forget(self) -> int:
        """Delete the records, so that the next caller does the work again; log each of them."""
        self._for_write = True  # the rows may have been read from a replica
        rows = change_locked(self, ("key", "state", "holder"))
        for key, state, holder in rows:
            facts = {"key": decode_holder(holder, HeldLock(key)).name, "state": state}
            RECORD_FORGOTTEN.emit_on_commit(IdempotencyRecord, using=self.db, **facts)
        return len(rows)

    def erase(self) -> int:
        """Delete the records without Django's signals, whose receivers could fail."""
        return self._raw_delete(self.db) or 0


class IdempotencyRecord(ListedRow):
    """
    A record that work was done, or is being done, under a key; see ``idempotent``.

    All moments are by the database server's clock.
    """

    class State(models.TextChoices):
        """The state of the work."""

        RUNNING = "running", _("Running")
        DONE = "done", _("Done")
        FAILED = "failed", _("Failed")

    #: The key, or its hash; if it is hashed, ``holder`` contains the whole key.
    key = ExactCharField(primary_key=True, max_length=255)
    state = ExactCharField(_("state"), max_length=8, choices=State.choices)
    #: The claim that holds the record, or held it last.
    token = ExactCharField(max_length=32)
    #: End of its lease.
    ends_at = models.DateTimeField()
    #: Key and claimer as JSON; see ``encode_holder``.
    holder = ExactTextField()
    #: A hash of the arguments; "": not known, or the key holds all of them.
    digest = ExactCharField(max_length=32, default="")
    #: How many times it was claimed, including after failures and deaths.
    claims = models.PositiveIntegerField(_("claims"), default=1)
    claimed_at = models.DateTimeField(_("claimed at"))
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: When the record expires; None: never, or its work is running.
    expires_at = models.DateTimeField(_("expires at"), null=True)
    #: The result for repeats, as JSON; "": None.
    result = ExactTextField(_("result"), default="")
    #: The error that the work failed with; if the work is done, the reason why it has no result.
    error = ExactTextField(_("error"), default="")
    #: How far the work got with ``resumable()`` or ``checkpoint()``, as JSON; "": not at all.
    cursor = ExactTextField(default="")

    objects = IdempotencyRecords.as_manager()

    class Meta:
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        default_permissions = ("view",)
        permissions = (("forget_idempotencyrecord", "Can forget idempotency record"),)
        indexes = (
            partial_index("safe_record_expires", Q(expires_at__isnull=False), "expires_at"),
            partial_index("safe_record_running", Q(state="running"), "ends_at", "state ends_at"),
        )

    def __str__(self) -> str:
        return self.key

    @cached_property
    def claim(self) -> HeldLock:
        """The claim that holds the record or held it last: its whole key, holder and lease."""
        left = -(self.seconds_since(self.ends_at) or 0.0)
        return decode_holder(self.holder, HeldLock(self.key, self.token, max(0.0, left)))

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that does the work has died: its lease has expired."""
        return self.state == self.State.RUNNING and not self.claim.remaining

    @property
    def age_s(self) -> float:
        """Seconds since it was claimed."""
        return self.seconds_since(self.claimed_at) or 0.0
