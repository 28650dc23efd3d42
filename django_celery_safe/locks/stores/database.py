"""
Locks in a database table, through Django's own connections.

Chosen by the setting ``LOCK_DATABASE``. Every moment is the database server's;
every step that decides is one guarded statement. A lock taken inside an open
transaction would be invisible to others until the commit and given back by a
rollback, so that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.db import Error, connections, transaction
from django.db.models import BigIntegerField, F, Func
from django.db.models.functions import Greatest

from ...exceptions import CelerySafeError, WrongTransaction
from ...leases.holder import HeldLock, Holder, decode_holder, encode_holder, plain_name
from ...leases.lease_table import DatabaseLeases
from ...leases.store import Renewable
from ...transactions import is_pooled, is_transaction_open, leave_inherited
from .base import Acquired, Store

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ...models.locks import DatabaseLock

#: Rows that one step of the listing reads.
PAGE: Final = 1000
#: The row of the fence is locked from one statement to the next: the server ends a
#: session that stops there (SIGSTOP, a paused machine, a cut network). Stricter
#: isolation would make acquisitions of different locks fail each other.
BOUNDS: Final = """
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCAL idle_in_transaction_session_timeout = '5s';
SET LOCAL lock_timeout = '15s'
"""
#: SQLite's clock counts milliseconds, µs.
SQLITE_TICK_US: Final = 1000
#: How a server says that it takes no writes of this user; what that means, as a clause; and
#: what to do, as a sentence.
REFUSALS: Final = {
    "read-only transaction": (
        "this server is a replica, or its transactions are read-only",
        "Let LOCK_DATABASE name an alias on the primary, where transactions may write.",
    ),
    "readonly database": (
        "this process may only read the file",
        "Let the process write to the file and to its folder.",
    ),
    "permission denied": (
        "this user may not do what locks need",
        "Grant the user SELECT, INSERT, UPDATE and DELETE on the tables of django_celery_safe.",
    ),
}
#: Primary key of the only row of the fence's table.
FENCE_ROW: Final = 1


class ServerMicroseconds(Func):
    """The database server's clock, µs since the epoch; not frozen inside a transaction."""

    output_field = BigIntegerField()

    def as_sql(self, compiler: Any, connection: Any, *args: Any, **extra: Any) -> Any:
        return _CLOCKS[connection.vendor], []


_CLOCKS: Final = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS integer)",
}


class DatabaseStore(DatabaseLeases, Store):
    """Locks in the table of :class:`~django_celery_safe.models.DatabaseLock`."""

    purpose = "hold the locks"
    models = ("DatabaseLock", "Fence")
    client_errors = (Error,)
    refusals = REFUSALS

    def __init__(self, alias: str) -> None:
        super().__init__(f'DATABASES["{alias}"]', alias)

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        with self.errors("acquire"):
            # Only spares the writes below when the lock is held: they are guarded.
            held = self._find(name)
            if held is None:
                self._try_take(name, token, seconds, holder)
                held = self._find(name)
        if held is None:
            # Taken by someone else and released in between: as good as held a moment ago.
            return HeldLock(name, remaining=0.0)
        return Acquired(held.fence) if held.token == token else held

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self.errors("release"):
            ours: Any = self._locks().filter(key=plain_name(name), token=token)
            # One DELETE with its condition. delete() would select first and then
            # delete by key alone where a project listens to delete signals.
            return bool(ours._raw_delete(self.alias))

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        asked = [(plain_name(renewal.name), renewal.token) for renewal in renewals]
        # A token belongs to one acquisition, so it is the token that decides; the
        # key is the primary key, by which the rows are found.
        with self.errors("extend"):
            for seconds in {renewal.seconds for renewal in renewals}:
                some = [one for one, r in zip(asked, renewals, strict=True) if r.seconds == seconds]
                self._of(some).update(ends_at_us=ServerMicroseconds() + _microseconds(seconds))
            ours = set(self._of(asked).values_list("key", "token"))
        return [one in ours for one in asked]

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            return self._find(name)

    def iter_locks(self) -> Iterator[HeldLock]:
        last = ""
        while True:
            with self.errors("list"):
                page = list(self._live().filter(key__gt=last).order_by("key")[:PAGE])
            yield from map(_read_lock, page)
            if len(page) < PAGE:
                return
            last = page[-1].key

    def ask_time(self) -> float:
        connection = connections[self.alias]
        with self.errors("tell the time"), connection.cursor() as cursor:
            cursor.execute(f"SELECT {_CLOCKS[connection.vendor]}")
            (microseconds,) = cursor.fetchone()
        return int(microseconds) / 1_000_000

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        leave_inherited(self.alias)
        connection = connections[self.alias]
        # Who works under a lock leaves the pool's connection to others meanwhile.
        borrows = connection.connection is None and is_pooled(self.alias)
        try:
            with super().errors(action):
                if is_transaction_open(self.alias):
                    raise WrongTransaction(
                        f"A lock in {self.where} was asked to {action} inside an open transaction "
                        f"on that database, or with autocommit off, which is one: others would "
                        f"not see it before the commit, and a rollback would give it back. Take "
                        f"the lock outside atomic(), or let LOCK_DATABASE name an alias of its "
                        f"own, without AUTOCOMMIT: False."
                    )
                yield
        finally:
            if borrows:
                connection.close()

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        # The next use replaces a connection that broke.
        connections[self.alias].close_if_unusable_or_obsolete()
        self.check_migrated(error)
        return super().explain(action, error)

    def _try_take(self, name: str, token: str, seconds: float, holder: Holder) -> None:
        """Write a row of ours if there is none, or over one whose lease has ended."""
        from ...models.locks import DatabaseLock  # needs the app registry

        key = plain_name(name)
        with transaction.atomic(using=self.alias):
            self._bound_transaction()
            row = {
                "token": token,
                "holder": encode_holder(name, holder),
                # An UPDATE comes first: SQLite has its write lock from the first statement on.
                "fence": self._next_fence(),
                "ends_at_us": ServerMicroseconds() + _microseconds(seconds),
            }
            expired = self._locks().filter(key=key, ends_at_us__lte=ServerMicroseconds())
            if not expired.update(**row):
                new = DatabaseLock(key=key, **row)
                # Silent if somebody else was first.
                self._locks().bulk_create([new], ignore_conflicts=True)

    def _bound_transaction(self) -> None:
        """Let no process that stands still here, or reads too strictly, keep all others out."""
        connection = connections[self.alias]
        # Not below TestCase's transaction, which has begun long ago.
        if connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1:
            with connection.cursor() as cursor:
                cursor.execute(BOUNDS)

    def _next_fence(self) -> int:
        from ...models.locks import Fence  # needs the app registry

        row = Fence.objects.using(self.alias).filter(pk=FENCE_ROW)
        grown = Greatest(F("last") + 1, ServerMicroseconds())
        if not row.update(last=grown):
            row.bulk_create([Fence(pk=FENCE_ROW, last=0)], ignore_conflicts=True)
            row.update(last=grown)
        # The UPDATE keeps the row locked until this transaction ends.
        last: int = row.values_list("last", flat=True).get()
        return last

    def _find(self, name: str) -> HeldLock | None:
        row = self._live().filter(key=plain_name(name)).first()
        return None if row is None else _read_lock(row)

    def _live(self) -> QuerySet[DatabaseLock]:
        now = ServerMicroseconds()
        return self._locks().filter(ends_at_us__gt=now).annotate(left_us=F("ends_at_us") - now)

    def _of(self, asked: Sequence[tuple[str, str]]) -> QuerySet[DatabaseLock]:
        keys, tokens = zip(*asked, strict=True) if asked else ((), ())
        return self._locks().filter(key__in=keys, token__in=tokens)

    def _locks(self) -> QuerySet[DatabaseLock]:
        from ...models.locks import DatabaseLock  # needs the app registry

        return DatabaseLock.objects.using(self.alias)


def _microseconds(seconds: float) -> int:
    # Not rounded down, and a tick of SQLite's clock more: a lease must not end before
    # its holder stops to trust it.
    return math.ceil(seconds * 1_000_000) + SQLITE_TICK_US


def _read_lock(row: Any) -> HeldLock:
    lock = HeldLock(
        row.key, token=row.token, remaining=max(row.left_us, 0) / 1_000_000, fence=row.fence
    )
    return decode_holder(row.holder, lock)
