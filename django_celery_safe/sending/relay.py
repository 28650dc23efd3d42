"""
Sending the messages that are left in the outbox.

A relay claims a batch of rows under a lease, publishes their messages, and deletes the rows.
If it dies on any line, nothing is lost, and at most one batch is sent again. Any number of
relays can run side by side. No message loses an attempt while the broker or the database is
gone. A message that fails while the broker is available is retried later, without blocking
others, and finally set aside as dead.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, connections
from django.db import Error as DatabaseError

from .. import conf
from ..concurrency.sent import leave_period
from ..databases import is_lost_race, refuse_untested
from ..delivery.header import read_header
from ..events import MESSAGE_BROUGHT_BACK, MESSAGE_DEAD, TASK_NOT_RELAYED, TASK_RELAYED
from ..exceptions import ConfigurationError, LockBackendError
from ..leases.holder import holder_text
from ..leases.lease import clock
from ..texts import describe_error, get_logger
from ..transactions import DISCONNECTED
from ..values import seconds_until
from .capture import Message
from .followed import Fault, fail_unrun
from .housekeeping import Housekeeping
from .outbox import (
    EXPIRED,
    NOT_REACHED,
    ForAnotherRelay,
    Next,
    message_table,
    resend_delay,
    time_to_wait,
    to_message,
)
from .publisher import BrokerGone, Publisher

if TYPE_CHECKING:
    from ..models.outbox import ClaimedRow

logger = get_logger(__name__)

#: Rows that a relay claims at a time. If the relay is killed, at most this many are re-sent.
BATCH: Final = 100
#: How long rows are claimed. No message is published in the second half of this time.
LEASE: Final = timedelta(seconds=60)
#: Longest wait for an answer from the broker, s.
LONGEST_WAIT: Final = 10.0
#: How many times a message is tried before it is dead: for about two hours, see ``models``.
ATTEMPTS: Final = 20
#: Delay of a message that could not be sent because the store of its lock is unavailable, or
#: only another relay can send it, s.
PUT_OFF: Final = 10.0
#: Delay of a message if the broker stopped answering on both tries, s. The message may be the
#: cause, so others go first.
PUT_BEHIND: Final = 60.0
#: How often a busy relay looks for due rows starting with the oldest, s.
LOOK_BACK: Final = 1.0
#: Shortest and longest pause while the broker or the database is gone, s; each pause doubles.
SHORTEST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
#: Pause when nothing is due, s.
IDLE: Final = 1.0
#: Time without a look after which a relay counts as absent even where leases are shorter, s.
LONGEST_IDLE: Final = 5 * IDLE


class ClaimedMessage(NamedTuple):
    """
    A claimed row and its message.

    Attributes:
        takes_lock: Whether the store of its lock must answer before it is published.
    """

    row: ClaimedRow
    message: Message
    takes_lock: bool

    @classmethod
    def of(cls, row: ClaimedRow) -> Self:
        """Read the message of a row; see :func:`to_message`."""
        message = to_message(row)
        if _was_sent(row):
            leave_period(message.options["headers"])  # it started when the message was first sent
        header = read_header(message.options["headers"], message.task)
        return cls(row, message, "sent" in header)

    @property
    def is_expired(self) -> bool:
        """Whether the message would be re-sent, or waited for its eta, until its task expired."""
        has_waited = self.row.why_again or self.message.eta
        left = seconds_until(self.message.expires) if has_waited else None
        return left is not None and left <= 0


class Relay:
    """
    Sends the due messages in the outbox of one database.

    Args:
        using: Alias of the database.
        attempts: How many times a message is tried before it is dead.

    Raises:
        ConfigurationError: The database has autocommit off, so nothing would be committed; or
            ``RETENTION`` is not valid.
        ConfigurationError: The database is neither PostgreSQL, MariaDB, MySQL nor SQLite.
    """

    def __init__(self, using: str = DEFAULT_DB_ALIAS, *, attempts: int = ATTEMPTS) -> None:
        refuse_untested(using, "hold an outbox")
        if not connections[using].settings_dict["AUTOCOMMIT"]:
            raise ConfigurationError(
                f"The database {using!r} has AUTOCOMMIT off, and the relay's steps would not be "
                f"committed. Give the relay an alias without it: --database=ALIAS."
            )
        conf.keeps_sent()  # otherwise a setting that is not valid would show only after sending
        self.using, self._table = using, message_table(using)
        self._rows = self._table.all()
        #: The claim of all rows that it holds.
        self._token = os.urandom(16).hex()
        self._attempts = attempts
        #: The relay's chores besides sending.
        self.housekeeping = Housekeeping(using)
        #: The publishers of the messages of this batch.
        self._publishers: dict[Celery, Publisher] = {}
        #: What becomes of the rows of the batch, by their keys.
        self._next: dict[int, Next] = {}
        #: Messages that were sent, but not announced to receivers yet.
        self._unannounced: list[Message] = []
        #: When the last claimed row was due, and until when the relay looks only at later rows.
        self._since: datetime | None = None
        self._looks_back_at = 0.0
        #: Half of the usual lease, s; when it last did something, and from when on it judges,
        #: both by :data:`clock`.
        self._patience = conf.get("LOCK_TIMEOUT") / 2
        self._awake_at = self._judges_at = clock.now()
        #: How many messages it has sent, and when its last turn began, s since the epoch.
        self.count, self.turned_at = 0, time.time()

    def run(self, stop: threading.Event) -> None:
        """
        Send due messages until ``stop`` is set.

        A batch that has started is finished first. While the broker or the database is
        gone, which is logged once, the relay waits.
        """
        pause = 0.0
        while not stop.is_set():
            self.turned_at = time.time()
            try:
                self.housekeeping.take_turn_if_due()
                found = self.relay_batch()
            except (BrokerGone, *DISCONNECTED) as error:
                if isinstance(error, DatabaseError):
                    connections[self.using].close()
                if is_lost_race(error):
                    text = "Others changed the outbox of %r at the same time: %s"
                    logger.info(text, self.using, error)
                else:
                    if not pause:
                        what = "broker" if isinstance(error, BrokerGone) else "database"
                        text = "The %s can't be reached, so the outbox of %r waits: %s"
                        logger.error(text, what, self.using, error)
                    pause = min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)
                stop.wait(pause or SHORTEST_PAUSE)
                continue
            if not found:
                stop.wait(IDLE)  # no rows prove nothing: another relay may hold them
            elif pause:
                logger.warning("The outbox of %r is relayed again.", self.using)
                pause = 0.0

    def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        """
        Send the messages that are due now.

        Args:
            until: Called before each batch; True stops early.

        Raises:
            BrokerGone: The broker can't be reached.
            django.db.Error: The database can't be reached.
        """
        self.housekeeping.take_turn_if_due()
        while not until() and self.relay_batch():
            pass

    def relay_batch(self) -> int:
        """
        Send one batch of due messages, and return the number of rows that were claimed.

        Raises:
            BrokerGone: The broker can't be reached; no message lost an attempt.
            django.db.Error: The database can't be reached. The messages that were sent are
                recorded once it is available again, or are sent again.
        """
        if self._next:
            self._settle()  # the database was gone the last time
        stop_at = time.monotonic() + LEASE.total_seconds() / 2
        rows = self._claim()
        self._next = {row.pk: NOT_REACHED for row in rows}
        try:
            gone: list[BrokerGone] = []
            for app, claimed in self._read(rows).items():
                try:
                    self._publish(app, claimed, stop_at)
                except BrokerGone as error:
                    gone.append(error)  # another app's broker may be available
            if gone:
                raise gone[0]
        finally:
            self._settle()
            self._announce()
            self._awake_at = clock.now()
        return len(rows)

    def _claim(self) -> list[ClaimedRow]:
        """
        Claim a batch of due rows, starting where the last batch ended.

        A row with an earlier ``due_at`` may appear afterwards: its transaction committed late,
        or a relay that had claimed it died. So from time to time, and before it returns no rows,
        this method starts with the oldest row.
        """
        rows: list[ClaimedRow] = []
        due = self._rows if self._judges() else self._rows.exclude(state="running")
        if self._since is not None and time.monotonic() < self._looks_back_at:
            rows = due.claim(BATCH, LEASE, self._token, since=self._since)
        if not rows:
            self._looks_back_at = time.monotonic() + LOOK_BACK
            rows = due.claim(BATCH, LEASE, self._token)
        self._awake_at = clock.now()
        if rows:
            self._since = rows[-1].due_at
        return rows

    def _judges(self) -> bool:
        """
        Return whether a run whose lease is over counts as dead for this relay now.

        A relay that was absent does not judge. After a suspension of the machine, a failover or a
        long write transaction of SQLite, living processes first get time to renew their leases.
        """
        now = clock.now()
        if now - self._awake_at > max(self._patience, LONGEST_IDLE):
            self._judges_at = now + self._patience
        return now >= self._judges_at

    def _read(self, rows: list[ClaimedRow]) -> dict[Celery, list[ClaimedMessage]]:
        """Return the messages to publish, by their apps."""
        claimed: dict[Celery, list[ClaimedMessage]] = {}
        for row in rows:
            try:
                one = ClaimedMessage.of(row)
                if one.message.expires and one.is_expired:
                    self._end_expired(one)
                elif one.message.eta and (wait := time_to_wait(one.message)) is not None:
                    # Its sender has died before it said so.
                    self._next[row.pk] = Next(wait, "await_eta")
                else:
                    claimed.setdefault(one.message.app, []).append(one)
            except ForAnotherRelay as error:
                self._next[row.pk] = Next(PUT_OFF, "give_back", str(error))
            except ValueError as error:
                self._fail(row, error)
        return claimed

    def _publish(self, app: Celery, claimed: list[ClaimedMessage], stop_at: float) -> None:
        publisher = self._publishers[app] = Publisher(app, LONGEST_WAIT, patient=True)
        if len(claimed) > 1 and time.monotonic() < stop_at:
            free = [one for one in claimed if not one.takes_lock]
            if len(free) > 1 and publisher.publish_together([one.message for one in free]):
                for one in free:
                    self._record_sent(one)
        unavailable: LockBackendError | None = None
        for one in claimed:
            if self._next.get(one.row.pk) != NOT_REACHED:
                continue
            if time.monotonic() > stop_at:
                break  # another relay may claim the rest soon
            try:
                # Otherwise it would wait for the same store again.
                if one.takes_lock and unavailable is not None:
                    raise unavailable
                self._publish_one(publisher, one)
            except LockBackendError as error:
                unavailable = error
                self._next[one.row.pk] = Next(PUT_OFF, "give_back", str(error))

    def _publish_one(self, publisher: Publisher, one: ClaimedMessage) -> None:
        """
        Publish a message on its own.

        Raises:
            LockBackendError: The store of its lock does not answer.
            BrokerGone: The broker takes no message now.
        """
        try:
            # A process that died right afterwards may have published this very message.
            duplicate = publisher.publish(one.message, again=True, begun=one.row.starts > 0)
        except (SoftTimeLimitExceeded, LockBackendError):
            raise
        except BrokerGone as gone:
            if gone.message is not None:
                self._next[one.row.pk] = Next(PUT_BEHIND, "give_back", str(gone))
            raise
        except Exception as error:  # noqa: BLE001 - it is kept with the row
            self._fail(one.row, error)
        else:
            if duplicate is not None and _was_sent(one.row):
                # It was sent before, so it is not a duplicate: its lock was freed, and another
                # message has it now.
                has = f"another message has the lock {duplicate.name!r}: {holder_text(duplicate)}"
                self._next[one.row.pk] = Next(PUT_OFF, "give_back", has)
                return
            self._record_sent(one, is_duplicate=duplicate is not None)

    def _record_sent(self, one: ClaimedMessage, *, is_duplicate: bool = False) -> None:
        again = None if is_duplicate else resend_delay(one.message, one.row.resent)
        self._next[one.row.pk] = Next(again)
        self.count += 1
        if is_duplicate:
            return  # publish_once has reported it
        if why := one.row.why_again:
            MESSAGE_BROUGHT_BACK.emit(Relay, task=one.row.task, task_id=one.row.task_id, reason=why)
        self._unannounced.append(one.message)

    def _end_expired(self, one: ClaimedMessage) -> None:
        """Fail a task that expired: some brokers drop its message, so no worker fails it."""
        self._next.pop(one.row.pk, None)
        header = read_header(one.message.options["headers"], one.message.task)
        fault, rows = Fault(RuntimeError.__name__, EXPIRED), self._rows.filter(pk=one.row.pk)
        fail_unrun(header, one.row, rows, self._token, fault)

    def _announce(self) -> None:
        """Send ``task_sent`` for the batch after its rows are updated: receivers may be slow."""
        unannounced, self._unannounced = self._unannounced, []
        for message in unannounced:
            self._publishers[message.app].announce(message)
            TASK_RELAYED.emit(Relay, task=message.task, task_id=message.task_id, relayed=True)

    def _settle(self) -> None:
        """Record what becomes of the rows; those that were not reached are due now."""
        self._table.record_sent(self._token, self._next)
        outcomes, self._next = Counter(self._next.values()), {}
        for then, count in outcomes.items():
            if then.error and then.after == PUT_OFF:
                text = "%d message(s) stay in the outbox for another %.0f s: %s"
                logger.warning(text, count, PUT_OFF, then.error)

    def _fail(self, row: ClaimedRow, error: Exception) -> None:
        found = self._rows.claimed(self._token).filter(pk=row.pk).first()
        is_dead = found is not None and found.fail(describe_error(error), attempts=self._attempts)
        self._next.pop(row.pk, None)
        event = MESSAGE_DEAD if is_dead else TASK_NOT_RELAYED
        facts: dict[str, Any] = {"task": row.task, "task_id": row.task_id, "error": error}
        event.emit(Relay, kept=True, attempts=row.attempts + 1, **facts)


def _was_sent(row: ClaimedRow) -> bool:
    """Return whether a broker already had the message of a row, or the row waited for its eta."""
    return bool(row.sent_at or row.starts or row.resent or row.deaths)


def drain_all(relays: list[Relay], until: Callable[[], bool]) -> None:
    """
    Let each relay send its due messages, even if another relay can't.

    Raises:
        BrokerGone: A broker can't be reached. The first error is raised after all relays ran.
        django.db.Error: A database can't be reached; raised in the same way.
    """
    errors: list[Exception] = []
    for relay in relays:
        try:
            relay.drain(until)
        except (BrokerGone, DatabaseError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
