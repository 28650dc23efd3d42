"""
:class:`Claim`: a process's claim of one table row, and of the work that the row stands for.

A statement writes a token into the row, with a lease that is renewed. If the process dies, the
lease expires. The statement that records the end of the work checks the token, so a lost claim
changes nothing. Records and carried messages, such as those of steps, are claimed in this way.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from celery._state import get_current_task
from django.db import connections, transaction

from .. import process
from ..events import CLAIM_LOST
from ..exceptions import (
    ClaimLost,
    ConfigurationError,
    InvalidResult,
    LockBackendError,
    WrongTransaction,
    find_shutdown,
)
from ..texts import describe_error, get_logger
from ..transactions import DISCONNECTED, is_transaction_open, reconnect
from ..values import NotPlain, encode
from .holder import HeldLock, describe_claimer, holder_text
from .lease import Lease, clock
from .lease_table import LeaseTable
from .renewer import renewer

R = TypeVar("R")

logger = get_logger(__name__)

#: Longest result, characters of JSON: a repeat reads the whole result.
LONGEST_RESULT: Final = 65536
#: Shortest and longest pause before a database that was unavailable is tried again, s.
SHORTEST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0

#: The claims under which the running code works, the innermost last, each with the request of
#: the task that holds it; None: code outside of tasks holds it.
current_claims: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar(
    "django_celery_safe_claims", default=()
)


class Claim:
    """
    The exclusive right to do some work.

    :func:`idempotent` yields the claim of its key. In a task with ``outbox="until_done"``, and in
    a step, :func:`current_claim` returns the claim of the message or step. A claim is truthy if
    the work is ours to do, falsy if it is done.

    Attributes:
        key: The name of the work; for a message or a step ``<task>[<task id>]``.
        result: The result that :meth:`finish` recorded; None while the work is not done.
    """

    result: Any = None
    #: Whether the work had been done before.
    is_repeat = False
    #: What the work walks, such as ``shop.price by id``, and the cursor with which it began,
    #: see ``resuming``; "": it walks nothing. ``place`` is the last cursor that the row got.
    walks = place = ""
    began_with: Any = None
    #: The table that has the row; each kind of claim annotates it with its own type.
    table: Any
    #: Whether the row runs its task again if this process does not end it.
    is_carried = False
    #: Whether the work was finished by hand, inside a transaction or not; and whether that is
    #: committed.
    is_finished = _is_committed = False
    #: Rolls the open chunk of ``resumable()`` back; None: no chunk is open.
    abandon_chunk: Callable[[], None] | None = None
    #: Ends the run, whatever its task makes of it: another worker goes on; None: none does.
    handed_over: Exception | None = None
    #: Records that the work is done, with a result; returns whether the claim was ours.
    _write_done: Callable[[str], bool]

    def __init__(self, table: LeaseTable | None, name: str, key: str, seconds: float) -> None:
        """
        Prepare a claim of the work ``key``, with a lease of ``seconds``.

        Args:
            table: The table with the row ``name``; None: the claim has no row.
        """
        self.table = table
        self.name, self.key, self.seconds = name, key, seconds
        #: The claim's token, and when the statement that wrote it was sent, by :data:`clock`.
        self.token, self.asked_at = os.urandom(16).hex(), 0.0
        #: Whether this process still holds the row, as far as it knows.
        self.is_held = False
        #: The row's lease, which is renewed; None until :meth:`begin`.
        self.lease: Lease[Any] | None = None
        #: Whether the renewing thread can see the row and renews its lease.
        self._renews = False
        # The partial must not refer to the claim: the lease would keep it alive and be renewed.
        self._report_lost = partial(_report_lost, type(self), key)

    def __bool__(self) -> bool:
        return self.is_held

    def __repr__(self) -> str:
        return f"<Claim {self.key!r}: {'ours' if self.is_held else 'not ours'}>"

    def finish(self, result: Any = None) -> None:
        """
        Record that the work is done; from then on a repeat gets ``result``.

        Inside ``atomic()`` on the claim's database, the record is committed together with the
        body's own writes there: both, or neither. Without this call, the work is recorded as
        done when the block, or the function, ends without an error.

        Args:
            result: Plain data that JSON can represent, at most 64 KB. In a step: a dict for the
                next stages, or None.

        Raises:
            ClaimLost: The claim is no longer ours, and nothing is recorded.
            InvalidResult: JSON can't represent the result, or it is too long; nothing is
                recorded.
            ConfigurationError: The work is not ours, or is already finished; or a loop of
                ``resumable()`` has a chunk open.
        """
        self.check_unfinished()
        if self.abandon_chunk is not None:
            raise ConfigurationError(
                f"{self.key!r} can't be finished inside its resumable() loop, whose chunk is not "
                f"complete. Finish it behind the loop."
            )
        self._record_done(self._encode(result))
        self.result = result

    def ensure(self) -> None:
        """
        Check with the database, in one query, that the claim is still ours.

        Call it before each step that two processes must not both do.

        Raises:
            ClaimLost: The claim is no longer ours.
            ConfigurationError: The work is not ours, or is finished.
        """
        self.check_unfinished()
        if self.table is not None and not self._rows().claimed(self.token).exists():
            self.raise_lost()

    def check_committed(self) -> None:
        """
        Check that a claim that was finished was also committed.

        Raises:
            WrongTransaction: The transaction of :meth:`finish` was rolled back.
        """
        if not self.is_finished or self._is_committed:
            return
        if not self.is_done():
            self.is_finished = False
            raise WrongTransaction(
                f"{self.key!r} was finished in a transaction that was rolled back, so it counts "
                f"as not done. Don't catch the error that caused the rollback: let it propagate."
            )
        self._is_committed = True

    def is_done(self, *, patient: bool = True) -> bool:
        """Return whether the row says that this claim has finished the work."""
        return bool(self.ask(partial(self._rows().is_done_by, self.token), patient=patient))

    def _encode(self, result: Any) -> str:
        """
        Return the text that is stored for a result; for None: "".

        Raises:
            InvalidResult: JSON can't represent the result, or it is too long.
        """
        try:
            return "" if result is None else encode(result, LONGEST_RESULT)
        except NotPlain as error:
            raise InvalidResult(self.key, str(error)) from error

    def read_cursor(self) -> str:
        """
        Return how far the work got, as the row keeps it; "": not at all.

        Raises:
            ClaimLost: The claim is no longer ours.
        """
        row = self._rows().claimed(self.token)
        found: str | None = row.values_list("cursor", flat=True).first()
        return self.raise_lost() if found is None else found

    def prepare(self, task: Any, request: Any, what: str, instead: str) -> str:
        """
        Prepare to claim the row, which other processes have to see as soon as it is written.

        Args:
            task, request: The running task and its request; None: no task is running.
            what: The work, as the subject of the error's sentence.
            instead: The last sentence of the error: what to write instead.

        Returns:
            The text that describes this process and its task in the row.

        Raises:
            WrongTransaction: A transaction is open on the row's database.
            ConfigurationError: The code that calls this is already doing the same work.
        """
        alias = self.table.alias
        if is_transaction_open(connections[alias]):
            raise WrongTransaction(
                f"{what} can't begin inside a transaction on {alias!r}, or with autocommit off "
                f"there: other processes would not see that it is running, and a rollback would "
                f"erase the record of it. {instead}"
            )
        work = [(one.name, one.table) for one, _ in current_claims.get() if one.is_held]
        if (self.name, self.table) in work:
            raise ConfigurationError(
                f"{self.key!r} is being done by the very code that asks to do it: it would wait "
                f"for itself. Give the inner work a key of its own."
            )
        # A block that is open now is TestCase's: what it writes is not visible to other threads.
        self._renews = not connections[alias].in_atomic_block
        return describe_claimer(self.key, task, request, self._renews)

    def begin(self) -> None:
        """Start renewing the lease; the row has already been claimed."""
        alive = weakref.ref(self)  # it is renewed as long as anything refers to the claim
        facts = (self.name, self.token, self.seconds, self.asked_at, self._report_lost)
        self.lease = Lease(self.table, *facts, lock=alive, thread=alive)
        if self._renews:
            renewer.add(self.lease)
        self.is_held = True

    def end(self) -> None:
        """Stop renewing, and no longer count the row as ours; nothing is written."""
        self.is_held = False
        self.stop_renewing()

    def stop_renewing(self) -> None:
        """Stop renewing: the row already says that the work has ended."""
        if self.lease is not None and self._renews:
            renewer.remove(self.lease)
            self._renews = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """
        Make :func:`current_claim` return this claim inside the block.

        Raises:
            WrongTransaction: The block left a transaction open, which is rolled back: otherwise
                it would also hide how the work ended, and the work would be done again.
        """
        before = current_claims.get()
        try:
            current_claims.set((*before, (self, find_request())))
            yield
        except BaseException as error:
            self._roll_back_open()
            if (shutdown := find_shutdown(error)) is not None:
                raise shutdown from error
            if self.handed_over is not None and isinstance(error, Exception):
                raise self.handed_over from None
            raise
        finally:
            current_claims.set(before)
        was_left_open = self._roll_back_open()
        if self.handed_over is not None:
            raise self.handed_over
        if was_left_open:
            raise WrongTransaction(
                f"{self.key!r} ended with a transaction open on {self.table.alias!r}, or with "
                f"autocommit off there. It was rolled back: nobody would have committed it. Leave "
                f"each atomic(), and call set_autocommit(True), before the work ends."
            )

    def _roll_back_open(self) -> bool:
        """Roll back a transaction that the work left open here; return whether there was one."""
        abandon = self.abandon_chunk
        if abandon is not None:  # something refers to its loop, such as a traceback
            abandon()
        alias = self.table.alias
        if is_left := not self.is_of_parent() and is_transaction_open(connections[alias]):
            reconnect(alias)
        return is_left or abandon is not None

    @contextmanager
    def holding(self, fail: Callable[[BaseException], None]) -> Iterator[None]:
        """Hold the claim while the block does the work; call ``fail`` if the block raises."""
        try:
            with self.current():
                yield
        except BaseException as error:
            self.end()
            # After a bare os.fork(), the child also leaves the block, and must not end the claim.
            if not self.is_of_parent():
                fail(error)
            raise
        self.end()

    def is_of_parent(self) -> bool:
        """Return whether the row was claimed before this process was forked."""
        return self.lease is not None and self.lease.pid != process.pid

    def ask(self, statement: Callable[[], R], *, patient: bool = True) -> R:
        """
        Execute a statement that records the end of the work.

        If the database is briefly unavailable, the statement is retried while the lease lasts,
        so no other process can start the work, and for at most one lease length. If not
        ``patient``, it is retried only once, immediately.
        """
        connection, lease, begun_at = connections[self.table.alias], self.lease, clock.now()
        pause = left = 0.0
        while True:
            try:
                return statement()
            except DISCONNECTED as error:
                if lease is not None and patient:
                    left = min(lease.remaining, begun_at + lease.seconds - clock.now())
                if connection.in_atomic_block or (pause and left <= pause):
                    raise
                failure = describe_error(error)
            if pause:
                text = "Could not record the outcome of %r; retrying: %s"
                logger.warning(text, self.key, failure)
                time.sleep(pause)
            pause = min(2 * pause or SHORTEST_PAUSE, LONGEST_PAUSE)
            # The connection may be dead, or its server may not accept writes any more.
            connection.close()

    def end_by(
        self, write: Callable[[], bool], is_written: Callable[[], bool], *, patient: bool = True
    ) -> bool:
        """
        Execute the statement that ends the claim, like :meth:`ask`; return whether it was ours.

        Args:
            write: Execute the statement; return whether the claim was still ours.
            is_written: Called if the claim is no longer ours on a new connection: return whether
                an earlier attempt, whose answer was lost, ended it.
        """
        connection: Any = connections[self.table.alias]
        session: Any = None

        def ask() -> bool:
            nonlocal session
            connection.ensure_connection()  # the work may have closed it: that is no repetition
            session = session or connection.connection
            return write() or (connection.connection is not session and is_written())

        return self.ask(ask, patient=patient)

    def check_unfinished(self) -> None:
        """
        Check that the work is ours and goes on, as far as this process knows.

        Raises:
            ConfigurationError: It is not ours, or is finished.
        """
        if not self.is_held:
            raise ConfigurationError(
                f"The claim of {self.key!r} is not ours: the work was done before, or its block "
                f"has ended. Ask first: if claim: ..."
            )
        if self.is_of_parent():
            raise ConfigurationError(
                f"The claim of {self.key!r} belongs to the process that forked this one, which "
                f"alone knows when its work is done: finish it there."
            )
        if self.is_finished:
            raise ConfigurationError(f"The claim of {self.key!r} was finished before.")

    def _record_done(self, text: str) -> None:
        alias = self.table.alias
        connection = connections[alias]
        if connection.in_atomic_block and is_transaction_open(connection):
            # From here to the commit, the row's database lock keeps others away.
            ours = self._write_done(text)
            if ours:
                transaction.on_commit(self._commit, using=alias)
        else:
            ours = self.end_by(
                lambda: self._write_done(text), lambda: bool(self._rows().is_done_by(self.token))
            )
            # In a block here, it is TestCase's.
            self._is_committed = ours and (connection.in_atomic_block or connection.autocommit)
        if not ours:
            self.raise_lost()
        self.is_finished = True

    def _commit(self) -> None:
        """Go on after the commit of the finished work, whose row nobody could renew before."""
        self._is_committed, lease = True, self.lease
        if lease is None or lease.lost or not self._renews or self.is_of_parent():
            return
        if lease.remaining < lease.seconds / 2:
            lease.renew_at = clock.now()  # before a relay finds that the lease is over
            renewer.add(lease)

    def find_new_holder(self) -> str:
        """Report that the claim was lost; return the row's new holder, or "" if not known."""
        held = None
        with suppress(LockBackendError):  # the claim is lost, whether or not the holder is known
            held = self.table.peek(self.name)
        if self.lease is not None and not self.lease.lost:
            self._report_lost(self.lease, held)
        return "" if held is None or held.token == self.token else holder_text(held)

    def raise_lost(self) -> NoReturn:
        """Raise the error for a claim that is no longer ours."""
        raise ClaimLost(self.key, self.find_new_holder())

    def _rows(self) -> Any:
        """Return a queryset of the claimed row, with one row or none."""
        return self.table.at(self.name)


def find_request() -> Any:
    """Return the request of the task that is running here; None: no task is running."""
    task = get_current_task()
    return None if task is None else task.request


def current_claim() -> Claim:
    """
    Return the claim under which the running code works: the innermost one of this task.

    The claim belongs to ``idempotent``, to a message with ``outbox="until_done"``, or to a step.
    In a task that is called directly or eagerly, outside any ``idempotent`` of its own, it is a
    stand-in that no other process can hold, and its ``finish()`` writes nothing.

    Raises:
        ConfigurationError: The running code has no claim.
    """
    if ours := own_claims():
        return ours[-1]
    task, request = get_current_task(), find_request()
    if request is not None and (request.called_directly or request.is_eager):
        return _DirectClaim(str(task.name))
    raise ConfigurationError(
        "No claim is being worked on here: this is for code that runs inside an "
        '@idempotent function, a `with idempotent(...)` block, a task with outbox="until_done" '
        "(which this message was not sent with), or a step."
    )


def own_claims() -> list[Claim]:
    """Return the claims of the task that is running here, the innermost last."""
    request = find_request()
    # A helper thread of a task has no request of its own.
    return [one for one, its in current_claims.get() if one.is_held and request in (None, its)]


class _DirectClaim(Claim):
    """The claim of a task that runs without a message, so it can't be delivered again."""

    def __init__(self, key: str) -> None:
        super().__init__(None, "", key, 0.0)
        self.is_held = True

    def read_cursor(self) -> str:
        return ""

    def _record_done(self, text: str) -> None:
        self.is_finished = True


def _report_lost(kind: type[Claim], key: str, lease: Lease[Any], now_held: HeldLock | None) -> None:
    # Refers only to the lease: a reference to the claim would keep the lease renewed.
    if now_held is not None and now_held.token == lease.token:
        return  # not lost: the claim ended before its renewal
    lease.lost = True
    CLAIM_LOST.emit(kind, key=key, holder=holder_text(now_held))
