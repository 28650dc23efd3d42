"""
:class:`Claim`: one attempt to do what a key stands for.

It is ours from the moment when the record carries its token, under a lease that is
renewed; no row is locked while the work goes on. The record is done by one UPDATE that
asks for the token, so a claim that was lost can't finish.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NoReturn

from celery._state import get_current_task
from celery.exceptions import TaskPredicate
from django.db import Error as DatabaseError
from django.db import connections

from ..emitting import Event
from ..events import CLAIM_FAILED, CLAIM_FINISHED, CLAIM_LOST, CLAIM_PUT_BACK, CLAIM_REPEATED
from ..exceptions import (
    ClaimLost,
    IdempotencyConflict,
    IdempotencyError,
    ResultNotStored,
    describe_error,
    find_soft_time_limit,
)
from ..leases.holder import HeldLock
from ..leases.row_claim import RowClaim
from ..locks.stores import Location
from ..texts import get_logger
from ..transactions import (
    in_testcase_only,
    losing_a_race,
)
from ..values import NotPlain, decode, encode
from .record_table import RecordTable, read_claim

if TYPE_CHECKING:
    from ..models.idempotency import IdempotencyRecords

logger = get_logger(__name__)

#: Longest result, characters of JSON: a repeat reads all of it.
LONGEST_RESULT: Final = 65536
#: How often a claim looks again after it lost a race; each time somebody else moved on.
TRIES: Final = 20

#: The claims under which the running code works, the innermost last.
_current: ContextVar[tuple[Claim, ...]] = ContextVar("django_celery_safe_claims", default=())


class Ending(Enum):
    """The ways in which a claim ends without success."""

    FAILED = "failed"
    DONE = "done"
    LOST = "lost"
    UNKNOWN = "unknown"


class Claim:
    """
    What :func:`idempotent` yields: truthy if the work is ours to do, falsy if it is done.

    Attributes:
        key: What stands for the work.
        result: What it returned, as it is stored; None while it is not done.
        is_repeat: Whether it was done before.
    """

    def __init__(
        self, key: str, table: RecordTable, seconds: float, keep: timedelta | None, digest: str = ""
    ) -> None:
        self.key = key
        self.result: Any = None
        self.is_repeat = False
        #: Whether anybody asked whose the work is.
        self.asked = False
        #: Whether :meth:`finish` was called, inside a transaction or not.
        self.is_finished = False
        self._row = RowClaim(table, key, seconds, _emit_lost)
        self._keep, self._digest = keep, digest
        self._is_committed = False

    def __bool__(self) -> bool:
        self.asked = True
        return self._row.is_held

    def __repr__(self) -> str:
        return f"<Claim {self.key!r}: {'ours' if self._row.is_held else 'not ours'}>"

    def finish(self, result: Any = None) -> None:
        """
        Note that the work is done; from then on a repeat gets ``result``.

        Inside ``atomic()`` on the records' database it is committed along with what the
        body wrote there: both, or neither. Without this call the work is done when the
        block, or the function, ends well.

        Args:
            result: Plain data that JSON can take, 64 KB of it at most.

        Raises:
            ClaimLost: The claim is no longer ours, and nothing is noted.
            ResultNotStored: JSON can't take the result, or it is too long; nothing is noted.
            IdempotencyError: The work is not ours, or was finished before.
        """
        self._check_unfinished()
        self._record_done(encode_result(self.key, result))
        self.result = result

    def ensure(self) -> None:
        """
        Go on only if the claim is ours: ask the database, in one query.

        Call it before each step that must not be done by two.

        Raises:
            ClaimLost: It is no longer ours.
            IdempotencyError: The work is not ours, or is finished.
        """
        self._check_unfinished()
        if not self._records().claimed(self._row.token).exists():
            self._raise_lost()

    def try_begin(self) -> HeldLock | None:
        """
        Claim the work, unless it is done; return the lock of another run that does it, or None.

        Raises:
            IdempotencyConflict: The key stands for another call.
            ResultNotStored: It is done, and its result could not be kept.
            WrongTransaction: Inside ``atomic()``: nobody else would see the claim.
            IdempotencyError: It is being done by the very code that calls this.
            ConfigurationError: The database has no table for records.
        """
        row = self._row
        row.prepare(
            f"idempotent({self.key!r})", "Call it outside atomic(); the work itself may open one."
        )
        if any(one.key == self.key and one._row.table is row.table for one in _working()):
            raise IdempotencyError(
                f"{self.key!r} is being done by the very code that asks to do it: it would wait "
                f"for itself. Give the inner work a key of its own."
            )
        task = get_current_task()
        request = None if task is None else task.request
        try:
            found = self._take(row.describe_holder(self.key, task, request))
            if isinstance(found, HeldLock):
                return found
            if found is None:
                self.is_repeat = True
                self._emit(CLAIM_REPEATED)
            else:
                row.asked_at = found
                row.begin(task, request)
        except IdempotencyError:
            raise
        except BaseException as error:
            interrupted = find_soft_time_limit(error)
            if interrupted is None and isinstance(error, DatabaseError):
                row.table.check_migrated(error)
                raise
            # Or no thread could be started. The database may have the claim.
            self._reconnect()
            self._record_failed("interrupted before it began")
            if interrupted is None:
                raise
            raise interrupted from error
        return None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have the work done in the block, which ends the claim, well or not."""
        if not self._row.is_held:
            yield
            return
        before = _current.get()
        try:
            _current.set((*before, self))
            with self._row.working(self._fail):
                yield
                self._end()
        finally:
            _current.set(before)

    def finish_with(self, result: Any) -> None:
        """Finish, and even so if the result can't be kept, since the work is done."""
        self._check_unfinished()
        try:
            text = encode_result(self.key, result)
        except ResultNotStored as error:
            self._record_done("", error.reason)
            raise
        self._record_done(text)

    @property
    def markers(self) -> Location:
        """Where the markers of a message's copies are: beside the records, in no cache."""
        return Location("database", self._row.table.alias)

    def _records(self) -> IdempotencyRecords:
        """Return the record, one or none."""
        return self._row.table.at(self.key)

    def _reconnect(self) -> None:
        """Leave a connection that was interrupted anywhere; no transaction of others is open."""
        alias = self._row.table.alias
        connection = connections[alias]
        if in_testcase_only(alias):
            return
        with suppress(DatabaseError):
            connection.close()
            if connection.connection is None or connection.closed_in_transaction:
                connection.connect()

    def _check_unfinished(self) -> None:
        if not self._row.is_held:
            raise IdempotencyError(
                f"The claim of {self.key!r} is not ours: the work was done before, or its block "
                f"has ended. Ask first: if claim: ..."
            )
        if self._row.is_of_parent():
            raise IdempotencyError(
                f"The claim of {self.key!r} belongs to the process that forked this one, which "
                f"alone knows when its work is done: finish it there."
            )
        if self.is_finished:
            raise IdempotencyError(f"The claim of {self.key!r} was finished before.")

    def _take(self, holder: str) -> float | HeldLock | None:
        """
        Claim the record.

        Returns:
            When that was asked for, monotonic; the lock of its present holder; or None: it is done.
        """
        table = self._row.table
        ours: Any = {
            "token": self._row.token,
            "lease": timedelta(seconds=self._row.seconds),
            "holder": holder,
            "digest": self._digest,
        }
        for _ in range(TRIES):
            asked_at = time.monotonic()
            with losing_a_race():
                row: Any = table.find(self.key)
                if row is None:
                    if table.add_if_absent(self.key, **ours):
                        return asked_at
                elif not row.is_free(row.asked_at):
                    return self._read(row)
                else:
                    free = self._records().filter(token=row.token)
                    if free.try_claim(**ours, claims=row.claims + 1):
                        return asked_at
        raise IdempotencyError(
            f"The record of {self.key!r} was changed {TRIES} times while it was to be claimed: it "
            f"is being added and forgotten again and again. Find out by whom."
        )

    def _read(self, row: Any) -> HeldLock | None:
        """Return the lock of the run that does the work now; None: it is done."""
        holder = read_claim(row)
        if self._digest and row.digest and self._digest != row.digest:
            raise IdempotencyConflict(self.key, str(holder.holder))
        if row.state == row.State.RUNNING:
            return holder
        if row.error:
            raise ResultNotStored(self.key, row.error)
        self.result = decode(row.result)
        return None

    def _record_done(self, text: str, error: str = "") -> None:
        row, records = self._row, self._records()

        def finish() -> bool:
            return records.finish(row.token, text, self._keep, error)

        if connections[row.table.alias].in_atomic_block:
            # From here to the commit it is the row's lock that keeps others away, and the
            # renewing thread, on which other locks depend, would wait for it.
            with row.renewal_ended():
                ours = finish()
        else:
            # The answer to the one before may have got lost.
            ours = row.ask(lambda: finish() or records.is_done_by(row.token), repr(self.key))
            self._is_committed = ours
            row.stop_renewing()
        if not ours:
            self._raise_lost()
        self.is_finished = True

    def _end(self) -> None:
        if self._row.is_of_parent():
            return
        if not self.is_finished:
            self.finish()
        if not self._is_committed and not self._is_done_by_us():
            self.is_finished = False
            raise IdempotencyError(
                f"{self.key!r} was finished in a transaction that was rolled back, and counts as "
                f"not done. Let the error that caused the rollback leave the work."
            )
        self._row.end()
        self._emit(CLAIM_FINISHED)

    def _is_done_by_us(self, *, patient: bool = True) -> bool:
        records, token = self._records(), self._row.token
        return self._row.ask(lambda: records.is_done_by(token), repr(self.key), patient=patient)

    def _fail(self, error: BaseException) -> None:
        reason = describe_error(error)
        match self._record_failed(reason):
            case Ending.FAILED:
                # A retry is no failure yet.
                is_retry = isinstance(error, TaskPredicate)
                self._emit(CLAIM_PUT_BACK if is_retry else CLAIM_FAILED, error=reason)
            case Ending.DONE:
                self._emit(CLAIM_FINISHED)
            case Ending.LOST:
                self._row.record_lost()

    def _record_failed(self, reason: str) -> Ending:
        """Note it, unless the record is done, by finish(); return what became of the claim."""
        records, token = self._records(), self._row.token
        try:
            if self._row.ask(
                lambda: records.fail(token, reason, self._keep), repr(self.key), patient=False
            ):
                return Ending.FAILED
            return Ending.DONE if self._is_done_by_us(patient=False) else Ending.LOST
        except DatabaseError as error:
            logger.warning(
                "That %r failed can't be noted; it is free when its lease is over: %s",
                self.key,
                describe_error(error),
            )
            return Ending.UNKNOWN

    def _raise_lost(self) -> NoReturn:
        raise ClaimLost(self.key, self._row.find_new_holder())

    def _emit(self, event: Event, **fields: Any) -> None:
        task = get_current_task()
        event.emit(Claim, key=self.key, task_id=None if task is None else task.request.id, **fields)


def current_claim() -> Claim:
    """
    Return the claim under which the running code works, of ``@idempotent`` most of all.

    Raises:
        IdempotencyError: There is none.
    """
    claims = _working()
    if not claims:
        raise IdempotencyError(
            "No claim is being worked on here: current_claim() is for code that runs inside an "
            "@idempotent function or a `with idempotent(...)` block."
        )
    return claims[-1]


def _working() -> list[Claim]:
    return [claim for claim in _current.get() if claim._row.is_held]


def encode_result(key: str, result: Any) -> str:
    """
    Return a result as it is stored; "": None.

    Raises:
        ResultNotStored: JSON can't take it, or it is too long.
    """
    try:
        return "" if result is None else encode(result, LONGEST_RESULT)
    except NotPlain as error:
        raise ResultNotStored(key, str(error)) from error


def _emit_lost(key: str, holder: str) -> None:
    CLAIM_LOST.emit(Claim, key=key, holder=holder)
