"""
Records of work that is done once: the claim of one, and their table.

The work is ours as soon as the record has the claim's token, with a lease that is renewed; no row
is locked while the work runs. One UPDATE, which checks the token, marks the record as done, so a
lost claim can't finish. Every decision is one guarded statement in its own transaction, and every
time is read from the database server's clock.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

from celery._state import get_current_task
from celery.exceptions import Retry, TaskPredicate
from django.db import Error as DatabaseError
from django.db import router

from .. import queries
from ..databases import refuse_untested
from ..emitting import Event
from ..events import CLAIM_FAILED, CLAIM_REPEATED
from ..exceptions import (
    AlreadyClaimed,
    CelerySafeError,
    IdempotencyConflict,
    InvalidResult,
    find_soft_time_limit,
)
from ..leases.claim import Claim, find_request
from ..leases.holder import HeldLock, decode_holder, plain_name
from ..leases.lease import clock
from ..leases.lease_table import LeaseTable
from ..texts import describe_error, get_logger, storable
from ..transactions import TRIES, reconnect
from ..values import decode

logger: Final = get_logger(__name__)


class Found(NamedTuple):
    """
    The columns of a record that a claim needs.

    Attributes:
        left: Seconds until its lease ends; negative: it is over.
        is_free: Whether any caller may claim it: it failed, expired, or is orphaned.
    """

    state: str
    token: str
    holder: str
    digest: str
    result: str
    error: str
    left: float
    is_free: bool

    def held(self, key: str) -> HeldLock:
        """Return its current or last holder, and the rest of its lease."""
        return decode_holder(self.holder, HeldLock(key, self.token, max(0.0, self.left)))


class RecordTable(LeaseTable):
    """The records in one database."""

    purpose = "say what is done"
    models = ("IdempotencyRecord",)
    rows, named, ends = "records", "key", "ends_at"

    def __init__(self, alias: str) -> None:
        refuse_untested(alias, "record what is done once")
        super().__init__(alias)

    def find(self, key: str) -> Found | None:
        """Return what a claim needs of the record with this primary key; None: no record."""
        rows = queries.fetch(self.alias, "find_record", key=key)
        return Found(*rows[0]) if rows else None

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            row = self.find(plain_name(name))
        return None if row is None else row.held(name)

    def execute(self, statement: str, key: str, **values: Any) -> bool:
        """Execute a statement on the record with this primary key; return whether it changed it."""
        return bool(queries.execute(self.alias, statement, key=key, **values))


#: Returns the one table of a database: the renewing thread tells stores apart by identity.
table_in = lru_cache(RecordTable)


class RecordClaim(Claim):
    """
    The claim of a key, which :func:`idempotent` yields: one attempt to do the work.

    Attributes:
        asked: Whether the block has checked if the work is ours.
    """

    table: RecordTable

    def __init__(
        self, key: str, table: RecordTable, seconds: float, keep: timedelta | None, digest: str = ""
    ) -> None:
        super().__init__(table, key, key, seconds)
        self._row, self._keep, self._digest = plain_name(key), keep, digest
        self.asked = False
        #: Why the result can't be stored; "": it can.
        self._error = ""
        self._sends_before = 0

    def __bool__(self) -> bool:
        self.asked = True
        return self.is_held

    def try_begin(self) -> HeldLock | None:
        """
        Claim the work, unless it is done; return the lock of another run that is doing it, or None.

        Raises:
            IdempotencyConflict: The key was used for a call with other arguments.
            InvalidResult: The work is done, but its result could not be stored.
            WrongTransaction: Inside ``atomic()``, where other processes would not see the claim.
            ConfigurationError: The code that calls this is already doing the same work; or the
                database has no table for records.
        """
        task, what = get_current_task(), f"idempotent({self.key!r})"
        instead = "Call it outside atomic(); the work itself may open one."
        holder = self.prepare(task, None if task is None else task.request, what, instead)
        try:
            found = self._take(holder)
            if isinstance(found, HeldLock):
                return found
            if found is None:
                self.is_repeat = True
                self._emit(CLAIM_REPEATED)
            else:
                self.asked_at, self._sends_before = found, _count_own_sends()
                self.begin()
        except CelerySafeError:
            raise
        except BaseException as error:
            interrupted = find_soft_time_limit(error)
            if interrupted is None and isinstance(error, DatabaseError):
                self.table.check_migrated(error)
                raise
            # A soft time limit, or no thread could be started. The claim may have been written.
            reconnect(self.table.alias)  # it may have been interrupted anywhere
            self.fail(interrupted or error)
            if interrupted is None:
                raise
            raise interrupted from error
        return None

    def succeed(self, result: Any = None) -> None:
        """
        Record the end of work that raised no error, unless :meth:`finish` has recorded it.

        If the result can't be stored, the work is recorded as done without it. If the task has
        re-sent itself, such as by ``retry(throw=False)``, the work is not done, but put back.

        Raises:
            InvalidResult: The result can't be stored.
            WrongTransaction: The transaction of :meth:`finish` was rolled back.
        """
        if self.is_of_parent():
            return  # after a bare os.fork() the child also leaves the block
        if self.is_finished:
            self.check_committed()
            return
        if _count_own_sends() > self._sends_before:
            self.end()
            self.fail(Retry("The task has re-sent itself"))
            return
        try:
            self.finish(result)
        except InvalidResult as error:
            self._error = storable(error.reason)
            self._record_done("")
            raise

    def fail(self, error: BaseException) -> None:
        """Record the end of work that raised an error, unless :meth:`finish` has recorded it."""
        reason, failed = describe_error(error), self._rows().failed().filter(token=self.token)
        text = storable(reason)
        try:
            if self.end_by(lambda: self._end("failed", text), failed.exists, patient=False):
                if not isinstance(error, TaskPredicate):  # a retry is not yet a failure
                    self._emit(CLAIM_FAILED, error=reason)
            elif not self.is_done(patient=False):
                self.find_new_holder()
        except DatabaseError as failure:
            what = "Could not record that %r failed; it is free when its lease is over: %s"
            logger.warning(what, self.key, describe_error(failure))

    def _take(self, holder: str) -> float | HeldLock | None:
        """
        Claim the record.

        Returns:
            The time of the request, by the monotonic clock, if the record is claimed; the lock
            with its current holder; or None if the work is done.
        """
        table, asked_at = self.table, 0.0
        ours = {"token": self.token, "holder": holder, "digest": self._digest}
        for _ in range(TRIES):
            before, asked_at = asked_at, clock.now()
            row = table.find(self._row)
            if row is not None and row.token == self.token:
                return before  # the last try was written, and its answer was lost
            if row is not None and not row.is_free:
                return self._read(row)
            statement = "add_record" if row is None else "claim_record"
            if table.execute(statement, self._row, lease=self.seconds, **ours):
                return asked_at
        raise CelerySafeError(
            f"The record of {self.key!r} was changed {TRIES} times while it was to be claimed: it "
            f"is being added and forgotten again and again. Find out by whom."
        )

    def _read(self, row: Found) -> HeldLock | None:
        """Return the lock of the run that is doing the work; None: the work is done."""
        held = row.held(self.key)
        if self._digest and row.digest and self._digest != row.digest:
            raise IdempotencyConflict(self.key, str(held.holder))
        if row.state == "running":
            return held
        if row.error:
            raise InvalidResult(self.key, row.error)
        self.result = decode(row.result)
        return None

    def _write_done(self, text: str) -> bool:
        return self._end("done", self._error, result=text, cursor="")

    def _end(self, state: str, error: str, *, result: str = "", cursor: str | None = None) -> bool:
        """Record that the claimed work has ended; False if the claim had lost the record."""
        keep = None if self._keep is None else self._keep.total_seconds()
        values = {"token": self.token, "result": result, "cursor": cursor, "keep": keep}
        return self.table.execute("end_record", self._row, state=state, error=error, **values)

    def _emit(self, event: Event, **fields: Any) -> None:
        task_id = getattr(find_request(), "id", None)
        event.emit(Claim, key=self.key, task_id=task_id, **fields)


def _count_own_sends() -> int:
    """Return how often the task that runs here has re-sent itself, as ``retry(throw=False)``."""
    task = get_current_task()
    if task is None:
        return 0
    request: Any = task.request
    # With trail=False there are no children.
    again: int = sum(one.id == request.id for one in request.children)
    return again + int(getattr(request, "safe_retries", 0))


def record_table(using: str | None = None) -> RecordTable:
    """Return the record table in database ``using``; None: the one the router writes to."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry

    return table_in(router.db_for_write(IdempotencyRecord) if using is None else using)


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
        AlreadyClaimed: A process does the work now. Try again when it has ended, or its lease has.
    """
    table = record_table(using)
    if table.at(key).idle().forget():
        return True
    holder = table.peek(key)
    if holder is None:
        return False
    raise AlreadyClaimed(key, str(holder.holder), holder.holder.task_id, holder.remaining or 0.0)
