"""
The table of records, as claims and the thread that renews their leases see it.

Every step that decides is one guarded statement in a transaction of its own, and every
moment is the database server's; :class:`~django_celery_safe.models.IdempotencyRecords`
has the steps.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import Error, router
from django.db.models.functions import Now

from .. import conf
from ..databases import refuse_untested
from ..exceptions import ConfigurationError
from ..locks.stores.base import HeldLock, plain_name
from ..locks.stores.rows import RowStore, read_holder
from ..transactions import lacks_table

if TYPE_CHECKING:
    from ..models import IdempotencyRecord, IdempotencyRecords


class RecordStore(RowStore):
    """The records in one database."""

    def __init__(self, alias: str) -> None:
        super().__init__("records", alias)

    def all(self) -> IdempotencyRecords:
        """Return the records."""
        from ..models import IdempotencyRecord  # needs the app registry

        return IdempotencyRecord.objects.using(self.alias)

    def at(self, name: str) -> IdempotencyRecords:
        """Return the record of a key, one or none."""
        return self.all().filter(key=plain_name(name))

    def find(self, name: str) -> IdempotencyRecord | None:
        """Return the record of a key, with the server's time as ``asked_at``; None: none."""
        return self.at(name).annotate(asked_at=Now()).first()

    def try_add(self, key: str, token: str, lease: timedelta, *, holder: str, digest: str) -> None:
        """Add a record that this claim has, unless somebody was first."""
        from ..models import IdempotencyRecord  # needs the app registry

        new = IdempotencyRecord(
            key=plain_name(key),
            state=IdempotencyRecord.State.RUNNING,
            token=token,
            ends_at=Now() + lease,
            holder=holder,
            digest=digest,
            claimed_at=Now(),
        )
        self.all().bulk_create([new], ignore_conflicts=True)

    def check_migrated(self, error: Error) -> None:
        """
        Say what an error of the database means, if it is that the table is missing.

        Raises:
            ConfigurationError: It is.
        """
        from ..models import IdempotencyRecord  # needs the app registry

        if lacks_table(self.alias, IdempotencyRecord):
            raise ConfigurationError(
                f'DATABASES["{self.alias}"] is to say what is done, and has no table for that. '
                f"Run: manage.py migrate django_celery_safe --database={self.alias}"
            ) from error


def record_store(using: str | None = None) -> RecordStore:
    """Return the records in the database ``using``; None: in the one the router writes to."""
    from ..models import IdempotencyRecord  # needs the app registry

    return _kept_store(router.db_for_write(IdempotencyRecord) if using is None else using)


def read_claim(row: Any) -> HeldLock:
    """Return who has a record, or had it last, and what is left of the lease."""
    return read_holder(row.key, row)


def find_prunable(
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
def _kept_store(alias: str) -> RecordStore:
    refuse_untested(alias, "record what is done once")
    # The renewing thread knows stores by their identity.
    return RecordStore(alias)
