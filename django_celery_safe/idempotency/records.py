"""
The table of records, as claims and the thread that renews their leases see it.

Every step that decides is one guarded statement in a transaction of its own, and every
moment is the database server's; :class:`~django_celery_safe.models.IdempotencyRecords`
has the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import Error, connections, router
from django.db.models.functions import Now

from .. import conf
from ..exceptions import ConfigurationError, LockBackendError, describe_error
from ..locks.stores.base import HeldLock, LeaseStore, Renewable, decode_holder, plain_name
from ..transactions import busy_timeout, in_testcase_only, lacks_table

if TYPE_CHECKING:
    from ..models import IdempotencyRecord, IdempotencyRecords

#: SQLite's clock counts milliseconds, s: so much earlier a lease may end there.
TICK: Final = 0.001


class RecordStore(LeaseStore):
    """The records in one database."""

    connects_threads: ClassVar[bool] = True
    early: ClassVar[float] = 2 * TICK

    def __init__(self, alias: str) -> None:
        self.where = f'the records in DATABASES["{alias}"]'
        self.alias = alias

    def all(self) -> IdempotencyRecords:
        """Return the records."""
        from ..models import IdempotencyRecord  # needs the app registry

        return IdempotencyRecord.objects.using(self.alias)

    def at(self, key: str) -> IdempotencyRecords:
        """Return the record of a key, one or none."""
        return self.all().filter(key=plain_name(key))

    def find(self, key: str) -> IdempotencyRecord | None:
        """Return the record of a key, with the server's time as ``asked_at``; None: none."""
        return self.at(key).annotate(asked_at=Now()).first()

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

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        with self._errors("extend"), busy_timeout(self.alias, within):
            return [
                bool(self.at(one.name).extend(one.token, timedelta(seconds=one.seconds)))
                for one in renewals
            ]

    def peek(self, name: str) -> HeldLock | None:
        with self._errors("peek"):
            row = self.find(name)
        return None if row is None else read_claim(row)

    def renews(self) -> bool:
        # Inside a TestCase the row is not committed: another thread can't see it.
        return not in_testcase_only(self.alias)

    def close(self) -> None:
        if not connections[self.alias].in_atomic_block:
            connections[self.alias].close()

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

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except Error as error:
            # A connection that broke is made anew at the next use.
            connections[self.alias].close_if_unusable_or_obsolete()
            raise LockBackendError(self.where, action, describe_error(error)) from error


def record_store(using: str | None = None) -> RecordStore:
    """Return the records in the database ``using``; None: in the one the router writes to."""
    from ..models import IdempotencyRecord  # needs the app registry

    return _kept_store(router.db_for_write(IdempotencyRecord) if using is None else using)


def read_claim(row: Any) -> HeldLock:
    """Return who has a record, or had it last, and what is left of the lease."""
    left = max(0.0, (row.ends_at - row.asked_at).total_seconds())
    return decode_holder(row.holder, HeldLock(row.key, row.token, left))


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
    # The renewing thread knows stores by their identity.
    return RecordStore(alias)
