"""
Locks in a database table, through Django's own connections.

Chosen by the setting ``LOCK_DATABASE``. Every time is read from the database
server's clock; every decision is one guarded statement. A lock acquired inside an
open transaction would be invisible to other sessions until the commit, and released
by a rollback, so that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.db import Error, connections, transaction
from django.db.models import F
from django.db.models.functions import Greatest

from ...databases import CLOCKS, MYSQL, ServerMicroseconds, bounded_session, refuse_unfit
from ...exceptions import CelerySafeError, WrongTransaction
from ...leases.holder import HeldLock, decode_holder, encode_holder, place_names, plain_name
from ...leases.lease_table import DatabaseLeases
from ...leases.store import Renewable
from ...transactions import attempts, is_pooled, is_transaction_open, leave_inherited
from .base import Acquired, LockRequest, Store, choose_place

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ...models.locks import DatabaseLock

#: Rows that one step of the listing reads.
PAGE: Final = 1000
#: How long a session may stop between two statements, s, before the server ends it (SIGSTOP,
#: a paused machine, a cut network): meanwhile it keeps the fence's row locked.
MOST_IDLE: Final = 5
#: How long a statement waits for the fence's row, s.
LONGEST_WAIT: Final = 15
#: With a stricter isolation level, acquisitions of different locks would make each other fail.
BOUNDS: Final = f"""
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCAL idle_in_transaction_session_timeout = '{MOST_IDLE}s';
SET LOCAL lock_timeout = '{LONGEST_WAIT}s'
"""
#: Tick of SQLite's clock, which counts milliseconds, µs.
SQLITE_TICK_US: Final = 1000
#: Texts with which a server refuses this user's writes, each with its meaning (a clause) and
#: advice (a sentence).
REFUSALS: Final = {
    "read-only transaction|--read-only option|READ ONLY transaction": (
        "this server is a replica, or its transactions are read-only",
        "Let LOCK_DATABASE name an alias on the primary, where transactions may write.",
    ),
    "readonly database": (
        "this process may only read the file",
        "Let the process write to the file and to its folder.",
    ),
    "permission denied|command denied": (
        "this user may not do what locks need",
        "Grant the user SELECT, INSERT, UPDATE and DELETE on the tables of django_celery_safe.",
    ),
}
#: Primary key of the only row in the fence table.
FENCE_ROW: Final = 1


class DatabaseStore(DatabaseLeases, Store):
    """Locks in the table of :class:`~django_celery_safe.models.DatabaseLock`."""

    limits = True
    purpose = "hold the locks"
    models = ("DatabaseLock", "Fence")
    client_errors = (Error,)
    refusals = REFUSALS

    def __init__(self, alias: str) -> None:
        super().__init__(f'DATABASES["{alias}"]', alias)

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        with self.errors("acquire"):
            names = place_names(request.name, request.limit)
            # Only saves the writes below when the lock is held: they are guarded anyway.
            found = choose_place(self._held(names), request)
            if isinstance(found, int):
                self._try_take(names, request)
                found = choose_place(self._held(names), request)
        # Another holder acquired and released it in between: report it as held until now.
        return HeldLock(request.name, remaining=0.0) if isinstance(found, int) else found

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self.errors("release"):
            connection = connections[self.alias]
            session = connection.connection
            ours: Any = self._locks().filter(key=plain_name(name), token=token)
            # One DELETE with its condition. In a project that listens to delete signals,
            # delete() would select first and then delete by key alone.
            if ours._raw_delete(self.alias):
                return True
            # On a new connection it was the second try. The lease was certain when the first
            # one was sent, so that freed the lock, although its answer was lost.
            is_repeated = connection.connection is not session
            return is_repeated and remaining is not None and remaining > 0

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        asked = [(plain_name(renewal.name), renewal.token) for renewal in renewals]
        # A token belongs to one acquisition, so the token decides; the key is the primary
        # key, which finds the rows quickly.
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
            cursor.execute(f"SELECT {CLOCKS[connection.vendor]}")
            (microseconds,) = cursor.fetchone()
        return int(microseconds) / 1_000_000

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        leave_inherited(self.alias)
        connection = connections[self.alias]
        # A pooled connection goes back at once, so other threads can use it while this
        # thread does its work under the lock.
        borrows = connection.connection is None and is_pooled(self.alias)
        try:
            with super().errors(action):
                if is_transaction_open(self.alias):
                    raise WrongTransaction(
                        f"A lock in {self.where} was to {action} inside a transaction (autocommit "
                        f"off is one): others would not see it, and a rollback would undo it. "
                        f"Use it outside atomic(), or let LOCK_DATABASE name an alias of its own."
                    )
                yield
        finally:
            if borrows:
                connection.close()

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        # The next use opens a new connection in place of a broken one.
        connections[self.alias].close_if_unusable_or_obsolete()
        self.check_migrated(error)
        return super().explain(action, error)

    def _try_take(self, names: list[str], request: LockRequest) -> None:
        """Insert our row if the lock has none, or overwrite a row whose lease has expired."""
        if connections[self.alias].vendor == MYSQL:
            refuse_unfit(self.alias, "hold locks")
        for attempt in attempts(self.alias, f"The acquisition of {request.name!r}"):
            with attempt, self._bounded_transaction():
                self._write(names, request)

    def _write(self, names: list[str], request: LockRequest) -> None:
        from ...models.locks import DatabaseLock  # needs the app registry

        # An UPDATE comes first, so SQLite takes its write lock with the first statement.
        fence, name = self._next_fence(), names[0]
        if len(names) > 1:
            # The lock on the fence's row keeps all others out until the transaction ends.
            place = choose_place(self._held(names), request)
            if not isinstance(place, int):
                return
            name = names[place - 1]
        key = plain_name(name)
        row = {
            "token": request.token,
            "holder": encode_holder(name, request.holder, request.limit),
            "fence": fence,
            "ends_at_us": ServerMicroseconds() + _microseconds(request.seconds),
        }
        expired = self._locks().filter(key=key, ends_at_us__lte=ServerMicroseconds())
        if not expired.update(**row):
            new = DatabaseLock(key=key, **row)
            # Does nothing if another process was first.
            self._locks().bulk_create([new], ignore_conflicts=True)

    @contextmanager
    def _bounded_transaction(self) -> Iterator[None]:
        """Bound the transaction, so a process that stops in it does not keep all others out."""
        connection = connections[self.alias]
        # Not inside TestCase's transaction, which started long ago.
        vendor = "" if connection.in_atomic_block else connection.vendor
        with ExitStack() as stack:
            if vendor == MYSQL:
                stack.enter_context(bounded_session(self.alias, MOST_IDLE, LONGEST_WAIT))
            stack.enter_context(transaction.atomic(using=self.alias))
            if vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(BOUNDS)
            yield

    def _next_fence(self) -> int:
        from ...models.locks import Fence  # needs the app registry

        row = Fence.objects.using(self.alias).filter(pk=FENCE_ROW)
        grown = Greatest(F("last") + 1, ServerMicroseconds())
        if not row.update(last=grown):
            row.bulk_create([Fence(pk=FENCE_ROW, last=0)], ignore_conflicts=True)
            row.update(last=grown)
        # The UPDATE holds the row's lock until this transaction ends.
        last: int = row.values_list("last", flat=True).get()
        return last

    def _held(self, names: Sequence[str]) -> list[HeldLock | None]:
        """Return the lock at each place; None: the place is free."""
        keys = list(map(plain_name, names))
        rows = {row.key: _read_lock(row) for row in self._live().filter(key__in=keys)}
        return list(map(rows.get, keys))

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
    # Rounded up, plus a tick of SQLite's clock: a lease must not end before its holder
    # stops trusting it.
    return math.ceil(seconds * 1_000_000) + SQLITE_TICK_US


def _read_lock(row: Any) -> HeldLock:
    lock = HeldLock(
        row.key, token=row.token, remaining=max(row.left_us, 0) / 1_000_000, fence=row.fence
    )
    return decode_holder(row.holder, lock)
