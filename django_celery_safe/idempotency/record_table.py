"""
The table of records, for claims and for the thread that renews their leases.

Every decision is one guarded statement in its own transaction, and every time is read from
the database server's clock; :class:`~django_celery_safe.models.idempotency.IdempotencyRecords`
has these statements.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections, router

from .. import conf, queries
from ..databases import MYSQL, Now, refuse_unfit, refuse_untested
from ..exceptions import AlreadyClaimed
from ..leases.holder import HeldLock, plain_name
from ..leases.lease_table import LeaseTable, read_holder
from ..sending.housekeeping import add_pruning

if TYPE_CHECKING:
    from ..models.idempotency import IdempotencyRecord, IdempotencyRecords


def _record_model() -> type[IdempotencyRecord]:
    """Return the records' model, which can be imported once the app registry is ready."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry

    return IdempotencyRecord


class RecordTable(LeaseTable):
    """The records in one database."""

    purpose = "say what is done"
    models = ("IdempotencyRecord",)
    named, ends = "key", "ends_at"

    def __init__(self, alias: str) -> None:
        super().__init__("records", alias)

    def all(self) -> IdempotencyRecords:
        """Return a queryset of all records."""
        return _record_model().objects.using(self.alias)

    def at(self, name: str) -> IdempotencyRecords:
        """Return a queryset of the key's record, with one record or none."""
        return self.all().filter(key=plain_name(name))

    def find(self, name: str) -> IdempotencyRecord | None:
        """Return the key's record, with the server's time as ``asked_at``; None: no record."""
        return self.at(name).annotate(asked_at=Now()).first()

    def add_if_absent(
        self, key: str, token: str, lease: timedelta, *, holder: str, digest: str
    ) -> bool:
        """Add a record held by this claim; return False if another process was first."""
        if connections[self.alias].vendor == MYSQL:
            refuse_unfit(self.alias, "record what is done once")
        values = {"key": plain_name(key), "token": token, "holder": holder, "digest": digest}
        seconds = lease.total_seconds()
        return bool(queries.execute(self.alias, "add_record", **values, lease=seconds))

    def move(self, name: str, token: str, cursor: str, lease: float) -> bool:
        """Record how far the work got; return whether the claim held the record."""
        values = {"key": plain_name(name), "token": token, "cursor": cursor, "lease": lease}
        return bool(queries.execute(self.alias, "move_record", **values))

    def finish(self, key: str, token: str, result: str, keep: timedelta | None, error: str) -> bool:
        """
        Record that the claimed work is done; False if the claim had lost the record.

        Args:
            result: The result for repeats, as JSON; "": None.
            keep: How long the record keeps the work from being done again; None: for ever.
            error: Why there is no result; "": there is one.
        """
        values = {"key": plain_name(key), "token": token, "result": result, "error": error}
        seconds = None if keep is None else keep.total_seconds()
        return bool(queries.execute(self.alias, "finish_record", **values, keep=seconds))


def record_table(using: str | None = None) -> RecordTable:
    """Return the record table in database ``using``; None: the one the router writes to."""
    return _cached_table(router.db_for_write(_record_model()) if using is None else using)


def forget_record(key: str, *, using: str | None = None) -> bool:
    """
    Delete the record of some work, so that the next caller does the work again.

    Args:
        key: The whole key; that of a decorated task begins with the task's name and ``:``. The
            admin lists the keys.
        using: Database alias of the records; None: the database that the router writes to.

    Returns:
        True if the record was deleted, which is also logged as ``record_forgotten``; False if
        there was none.

    Raises:
        AlreadyClaimed: A process does the work now, so it would be done twice. Try again when
            that process has ended, or when its lease has.
    """
    table = record_table(using)
    if table.at(key).idle().forget():
        return True
    holder = table.peek(key)
    if holder is None:
        return False
    raise AlreadyClaimed(key, str(holder.holder), holder.holder.task_id, holder.remaining or 0.0)


def read_claim(row: Any) -> HeldLock:
    """Return the current or last holder of a record, and the rest of its lease."""
    return read_holder(row.key, row)


def connect() -> None:
    """Register records with the relays, which delete those whose retention has expired."""
    add_pruning("records", RecordTable.models, get_prunable)


def get_prunable(alias: str) -> list[IdempotencyRecords]:
    """Return querysets of the records that have expired, or were orphaned long ago."""
    return RecordTable(alias).all().prunable(conf.retention("records"))


@lru_cache
def _cached_table(alias: str) -> RecordTable:
    refuse_untested(alias, "record what is done once")
    # One object for each database: the renewing thread tells stores apart by identity.
    return RecordTable(alias)
