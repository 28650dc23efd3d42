"""
The state that the sends of one commit share, so that their waits do not add up.

Each send is a separate ``on_commit`` callback, in the order of the calls, and other callbacks
may run in between. Their shared :class:`Departure` has the time that the commit may spend on
the outbox, the faults that occurred, and the rows that the sends wrote. The rows of each send
are an :class:`OutboxBatch`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction

from .. import conf
from ..databases import Now
from ..exceptions import CelerySafeError
from ..foreign_errors import describe_error
from ..statements import Param, Statement, change_returning
from ..texts import get_logger
from .broker import register_all

if TYPE_CHECKING:
    from .capture import ChordCall
    from .outbox import CarriedAttempt
    from .publisher import Publisher

logger = get_logger(__name__)

#: A relay takes a row this long, in s, plus ``OUTBOX_SEND_TIMEOUT`` after its INSERT: by then
#: the sender has died, or its transaction takes too long.
GRACE: Final = 5.0
#: Errors that must not escape from the commit if a row's state can't be read or written.
UNSETTLED: Final = (DatabaseError, CelerySafeError)
#: Rows that one statement selects: SQLite accepts a limited number of parameters.
LOOK: Final = 1000


#: A row's primary key and the id of its task.
Row: TypeAlias = tuple[int, str]
T = TypeVar("T")


class Departure:
    """
    The sends of one commit.

    Args:
        using: Alias of the database that commits.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        #: Whether the commit has happened; a later send belongs to another commit.
        self.has_begun = False
        #: The publishers by broker, so that the commit does not wait twice for a broker.
        self.publishers: dict[Hashable, Publisher] = {}
        #: Errors of result backends that did not register a chord, by app.
        self.faults: dict[Hashable, Exception] = {}
        #: The apps whose result backend failed to subscribe to a result.
        self.without_results: set[Celery] = set()
        #: A soft time limit that interrupted a subscription; raised when all messages are out.
        self.interruption: SoftTimeLimitExceeded | None = None
        #: The remaining time of ``OUTBOX_SEND_TIMEOUT``, s; None: all of it.
        self._left: float | None = None
        #: While a send spends it: the monotonic time when it will be over.
        self.give_up_at = math.inf

    @cached_property
    def timeout(self) -> float:
        """``OUTBOX_SEND_TIMEOUT``, s, as it was when a send first used the outbox."""
        return float(conf.get("OUTBOX_SEND_TIMEOUT"))

    @cached_property
    def rows(self) -> WrittenRows:
        """The outbox rows that the sends of this commit wrote."""
        return WrittenRows(self.using, self.timeout)

    @classmethod
    def join(cls, using: str | None) -> Departure:
        """Return the departure that the sends of the open transaction share."""
        connection = transaction.get_connection(using)
        for entry in reversed(connection.run_on_commit):
            departure = getattr(entry[1], "departure", None)
            if isinstance(departure, cls):
                if departure.has_begun:  # a TestCase ran its callbacks, and is still open
                    break
                return departure
        return cls(connection.alias)

    def start_clock(self) -> None:
        """Count the time from now on as time that the commit spends on the outbox."""
        left = self.timeout if self._left is None else self._left
        self.give_up_at = time.monotonic() + left

    def stop_clock(self) -> None:
        """Keep the remaining time for the outbox sends that follow in this commit."""
        self._left = self.give_up_at - time.monotonic()

    @property
    def is_time_over(self) -> bool:
        """Whether this commit publishes no more outbox messages, but leaves them to a relay."""
        return time.monotonic() >= self.give_up_at


class WrittenRows:
    """
    The outbox rows that the sends of one transaction wrote.

    A message is sent only if its row exists after the commit. Django also runs the callbacks
    of a savepoint that was rolled back by its id, and runs callbacks after a COMMIT that
    PostgreSQL turned into a rollback.
    """

    def __init__(self, using: str, timeout: float) -> None:
        self.using, self._timeout = using, timeout
        #: How long rows belong to their sender after their INSERT, s.
        self.sender_time = timeout + GRACE
        self._rows: list[Row] = []
        #: The number of each row. The key alone is not enough: SQLite reuses the key of a row
        #: that was rolled back for the next row, in this process or in another one.
        self._numbers: dict[Row, int] = {}
        self._ours: set[Row] = set()
        self._looked = 0
        #: Whether the last query was a claim, which skips rows that a relay has claimed.
        self._was_claim = False
        #: A send that starts before this time ends before a relay takes its rows, even if it
        #: takes the whole ``OUTBOX_SEND_TIMEOUT`` and its last publication as long again.
        self._ours_until = math.inf
        #: No row of ours is due later than this from now, s; one that a relay has claimed is.
        self._held = self.sender_time

    def add(self, rows: Sequence[Row]) -> int:
        """Add rows that were just inserted; return the number of the first row."""
        until = time.monotonic() + max(0.0, GRACE - self._timeout)
        self._ours_until = min(self._ours_until, until)
        start = len(self._rows)
        self._rows += rows
        self._numbers.update((row, start + offset) for offset, row in enumerate(rows))
        return start

    def trust(self) -> None:
        """Ask for none of the rows so far: nothing but their INSERT is in the transaction."""
        self._ours.update(self._rows)
        self._looked = len(self._rows)

    def are_ours(self, start: int, count: int) -> bool:
        """
        Return whether these rows were committed, and no relay takes them before they are sent.

        This takes one query for all rows of a commit, or for every thousand rows.

        Args:
            start: Number of the first row, as :meth:`add` returned it.
            count: Number of rows.
        """
        is_late = time.monotonic() >= self._ours_until
        end = start + count
        if is_late or self._looked < end:
            self._looked = max(end, start + LOOK)
            self._was_claim = is_late
            look = self._claim if is_late else self._find
            self._ours = set().union(*map(look, in_parts(self._rows[start : self._looked])))
        missing = sum(
            row not in self._ours or self._numbers[row] != number
            for number, row in enumerate(self._rows[start:end], start)
        )
        if missing and not self._was_claim:
            logger.warning(
                "%d message(s) of %r are not sent, since their rows are not in the outbox: Django "
                "does not know that they were rolled back, such as by savepoint_rollback() or by "
                "an error of a query that was caught inside atomic(). Put a nested atomic() "
                "around what may fail.",
                missing,
                self.using,
            )
        return not missing

    def release(self, start: int) -> None:
        """Leave the row ``start`` and all later rows to a relay now, unless a relay has them."""
        rows, self._rows[start:] = self._rows[start:], []
        held = timedelta(seconds=self._held)
        for part in in_parts(rows):
            self._query(part).filter(due_at__lte=Now() + held).release()

    def _find(self, rows: Sequence[Row]) -> set[Row]:
        if len(rows) == 1:  # as in most commits
            ((pk, task_id),) = rows
            return set(rows) if _FIND.find(self.using, pk=pk, task_id=task_id) else set()
        return set(self._query(rows).values_list("pk", "task_id"))

    def _claim(self, rows: Sequence[Row]) -> set[Row]:
        held, lease = self.sender_time, self.sender_time + self._timeout
        # A row that a relay has claimed is due later; a row that it had claimed has attempts.
        soon = Now() + timedelta(seconds=held)
        free = self._query(rows).pending().filter(due_at__lte=soon, attempts=0)
        due_at = Now() + timedelta(seconds=lease)
        claimed = change_returning(free, {"due_at": due_at}, "id", "task_id")
        self._ours_until = time.monotonic() + GRACE
        self._held = lease
        return {(pk, task_id) for pk, task_id in claimed}

    def _query(self, rows: Sequence[Row]) -> Any:
        keys, task_ids = [pk for pk, _ in rows], {task_id for _, task_id in rows}
        return rows_of(self.using).filter(pk__in=keys, task_id__in=task_ids)


class OutboxBatch:
    """
    The outbox rows of the messages that one call sent.

    Args:
        departure: The departure that all sends of that commit share.
        rows: Keys and task ids of the rows, in the order of the messages.
        chord: The id of their chord, if the result backend has to register it; otherwise "".
        attempts: The attempt of each message, in the same order; see :meth:`CarriedAttempt.of`.
    """

    def __init__(
        self,
        departure: Departure,
        rows: list[Row],
        chord: str,
        attempts: Sequence[CarriedAttempt | None],
    ) -> None:
        self._departure, self._chord, self._attempts = departure, chord, list(attempts)
        self._ids = [pk for pk, _ in rows]
        self._start = departure.rows.add(rows)

    def begin(self) -> bool:
        """
        Return whether the rows were committed, and no relay takes them before they are sent.

        If so, the time until :meth:`end` counts as time that the commit spends on the outbox.
        """
        departure, count, are_ours = self._departure, len(self._ids), False
        departure.start_clock()
        try:
            # If the time is over, no message is published, and all are left to a relay.
            are_ours = departure.is_time_over or departure.rows.are_ours(self._start, count)
        except UNSETTLED as error:
            self._warn("could not be looked for after the commit, and wait for a relay", error)
        finally:
            if not are_ours:
                departure.stop_clock()
        return are_ours

    def register_chord(self, calls: Sequence[ChordCall]) -> None:
        """Register the chord at the result backend, within ``OUTBOX_SEND_TIMEOUT``."""
        if self._chord:
            rows_of(self._departure.using).register_chord(
                self._chord,
                lambda row, seconds: register_all(calls, seconds),
                self._departure.timeout,
            )

    def drop(self, number: int) -> None:
        """Let the row of a message end without a run: it is a duplicate that is not sent."""
        self._attempts[number] = None

    def end(self, sent: Sequence[int]) -> None:
        """Record which messages were sent, by their numbers, and leave the others to a relay."""
        done = {self._ids[number]: self._attempts[number] for number in sent}
        left = [pk for pk in self._ids if pk not in done]
        rows = rows_of(self._departure.using)
        try:
            for part in in_parts(list(done.items())):
                rows.record_sent(dict(part))
            if not left:
                return
            if self._departure.is_time_over:
                self._departure.rows.release(self._start)  # and all later rows
                return
            for keys in in_parts(left):
                rows.filter(pk__in=keys).release()
        except UNSETTLED as error:
            self._warn("stay in the outbox, so that a relay sends them, again if need be", error)
        finally:
            self._departure.stop_clock()

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning(
            "%d message(s) of %r %s: %s",
            len(self._ids),
            self._departure.using,
            what,
            describe_error(error),
        )


def in_parts(rows: Sequence[T]) -> list[Sequence[T]]:
    """Split rows into parts that are small enough for one statement."""
    return [rows[first : first + LOOK] for first in range(0, len(rows), LOOK)]


def rows_of(alias: str) -> Any:
    """Return all outbox rows of a database, as a queryset."""
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)


def _find_row(alias: str) -> Any:
    return rows_of(alias).filter(pk=Param("pk"), task_id=Param("task_id")).only("pk")


_FIND: Final = Statement(lambda alias: (_find_row(alias), None))
