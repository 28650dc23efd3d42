"""
:class:`RecordClaim`: one attempt to do the work that a key names.

The work is ours as soon as the record has the claim's token, with a lease that is
renewed; no row is locked while the work runs. One UPDATE, which checks the token, marks the
record as done, so a lost claim can't finish.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from celery._state import get_current_task
from celery.exceptions import Retry, TaskPredicate
from django.db import Error as DatabaseError
from django.db import OperationalError

from ..databases import is_lost_race
from ..emitting import Event
from ..events import CLAIM_FAILED, CLAIM_REPEATED
from ..exceptions import CelerySafeError, ConfigurationError, IdempotencyConflict, InvalidResult
from ..foreign_errors import describe_error, find_soft_time_limit
from ..leases.claim import Claim, working_claims
from ..leases.clock import clock
from ..leases.holder import HeldLock
from ..texts import get_logger
from ..transactions import reconnect
from ..values import decode
from .record_table import RecordTable, read_claim

logger = get_logger(__name__)

#: How many times a claim tries again after a lost race; each time another process made progress.
TRIES: Final = 20


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
        self.asked = False
        self._keep, self._digest = keep, digest
        #: Why the result can't be stored; "": it can.
        self._error = ""

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
        task = get_current_task()
        request = None if task is None else task.request
        holder = self.prepare(
            task,
            request,
            f"idempotent({self.key!r})",
            "Call it outside atomic(); the work itself may open one.",
        )
        same = (one for one in working_claims() if isinstance(one, RecordClaim))
        if any(one.key == self.key and one.table is self.table for one in same):
            raise ConfigurationError(
                f"{self.key!r} is being done by the very code that asks to do it: it would wait "
                f"for itself. Give the inner work a key of its own."
            )
        try:
            found = self._take(holder)
            if isinstance(found, HeldLock):
                return found
            if found is None:
                self.is_repeat = True
                self._emit(CLAIM_REPEATED)
            else:
                self.asked_at = found
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
            self._record_failed("interrupted before it began")
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
        if not self.is_finished:
            if self.is_resent() and not self.is_of_parent():
                self.end()
                self.fail(Retry("The task has re-sent itself"))
                return
            try:
                self.finish(result)
            except InvalidResult as error:
                from ..models.text import storable  # needs the app registry

                self._error = storable(error.reason)
                self._record_done("")
                raise
        elif self.is_of_parent():
            return
        else:
            self.check_committed()

    def fail(self, error: BaseException) -> None:
        """Record the end of work that raised an error, unless :meth:`finish` has recorded it."""
        reason = describe_error(error)
        recorded = self._record_failed(reason)
        if recorded is False:
            self.record_lost()
        elif recorded and not isinstance(error, TaskPredicate):  # a retry is not yet a failure
            self._emit(CLAIM_FAILED, error=reason)

    def _take(self, holder: str) -> float | HeldLock | None:
        """
        Claim the record.

        Returns:
            The time of the request, by the monotonic clock, if the record is claimed; the lock
            with its current holder; or None if the work is done.
        """
        table = self.table
        ours: Any = {
            "token": self.token,
            "lease": timedelta(seconds=self.seconds),
            "holder": holder,
            "digest": self._digest,
        }
        asked_at = 0.0
        for _ in range(TRIES):
            before, asked_at = asked_at, clock.now()
            try:
                row: Any = table.find(self.key)
                if row is not None and row.token == self.token:
                    return before  # the last try was written, and its answer was lost
                if row is None:
                    if table.add_if_absent(self.key, **ours):
                        return asked_at
                elif not row.is_free(row.asked_at):
                    return self._read(row)
                else:
                    free = self._rows().filter(token=row.token)
                    if free.try_claim(**ours, claims=row.claims + 1):
                        return asked_at
            except OperationalError as error:
                if not is_lost_race(error):
                    raise
        raise CelerySafeError(
            f"The record of {self.key!r} was changed {TRIES} times while it was to be claimed: it "
            f"is being added and forgotten again and again. Find out by whom."
        )

    def _read(self, row: Any) -> HeldLock | None:
        """Return the lock of the run that is doing the work; None: the work is done."""
        holder = read_claim(row)
        if self._digest and row.digest and self._digest != row.digest:
            raise IdempotencyConflict(self.key, str(holder.holder))
        if row.state == row.State.RUNNING:
            return holder
        if row.error:
            raise InvalidResult(self.key, row.error)
        self.result = decode(row.result)
        return None

    def _write_done(self, text: str) -> bool:
        return self.table.finish(self.name, self.token, text, self._keep, self._error)

    def _record_failed(self, reason: str) -> bool | None:
        """
        Record the failure, unless finish() has ended the work.

        Returns:
            Whether it is recorded; False: the claim was lost; None: finish() has ended the work,
            or the database does not answer.
        """
        records, token = self._rows(), self.token
        try:
            if self.end_by(
                lambda: records.fail(token, reason, self._keep),
                lambda: records.failed().filter(token=token).exists(),
                patient=False,
            ):
                return True
            return None if self.is_done(patient=False) else False
        except DatabaseError as error:
            logger.warning(
                "Could not record that %r failed; it is free when its lease is over: %s",
                self.key,
                describe_error(error),
            )
            return None

    def _emit(self, event: Event, **fields: Any) -> None:
        task = get_current_task()
        event.emit(Claim, key=self.key, task_id=None if task is None else task.request.id, **fields)
