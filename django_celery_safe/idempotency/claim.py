"""
:class:`Claim`: one attempt to do what a key stands for.

It is ours from the moment when the record carries its token, under a lease that is
renewed; no row is locked while the work goes on. The record is done by one UPDATE that
asks for the token, so a claim that was lost can't finish.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeVar

from celery._state import get_current_task
from celery.exceptions import TaskPredicate
from django.db import Error as DatabaseError
from django.db import connections

from ..exceptions import (
    AlreadyClaimed,
    ClaimLost,
    IdempotencyConflict,
    IdempotencyError,
    ResultNotStored,
    WrongTransaction,
    describe_error,
    find_time_limit,
)
from ..locks.lease import Lease, renewer
from ..locks.lock import describe_holder, time_limit
from ..locks.stores.base import HeldLock, encode_holder
from ..signals import claim_failed, claim_finished, claim_lost, claim_repeated, emit
from ..texts import get_logger
from ..transactions import (
    ask_again,
    in_atomic,
    in_testcase_only,
    is_manual,
    leave_inherited,
    losing_a_race,
    no_time_left,
)
from ..values import NotPlain, decode, encode
from .records import RecordStore, read_claim

T = TypeVar("T")

logger = get_logger(__name__)

#: Longest result, characters of JSON: a repeat reads all of it.
LONGEST_RESULT: Final = 65536
#: How often a claim looks again after it lost a race; each time somebody else moved on.
TRIES: Final = 20

#: The claims under which the running code works, the innermost last.
_current: ContextVar[tuple[Claim, ...]] = ContextVar("django_celery_safe_claims", default=())


class Ending(Enum):
    """What became of a claim whose work did not end well."""

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
        contender: Who does it, when :meth:`begin` raised AlreadyClaimed.
    """

    def __init__(
        self, key: str, store: RecordStore, seconds: float, keep: timedelta | None, digest: str = ""
    ) -> None:
        self.key = key
        self.result: Any = None
        self.is_repeat = False
        self.contender: HeldLock | None = None
        #: Whether anybody asked whose the work is.
        self.asked = False
        #: Whether :meth:`finish` was called, inside a transaction or not.
        self.is_finished = False
        self._store, self._seconds, self._keep, self._digest = store, seconds, keep, digest
        self._token = os.urandom(16).hex()
        #: None: not ours, or not any more.
        self._lease: Lease[RecordStore] | None = None
        self._is_committed = False

    def __bool__(self) -> bool:
        self.asked = True
        return self._lease is not None

    def __repr__(self) -> str:
        return f"<Claim {self.key!r}: {'ours' if self._lease else 'not ours'}>"

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
        lease = self._our_lease()
        self._note_done(lease, encode_result(self.key, result))
        self.result = result

    def ensure(self) -> None:
        """
        Go on only if the claim is ours: ask the database, in one query.

        Call it before each step that must not be done by two.

        Raises:
            ClaimLost: It is no longer ours.
            IdempotencyError: The work is not ours, or is finished.
        """
        lease = self._our_lease()
        if not self._store.at(self.key).claimed(self._token).exists():
            self._raise_lost(lease)

    def begin(self) -> None:
        """
        Claim the work, unless it is done.

        Raises:
            AlreadyClaimed: Somebody else does it now.
            IdempotencyConflict: The key stands for another call.
            ResultNotStored: It is done, and its result could not be kept.
            WrongTransaction: Inside ``atomic()``: nobody else would see the claim.
            IdempotencyError: It is being done by the very code that calls this.
            ConfigurationError: The database has no table for records.
        """
        leave_inherited(self._store.alias)
        self._refuse_transaction()
        if any(one.key == self.key and one._store is self._store for one in _working()):
            raise IdempotencyError(
                f"{self.key!r} is being done by the very code that asks to do it: it would wait "
                f"for itself. Give the inner work a key of its own."
            )
        task = get_current_task()
        request = None if task is None else task.request
        holder = encode_holder(self.key, describe_holder(task, request, self._store.renews()))
        try:
            asked_at = self._take(holder)
            if asked_at is None:
                self.is_repeat = True
                self._tell(claim_repeated, logging.INFO, "was done before")
                return
            limit = math.inf if task is None else asked_at + time_limit(task, request)
            lease = Lease(
                self._store, self.key, self._token, self._seconds, asked_at, limit, _note_lost
            )
            if self._store.renews():
                renewer().add(lease)
            self._lease = lease
        except IdempotencyError:
            raise
        except BaseException as error:
            interrupted = find_time_limit(error)
            if interrupted is None and isinstance(error, DatabaseError):
                self._store.check_migrated(error)
                raise
            # Or no thread could be started. The database may have the claim.
            self._reconnect()
            self._note_failed("interrupted before it began")
            if interrupted is None:
                raise
            raise interrupted from error

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have the work done in the block, which ends the claim, well or not."""
        if self._lease is None:
            yield
            return
        before = _current.get()
        try:
            _current.set((*before, self))
            yield
            self._end()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            _current.set(before)

    def finish_with(self, result: Any) -> None:
        """Finish, and even so if the result can't be kept, since the work is done."""
        lease = self._our_lease()
        try:
            text = encode_result(self.key, result)
        except ResultNotStored as error:
            self._note_done(lease, "", error.reason)
            raise
        self._note_done(lease, text)

    def _reconnect(self) -> None:
        """Leave a connection that was interrupted anywhere; no transaction of others is open."""
        connection = connections[self._store.alias]
        if in_testcase_only(self._store.alias):
            return
        with suppress(DatabaseError):
            connection.close()
            if connection.connection is None or connection.closed_in_transaction:
                connection.connect()

    def _our_lease(self) -> Lease[RecordStore]:
        if self._lease is None:
            raise IdempotencyError(
                f"The claim of {self.key!r} is not ours: the work was done before, or its block "
                f"has ended. Ask first: if claim: ..."
            )
        if self.is_finished:
            raise IdempotencyError(f"The claim of {self.key!r} was finished before.")
        return self._lease

    def _refuse_transaction(self) -> None:
        alias = self._store.alias
        if in_atomic(alias) or is_manual(alias):
            raise WrongTransaction(
                f"idempotent({self.key!r}) stands inside a transaction on {alias!r}, or autocommit "
                f"is off there: others would not see that it is being done, and a rollback would "
                f"forget that it was. Call it outside atomic(); the work itself may open one."
            )

    def _take(self, holder: str) -> float | None:
        """Claim the record; return when that was asked for, monotonic, or None: it is done."""
        lease = timedelta(seconds=self._seconds)
        for _ in range(TRIES):
            asked_at = time.monotonic()
            with losing_a_race():
                row = self._store.find(self.key)
                if row is None:
                    added_at = asked_at
                    self._store.try_add(
                        self.key, self._token, lease, holder=holder, digest=self._digest
                    )
                elif row.token == self._token:
                    return added_at
                elif self._is_done(row):
                    return None
                else:
                    free = self._store.at(self.key).filter(token=row.token)
                    if free.try_claim(
                        self._token,
                        lease,
                        holder=holder,
                        digest=self._digest,
                        claims=row.claims + 1,
                    ):
                        return asked_at
        raise IdempotencyError(
            f"The record of {self.key!r} was changed {TRIES} times while it was to be claimed: it "
            f"is being added and forgotten again and again. Find out by whom."
        )

    def _is_done(self, row: Any) -> bool:
        """Tell whether the work is done, as the record says; if somebody does it, raise."""
        expired = row.expires_at is not None and row.expires_at < row.asked_at
        gone = row.state == row.State.RUNNING and row.ends_at < row.asked_at
        if expired or gone or row.state == row.State.FAILED:
            return False
        holder = read_claim(row)
        if self._digest and row.digest and self._digest != row.digest:
            raise IdempotencyConflict(self.key, str(holder.holder))
        if row.state == row.State.RUNNING:
            self.contender = holder
            raise AlreadyClaimed(
                self.key, str(holder.holder), holder.holder.task_id, holder.remaining or 0.0
            )
        if row.error:
            raise ResultNotStored(self.key, row.error)
        self.result = decode(row.result)
        return True

    def _note_done(self, lease: Lease[RecordStore], text: str, error: str = "") -> None:
        record = self._store.at(self.key)
        if connections[self._store.alias].in_atomic_block:
            # From here to the commit it is the row's lock that keeps others away, and the
            # renewing thread, on which other locks depend, would wait for it.
            renewer().remove(lease)
            with renewer().standing_off(lease):
                ours = record.finish(self._token, text, self._keep, error)
        else:
            # The answer to the one before may have got lost.
            ours = self._ask(
                lambda: (
                    record.finish(self._token, text, self._keep, error)
                    or record.is_done_by(self._token)
                ),
                lease,
            )
            self._is_committed = ours
            renewer().remove(lease)
        if not ours:
            self._raise_lost(lease)
        self.is_finished = True

    def _ask(self, ask: Callable[[], T], lease: Lease[RecordStore] | None = None) -> T:
        """Ask a database that may be away for a moment; with a lease, for as long as that lasts."""
        left = no_time_left if lease is None else lease.patience()
        return ask_again(self._store.alias, ask, left, repr(self.key))

    def _end(self) -> None:
        if self._is_of_parent():
            return
        if not self.is_finished:
            self.finish()
        if not self._is_committed and not self._is_done_by_us():
            self.is_finished = False
            raise IdempotencyError(
                f"{self.key!r} was finished in a transaction that was rolled back, and counts as "
                f"not done. Let the error that caused the rollback leave the work."
            )
        self._forget_lease()
        self._tell(claim_finished, logging.INFO, "was done")

    def _is_done_by_us(self) -> bool:
        return self._ask(lambda: self._store.at(self.key).is_done_by(self._token), self._lease)

    def _is_of_parent(self) -> bool:
        # Of a bare os.fork() the child unwinds the block, too.
        return self._lease is not None and self._lease.pid != os.getpid()

    def _fail(self, error: BaseException) -> None:
        if self._is_of_parent():
            return
        lease = self._forget_lease()
        reason = describe_error(error)
        match self._note_failed(reason):
            case Ending.FAILED:
                # A retry is no failure yet.
                level = logging.INFO if isinstance(error, TaskPredicate) else logging.WARNING
                self._tell(claim_failed, level, f"was not done ({reason})", error=reason)
            case Ending.DONE:
                self._tell(claim_finished, logging.INFO, "was done")
            case Ending.LOST if lease is not None and not lease.lost:
                _note_lost(lease, None)

    def _note_failed(self, reason: str) -> Ending:
        """Note it, unless the record is done, by finish(); return what became of the claim."""
        record = self._store.at(self.key)
        try:
            if self._ask(lambda: record.fail(self._token, reason, self._keep)):
                return Ending.FAILED
            return Ending.DONE if self._is_done_by_us() else Ending.LOST
        except DatabaseError as error:
            logger.warning(
                "That %r failed can't be noted; it is free when its lease is over: %s",
                self.key,
                describe_error(error),
            )
            return Ending.UNKNOWN

    def _forget_lease(self) -> Lease[RecordStore] | None:
        lease, self._lease = self._lease, None
        if lease is not None:
            renewer().remove(lease)
        return lease

    def _raise_lost(self, lease: Lease[RecordStore]) -> None:
        row = self._store.find(self.key)
        now_held = None if row is None or row.token == self._token else read_claim(row)
        if not lease.lost:
            _note_lost(lease, now_held)
        raise ClaimLost(self.key, "" if now_held is None else str(now_held.holder))

    def _tell(self, signal: Any, level: int, what: str, **fields: Any) -> None:
        task = get_current_task()
        emit(
            signal,
            logger,
            level,
            "%r %s.",
            self.key,
            what,
            sender=Claim,
            key=self.key,
            task_id=None if task is None else task.request.id,
            **fields,
        )


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
    return [claim for claim in _current.get() if claim._lease is not None]


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


def _note_lost(lease: Lease[Any], now_held: HeldLock | None) -> None:
    # Knows the lease alone: see locks.lock.
    if now_held is not None and now_held.token == lease.token:
        return  # finished while it was to be renewed
    lease.lost = True
    holder = "" if now_held is None else str(now_held.holder)
    emit(
        claim_lost,
        logger,
        logging.ERROR,
        "The claim of %r was lost while its holder worked; %s.",
        lease.name,
        f"{holder} has it now" if holder else "nobody is known to have it now",
        sender=Claim,
        key=lease.name,
        holder=holder,
    )
