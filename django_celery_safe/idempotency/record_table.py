"""
The table of records, as claims and the thread that renews their leases see it.

Every step that decides is one guarded statement in a transaction of its own, and every
moment is the database server's; :class:`~django_celery_safe.models.IdempotencyRecords`
has the steps.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from django.db import router
from django.db.models import DurationField
from django.db.models.functions import Now

from .. import conf
from ..databases import refuse_untested
from ..leases.holder import HeldLock, plain_name
from ..leases.lease_table import LeaseTable, read_holder
from ..statements import Param, Statement

if TYPE_CHECKING:
    from ..models.idempotency import IdempotencyRecord, IdempotencyRecords


def _record_model() -> type[IdempotencyRecord]:
    """Return the model of the records, once there is a registry to import it."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry

    return IdempotencyRecord


class RecordTable(LeaseTable):
    """The records in one database."""

    purpose = "say what is done"
    models = ("IdempotencyRecord",)

    def __init__(self, alias: str) -> None:
        super().__init__("records", alias)

    def all(self) -> IdempotencyRecords:
        """Return the records."""
        return _record_model().objects.using(self.alias)

    def at(self, name: str) -> IdempotencyRecords:
        """Return the record of a key, one or none."""
        return self.all().filter(key=plain_name(name))

    def find(self, name: str) -> IdempotencyRecord | None:
        """Return the record of a key, with the server's time as ``asked_at``; None: none."""
        return _FIND.find(self.alias, key=plain_name(name))

    def add_if_absent(
        self, key: str, token: str, lease: timedelta, *, holder: str, digest: str
    ) -> bool:
        """Add a record that this claim has; return False if somebody was first."""
        return _ADD.execute(
            self.alias,
            key=plain_name(key),
            token=token,
            lease=lease,
            holder=holder,
            digest=digest,
        )


_FIND: Final = Statement(
    lambda alias: (
        RecordTable(alias).all().filter(key=Param("key")).annotate(asked_at=Now()),
        None,
    )
)
_ADD: Final = Statement(lambda alias: (_make_new_record(), None))


def _make_new_record() -> IdempotencyRecord:
    values = {name: Param(name) for name in ("key", "token", "holder", "digest")}
    model = _record_model()
    return model(
        state=model.State.RUNNING,
        ends_at=Now() + Param("lease", DurationField()),
        claimed_at=Now(),
        **values,
    )


def record_table(using: str | None = None) -> RecordTable:
    """Return the records in the database ``using``; None: in the one the router writes to."""
    return _cached_table(router.db_for_write(_record_model()) if using is None else using)


def read_claim(row: Any) -> HeldLock:
    """Return who has a record, or had it last, and what is left of the lease."""
    return read_holder(row.key, row)


def get_prunable(
    records: IdempotencyRecords, older_than: timedelta | None = None
) -> IdempotencyRecords:
    """
    Return the records that can be deleted.

    Args:
        older_than: Those that ended so long ago, whatever their ``ttl``; None: those that
            say nothing any more, and those whose holder died an ``IDEMPOTENCY_RETENTION`` ago.
    """
    if older_than is not None:
        return records.older(older_than)
    return records.expired(conf.ttl(conf.get("IDEMPOTENCY_RETENTION"), "IDEMPOTENCY_RETENTION"))


@lru_cache
def _cached_table(alias: str) -> RecordTable:
    refuse_untested(alias, "record what is done once")
    # The renewing thread knows stores by their identity.
    return RecordTable(alias)
