""":class:`RowClaim`: a process's claim of one row of a table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from ..exceptions import LockBackendError, WrongTransaction
from ..transactions import is_transaction_open, retry_on_disconnect
from .holder import HeldLock, describe_holder, encode_holder, holder_text, time_limit
from .lease import Lease
from .lease_table import LeaseTable
from .renewer import renewer

T = TypeVar("T", bound=LeaseTable)
R = TypeVar("R")


class RowClaim(Generic[T]):
    """
    The claim of a row by this process: its token in the row, and a lease that is renewed.

    The claim begins with the statement that writes the token. If the process dies, the lease
    expires. The statement that records the end of the work asks for the token, so a claim
    that was lost changes nothing.

    Args:
        table: Where the row is.
        name: The row's name there.
        seconds: Length of the lease.
        emit_lost: Called with the row's name and its new holder ("": not known) when the
            claim turns out to be lost. It must not refer to the claim: that would keep the
            claim alive, and its lease renewed.

    Attributes:
        asked_at: When the statement that wrote the token was sent, monotonic.
        lease: None until :meth:`begin`.
        is_held: Whether this process still holds the row, as far as it knows.
    """

    def __init__(
        self, table: T, name: str, seconds: float, emit_lost: Callable[[str, str], None]
    ) -> None:
        self.table, self.name, self.seconds = table, name, seconds
        self.token = os.urandom(16).hex()
        self.asked_at = 0.0
        self.lease: Lease[T] | None = None
        self.is_held = False
        #: Whether the renewing thread sees the row, and has to do with it.
        self._renews = False
        self._report_lost = partial(_report_lost, emit_lost)

    def prepare(self, what: str, instead: str) -> None:
        """
        Make sure that others will see what is written about the row.

        Args:
            what: The work, as the subject of the error's sentence.
            instead: The last sentence of the error: how to write it correctly.

        Raises:
            WrongTransaction: A transaction is open on the row's database.
        """
        alias = self.table.alias
        if is_transaction_open(alias):
            raise WrongTransaction(
                f"{what} is to begin inside a transaction on {alias!r}, or autocommit is off "
                f"there: others would not see that it is being done, and a rollback would forget "
                f"that it was. {instead}"
            )

    def describe_holder(self, name: str, task: Any, request: Any) -> str:
        """Return this process and its task, as the row shows them; ``name`` is the work's."""
        self._renews = self.table.renews()
        return encode_holder(name, describe_holder(task, request, self._renews))

    def begin(self, task: Any, request: Any) -> None:
        """Renew the lease that the row has by now."""
        limit = math.inf if task is None else self.asked_at + time_limit(task, request)
        self.lease = Lease(
            self.table, self.name, self.token, self.seconds, self.asked_at, limit, self._report_lost
        )
        if self._renews:
            renewer.add(self.lease)
        self.is_held = True

    def end(self) -> None:
        """Stop renewing, and stop counting the row as ours; nothing is written."""
        self.is_held = False
        self.stop_renewing()

    def stop_renewing(self) -> None:
        """Stop renewing: the row already says that the work has ended."""
        if self.lease is not None and self._renews:
            renewer.remove(self.lease)
            self._renews = False

    @contextmanager
    def working(self, fail: Callable[[BaseException], None]) -> Iterator[None]:
        """Do the work in the block; if it ends in an error, ``fail`` says what becomes of it."""
        try:
            yield
        except BaseException as error:
            # After a bare os.fork() the child leaves the block too, and must not end the claim.
            if not self.is_of_parent():
                self.end()
                fail(error)
            raise
        finally:
            self.end()

    @contextmanager
    def renewal_ended(self) -> Iterator[None]:
        """Stop renewing; the block begins when a renewal that was under way has ended."""
        self.stop_renewing()
        with ExitStack() as stack:
            if self.lease is not None:
                stack.enter_context(renewer.renewal_paused(self.lease))
            yield

    def is_of_parent(self) -> bool:
        """Return whether it was another process, which forked this one, that claimed the row."""
        return self.lease is not None and self.lease.pid != os.getpid()

    def ask(self, statement: Callable[[], R], what: str, *, patient: bool = True) -> R:
        """
        Execute a statement that records the end of the work.

        If the database is away for a moment it is tried again, as long as nobody else can
        begin, and for one length of the lease at the most. Not ``patient``, or before
        :meth:`begin`: once more, at once.
        """
        lease, begun_at = self.lease, time.monotonic()

        def left() -> float:
            if lease is None or not patient:
                return 0.0
            return min(lease.remaining, begun_at + lease.seconds - time.monotonic())

        return retry_on_disconnect(self.table.alias, statement, left, what)

    def find_new_holder(self) -> str:
        """Report that the claim was lost; return the row's new holder, or "" if not known."""
        held = None
        with suppress(LockBackendError):  # that it was lost is known without that
            held = self.table.peek(self.name)
        self.record_lost(held)
        return "" if held is None or held.token == self.token else holder_text(held)

    def record_lost(self, now_held: HeldLock | None = None) -> None:
        """Report that the claim was lost, unless that was reported before."""
        if self.lease is not None and not self.lease.lost:
            self._report_lost(self.lease, now_held)


def _report_lost(
    emit_lost: Callable[[str, str], None], lease: Lease[Any], now_held: HeldLock | None
) -> None:
    # Refers to the lease alone: what referred to its holder would keep it, and renewed.
    if now_held is not None and now_held.token == lease.token:
        return  # it was ended while it was to be renewed
    lease.lost = True
    emit_lost(lease.name, holder_text(now_held))
