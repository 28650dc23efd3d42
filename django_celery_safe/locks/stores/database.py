"""
Locks in a database table, through Django's own connections.

Chosen by the setting ``LOCK_DATABASE``. An acquisition is one upsert and a release one UPDATE,
each committed by itself; every time is read from the database server's clock. A lock acquired
inside an open transaction would be invisible to other sessions until the commit, and released by
a rollback, so that is refused.

A row stays after the release, because it has the lock's fence, which must grow even if the
server's clock is set back. Acquisitions delete rows that ended, and got their fence, an hour ago:
only a clock that is set back by more than that may repeat a fence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

from django.db import Error, connections
from django.db.models import F

from ... import queries
from ...databases import ServerMicroseconds
from ...exceptions import CelerySafeError, WrongTransaction
from ...leases.holder import HeldLock, decode_holder, encode_holder, place_names, plain_name
from ...leases.lease import Renewals, clock
from ...leases.lease_table import DatabaseLeases
from ...transactions import is_pooled, is_transaction_open
from .base import Acquired, LockRequest, Store, choose_place

#: Rows that one step of the listing reads.
PAGE: Final = 1000
#: Tick of SQLite's clock, which counts milliseconds, µs.
SQLITE_TICK_US: Final = 1000
#: How long a row stays after its lease, or after the acquisition that was released, µs.
KEPT_US: Final = 3_600_000_000
#: Which part of the acquisitions look for old rows, and at how many: more than come.
PRUNES: Final = 1 / 1000
LOOKED_AT: Final = 2000
#: How often an acquisition of one of several places is tried, and the longest pause between, s.
TRIES: Final = 10
PAUSE: Final = 0.02


class DatabaseStore(DatabaseLeases, Store):
    """Locks in the table of :class:`~django_celery_safe.models.DatabaseLock`."""

    limits = True
    purpose = "hold the locks"
    models = ("DatabaseLock",)
    #: Texts with which a server refuses this user's writes, each with its meaning (a clause) and
    #: advice (a sentence).
    refusals: ClassVar = {
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

    def __init__(self, alias: str) -> None:
        super().__init__(f'DATABASES["{alias}"]', alias)

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        with self.errors("acquire"):
            if random.random() < PRUNES:  # noqa: S311
                self._prune()
            if request.limit == 1:
                return self._take_place(request, request.name, 1)
            return self._take_any_place(request)

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self.errors("release") as connection:
            if connection.connection is None:  # the work closed it: that is no repetition
                connection.ensure_connection()
            session = connection.connection
            # This sets another token, so that a renewal under way can't bring the lock back, and
            # no end: the lock is free whatever the server's clock says later.
            if queries.execute(self.alias, "free_lock", key=plain_name(name), token=token):
                return True
            # On a new connection it was the second try. The lease was certain when the first
            # one was sent, so that freed the lock, although its answer was lost.
            return connection.connection is not session and (remaining or 0.0) > 0

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        asked = [(plain_name(name), token) for name, token, _ in renewals]
        # A token belongs to one acquisition, so the token decides; the key is the primary
        # key, which finds the rows quickly.
        rows = self.all().filter(key__in=[key for key, _ in asked])
        with self.errors("extend"):
            for seconds in {lease for _, _, lease in renewals}:
                tokens = [token for _, token, lease in renewals if lease == seconds]
                ends = ServerMicroseconds() + _microseconds(seconds)
                rows.filter(token__in=tokens).update(ends_at_us=ends)
            ours = set(rows.values_list("key", "token"))
        return [one in ours for one in asked]

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            return self._held([name])[0]

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
        with self.errors("tell the time"):
            return int(queries.fetch(self.alias, "read_clock")[0][0]) / 1_000_000

    @contextmanager
    def errors(self, action: str) -> Iterator[Any]:
        connection = connections[self.alias]
        # A pooled connection goes back at once, so other threads can use it while this
        # thread does its work under the lock.
        borrows = connection.connection is None and is_pooled(self.alias)
        try:
            if is_transaction_open(connection):
                raise WrongTransaction(
                    f"A lock in {self.where} was to {action} inside a transaction (autocommit "
                    f"off is one): others would not see it, and a rollback would undo it. "
                    f"Use it outside atomic(), or let LOCK_DATABASE name an alias of its own."
                )
            yield connection
        except Error as error:
            raise self.explain(action, error) from error
        finally:
            if borrows:
                connection.close()

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        explained = super().explain(action, error)  # which replaces a broken connection
        self.check_migrated(error)
        return explained

    def _take_place(
        self, request: LockRequest, name: str, place: int, after: int = 0
    ) -> Acquired | HeldLock:
        """
        Take a free place of a lock; its first place has the lock's own name.

        Args:
            after: The largest fence of the other places; 0: they are free.
        """
        holder = encode_holder(name, request.holder, request.limit)
        given = {"token": request.token, "holder": holder, "after": after + 1}
        lease = _microseconds(request.seconds)
        rows = queries.fetch(self.alias, "take_lock", key=plain_name(name), lease=lease, **given)
        if rows:
            return Acquired(rows[0][0], place)
        (lock,) = self._held([name])
        if lock is None:  # another holder released it in between: report it as held until now
            return HeldLock(name, remaining=0.0)
        return Acquired(lock.fence, place) if lock.token == request.token else lock

    def _take_any_place(self, request: LockRequest) -> Acquired | HeldLock:
        names = place_names(request.name, request.limit)
        for _ in range(TRIES):
            held = self._held(names)
            found = choose_place(held, request)
            if not isinstance(found, int):
                return found
            after = max((lock.fence or 0 for lock in held if lock is not None), default=0)
            taken = self._take_place(request, names[found - 1], found, after)
            if isinstance(taken, Acquired):
                if not self._has_twin(names, request):
                    return taken
                # Of two deliveries of one message at once, at least the later one sees both.
                self.release(names[found - 1], request.token)
            clock.sleep(random.uniform(0, PAUSE))  # noqa: S311
        return HeldLock(request.name, remaining=0.0)

    def _has_twin(self, names: Sequence[str], request: LockRequest) -> bool:
        """Return whether another acquisition for the same task id has a place, too."""
        task_id = request.holder.task_id
        return task_id is not None and any(
            lock is not None and lock.holder.task_id == task_id and lock.token != request.token
            for lock in self._held(names)
        )

    def _prune(self) -> None:
        """
        Delete old rows among the next ones, in the order of their keys and round and round.

        An index of the ends would find them at once, and cost each acquisition a fifth of its time.
        """
        place = self.all().filter(key="")  # no lock's: its holder is the key that was last
        with suppress(Error):  # the next acquisitions do it
            after = place.values_list("holder", flat=True).first() or ""
            keys = self.all().filter(key__gt=after).order_by("key").values_list("key", flat=True)
            last = ["", *keys[:LOOKED_AT]][-1]
            given = {"after": after, "last": last, "kept": KEPT_US}
            queries.execute(self.alias, "drop_old_locks", **given)
            if not place.update(holder=last):
                row = place.model(key="", holder=last, fence=0, ends_at_us=0)
                place.bulk_create([row], ignore_conflicts=True)

    def _held(self, names: Sequence[str]) -> list[HeldLock | None]:
        """Return the lock at each place; None: the place is free."""
        keys = list(map(plain_name, names))
        rows = {row.key: _read_lock(row) for row in self._live().filter(key__in=keys)}
        return list(map(rows.get, keys))

    def _live(self) -> Any:
        now = ServerMicroseconds()
        return self.all().filter(ends_at_us__gt=now).annotate(left_us=F("ends_at_us") - now)


def _microseconds(seconds: float) -> int:
    # Rounded up, plus a tick of SQLite's clock: a lease must not end before its holder
    # stops trusting it.
    return math.ceil(seconds * 1_000_000) + SQLITE_TICK_US


def _read_lock(row: Any) -> HeldLock:
    left = max(row.left_us, 0) / 1_000_000
    return decode_holder(row.holder, HeldLock(row.key, row.token, left, row.fence))
