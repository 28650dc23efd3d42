"""
Sending what is left in the outbox.

A relay claims a batch of rows under a lease, publishes them, and deletes them: dying on
any line, it sends a batch again at most, and loses nothing. Any number of relays work
side by side. A broker or database that is gone costs no message an attempt; a message
that fails while the broker is there is tried again later, and set aside as dead in the
end, never in the way of others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import (
    DEFAULT_DB_ALIAS,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
)
from django.db import Error as DatabaseError
from django.db.models.functions import Now

from .. import conf
from ..concurrency.sent import seconds_until
from ..databases import refuse_untested
from ..delivery.header import read_header
from ..events import (
    MESSAGE_BROUGHT_BACK,
    MESSAGE_DEAD,
    MESSAGE_FAILED,
    TASK_NOT_RELAYED,
    TASK_RELAYED,
)
from ..exceptions import ConfigurationError, LockBackendError, describe_error
from ..leases.holder import HOST
from ..texts import get_logger
from .broker import BrokerGone, OwnConnection, is_backend_gone
from .capture import Message
from .outbox import EXPIRED, register_all, seconds_until_eta, settle_rows
from .publisher import Publisher
from .serialization import AppNotLoaded, to_message
from .trouble import Trouble

if TYPE_CHECKING:
    from ..models.outbox import OutboxMessage

logger = get_logger(__name__)

#: Rows that are claimed at a time; a relay that is killed sends as many again.
BATCH: Final = 100
#: For how long they are claimed. No message is published in the second half of that.
LEASE: Final = timedelta(seconds=60)
#: Longest wait for an answer of the broker, s.
LONGEST_WAIT: Final = 10.0
#: How often a message is tried before it is dead: about two hours, see ``models``.
ATTEMPTS: Final = 20
#: Time until a message is due again that could not be sent for another's fault, such as
#: that of a lock's store.
PUT_OFF: Final = timedelta(seconds=10)
#: The same for a message on which the broker stopped answering twice. The message may be the
#: cause, so others go first.
PUT_BEHIND: Final = timedelta(seconds=60)
#: How often a busy relay looks for what is due from the very beginning, s.
LOOK_BACK: Final = 1.0
#: Pause when nothing is due, s.
IDLE: Final = 1.0
#: How often a relay notes that it is there, s.
MINUTE: Final = 60.0


class PutOff(Exception):
    """A message can't be sent now, for no fault of its own nor of the broker."""


class ClaimedMessage(NamedTuple):
    """
    A row that was claimed, and its message.

    Attributes:
        needs: The servers that must answer before it is published, by names; empty: none.
    """

    row: OutboxMessage
    message: Message
    needs: str

    @classmethod
    def of(cls, row: OutboxMessage) -> Self:
        """Read the message of a row; see :func:`to_message`."""
        message, needed = to_message(row)[0], []
        header = read_header(message.options["headers"], message.task)
        if row.chord:
            needed.append("the result backend")
        if "sent" in header:
            needed.append(f"the store of its lock {header.get('cache', '')}")
        return cls(row, message, " and ".join(needed))

    @property
    def is_expired(self) -> bool:
        """Whether it is to be sent again although its task is not to begin any more."""
        left = seconds_until(self.message.expires) if self.row.why_again else None
        return left is not None and left <= 0


class Relay:
    """
    Sends what is due in the outbox of one database.

    Args:
        using: Alias of the database.
        attempts: How often a message is tried before it is dead.
        housekeeping: Called with the alias once a minute, such as a sweep of stages. An
            error that it raises stops the relay. None: nothing is called.

    Raises:
        ConfigurationError: The database has autocommit off, so nothing would be kept.
        BackendNotSupported: It is neither PostgreSQL nor SQLite.
    """

    def __init__(
        self,
        using: str = DEFAULT_DB_ALIAS,
        *,
        attempts: int = ATTEMPTS,
        housekeeping: Callable[[str], object] | None = None,
    ) -> None:
        refuse_untested(using, "hold an outbox")
        if not connections[using].settings_dict["AUTOCOMMIT"]:
            raise ConfigurationError(
                f"The database {using!r} has AUTOCOMMIT off, and the relay's steps would not be "
                f"committed. Give the relay an alias without it: --database=ALIAS."
            )
        self.using = using
        self._attempts = attempts
        self._housekeeping = housekeeping
        self._connections: dict[Celery, OwnConnection] = {}
        #: The publishers of the messages of this batch.
        self._publishers: dict[Celery, Publisher] = {}
        #: Rows of the batch that nothing was decided about yet.
        self._left: set[int] = set()
        #: Rows that were sent, and in how many seconds their tasks are to begin; None: the row
        #: ends with the sending.
        self._sent: dict[int, float | None] = {}
        #: Messages that were sent, and that receivers do not know of yet.
        self._unannounced: list[Message] = []
        self._looks_after_at = 0.0
        #: When the last row was due that it claimed, and until when it looks only from there on.
        self._since: datetime | None = None
        self._looks_back_at = 0.0
        #: How many messages it has sent.
        self.count = 0

    def run(self, stop: threading.Event) -> None:
        """
        Send until ``stop`` is set.

        What is under way at that moment is brought to its end. A broker or
        database that is gone is waited for.
        """
        trouble = Trouble(self.using)
        while not stop.is_set():
            try:
                self.heartbeat_and_prune()
                found = self.relay_batch()
            except (BrokerGone, OperationalError, InterfaceError, InternalError) as error:
                if isinstance(error, DatabaseError):
                    connections[self.using].close()
                stop.wait(trouble.pause(error))
                continue
            if found:
                trouble.is_over()  # none may be due because another relay waits with them
            else:
                stop.wait(IDLE)

    def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        """
        Send what is due now.

        Args:
            until: Asked before each batch whether to stop nevertheless.

        Raises:
            BrokerGone: The broker can't be reached.
            django.db.Error: The database can't.
        """
        self.heartbeat_and_prune()
        while not until() and self.relay_batch():
            pass

    def relay_batch(self) -> int:
        """
        Send one batch of what is due, and return how many rows were.

        Raises:
            BrokerGone: The broker can't be reached; no message lost an attempt.
            django.db.Error: The database can't. What was sent is noted there as
                soon as it is back, or is sent again.
        """
        self._settle()
        stop_at = time.monotonic() + LEASE.total_seconds() / 2
        rows = self._claim()
        self._left = {row.pk for row in rows}
        try:
            claimed = self._read(rows)
            gone: list[BrokerGone] = []
            for app in {one.message.app for one in claimed}:
                try:
                    self._publish(app, [one for one in claimed if one.message.app is app], stop_at)
                except BrokerGone as error:
                    gone.append(error)  # that of another app may be there
            if gone:
                raise gone[0]
        finally:
            self._settle()
            self._give_back()
            self._announce()
        return len(rows)

    def heartbeat_and_prune(self) -> None:
        """Once a minute: write the heartbeat row, prune sent rows, run ``housekeeping``."""
        if time.monotonic() < self._looks_after_at:
            return
        from ..models.outbox import OutboxRelay  # needs the app registry

        relays = OutboxRelay.objects.using(self.using)
        seen = {"host": HOST, "pid": os.getpid(), "seen_at": Now()}
        if not relays.filter(pk=1).update(**seen):
            relays.bulk_create([OutboxRelay(pk=1, **seen)], ignore_conflicts=True)
        self._rows().recall()
        self._rows().prune(conf.retention("OUTBOX_RETENTION"))
        self._rows().failed_before(conf.retention("OUTBOX_FAILED_RETENTION")).erase()
        self._looks_after_at = time.monotonic() + MINUTE
        if self._housekeeping is not None:
            self._housekeeping(self.using)

    def close(self) -> None:
        """Close the connections to the broker."""
        for connection in self._connections.values():
            connection.close()

    def _claim(self) -> list[OutboxMessage]:
        """
        Claim a batch of what is due, beginning where the last batch ended.

        A row that becomes due later than those can have an earlier moment: its transaction
        committed late, or a relay that had claimed it died. So from time to time, and before
        none is said to be due, it begins at the beginning.
        """
        rows: list[OutboxMessage] = []
        if self._since is not None and time.monotonic() < self._looks_back_at:
            rows = self._rows().claim(BATCH, LEASE, since=self._since)
        if not rows:
            self._looks_back_at = time.monotonic() + LOOK_BACK
            rows = self._rows().claim(BATCH, LEASE)
        if rows:
            self._since = rows[-1].due_at
        return rows

    def _rows(self) -> Any:
        from ..models.outbox import OutboxMessage  # needs the app registry

        return OutboxMessage.objects.using(self.using)

    def _read(self, rows: list[OutboxMessage]) -> list[ClaimedMessage]:
        claimed: list[ClaimedMessage] = []
        strange: dict[str, list[int]] = {}
        for row in rows:
            try:
                one = ClaimedMessage.of(row)
                if one.is_expired:
                    self._end_expired(one)
                else:
                    claimed.append(one)
            except AppNotLoaded as error:
                strange.setdefault(str(error), []).append(row.pk)
            except ValueError as error:
                self._fail(row, error)
        for reason, ids in strange.items():
            self._put_off(ids, reason)
        return claimed

    def _publish(self, app: Celery, claimed: list[ClaimedMessage], stop_at: float) -> None:
        connection = self._connections.setdefault(app, OwnConnection(app, LONGEST_WAIT))
        if time.monotonic() > stop_at:
            return  # another relay may have them soon
        publisher = Publisher(app, connection.lend, wait=LONGEST_WAIT, patient=True)
        self._publishers[app] = publisher
        free = [one for one in claimed if not one.needs]
        if len(free) > 1:
            waiting = iter(free)
            publisher.publish_together(
                [one.message for one in free], lambda _: self._record_sent(next(waiting))
            )
        unavailable: dict[str, PutOff] = {}
        put_off: dict[str, list[int]] = {}
        for one in claimed:
            if one.row.pk not in self._left:
                continue
            if time.monotonic() > stop_at:
                break  # another relay may have them soon
            needs = one.needs
            try:
                if needs not in unavailable:  # otherwise it would wait for the same answer
                    self._publish_one(publisher, one)
                    continue
            except PutOff as error:
                unavailable[needs] = error
            put_off.setdefault(needs, []).append(one.row.pk)
        for needs, ids in put_off.items():
            self._put_off(ids, str(unavailable[needs]))

    def _publish_one(self, publisher: Publisher, one: ClaimedMessage) -> None:
        """
        Publish a message on its own.

        Raises:
            PutOff: What it needs does not answer.
            BrokerGone: The broker can take nothing now.
        """
        try:
            self._register_chord(one)
            # The very message may have been published before, by who died before saying so.
            duplicate = publisher.publish(one.message, again=True)
        except SoftTimeLimitExceeded:
            raise
        except BrokerGone as gone:
            if gone.message is not None:
                self._rows().filter(pk=one.row.pk).put_off(PUT_BEHIND, str(gone))
                self._left.discard(one.row.pk)
            raise
        except (PutOff, LockBackendError) as error:
            raise PutOff(str(error)) from error
        except Exception as error:  # noqa: BLE001 - it is kept with the row
            self._fail(one.row, error)
        else:
            row = one.row
            if duplicate is not None and (row.starts or row.resent or row.deaths):
                # It was sent before, so that it is none; the lock of its send was freed since.
                raise PutOff(f"{duplicate} of another message is in its way")
            self._record_sent(one, is_duplicate=duplicate is not None)

    def _register_chord(self, one: ClaimedMessage) -> None:
        if not one.row.chord:
            return

        def register(row: OutboxMessage | None, seconds: float) -> None:
            # Nothing to tell where somebody discarded the row that said it.
            register_all([] if row is None else to_message(row)[1], seconds)

        try:
            self._rows().register_chord(one.row.chord, register, LONGEST_WAIT)
        except IntegrityError:
            # A backend that keeps chords in a table was told by who died before noting it.
            self._rows().filter(chord=one.row.chord).update(chord="")
        except Exception as error:
            if is_backend_gone(one.message.app, error):
                raise PutOff(
                    f"the result backend could not be told of a chord: {describe_error(error)}"
                ) from error
            raise

    def _record_sent(self, one: ClaimedMessage, *, is_duplicate: bool = False) -> None:
        self._left.discard(one.row.pk)
        is_carried = one.row.attempt and not is_duplicate
        self._sent[one.row.pk] = seconds_until_eta(one.message) if is_carried else None
        self.count += 1
        if is_duplicate:
            return  # publish_once has reported it
        if one.row.why_again:
            MESSAGE_BROUGHT_BACK.emit(
                Relay, task=one.message.task, task_id=one.message.task_id, reason=one.row.why_again
            )
        self._unannounced.append(one.message)

    def _end_expired(self, one: ClaimedMessage) -> None:
        """Fail a task that expired: some brokers drop its message, so that no worker does."""
        self._left.discard(one.row.pk)
        rows = self._rows().pending().filter(pk=one.row.pk)
        if rows.fail_task("", "RuntimeError", EXPIRED, ""):
            MESSAGE_FAILED.emit(Relay, task=one.row.task, task_id=one.row.task_id, error=EXPIRED)

    def _announce(self) -> None:
        """Send ``task_sent`` for the batch after its rows are updated: receivers may be slow."""
        unannounced, self._unannounced = self._unannounced, []
        for message in unannounced:
            self._publishers[message.app].announce(message)
            TASK_RELAYED.emit(Relay, task=message.task, task_id=message.task_id, relayed=True)

    def _settle(self) -> None:
        if self._sent:
            settle_rows(self._rows(), self._sent)
            self._sent = {}

    def _give_back(self) -> None:
        """Let what was not reached be due at once, rather than when the lease is over."""
        if self._left:
            self._rows().filter(pk__in=self._left).release()

    def _put_off(self, ids: list[int], reason: str) -> None:
        logger.warning(
            "%d message(s) stay in the outbox for another %.0f s: %s",
            len(ids),
            PUT_OFF.total_seconds(),
            reason,
        )
        self._rows().filter(pk__in=ids).put_off(PUT_OFF, reason)
        self._left.difference_update(ids)

    def _fail(self, row: OutboxMessage, error: Exception) -> None:
        is_dead = row.fail(describe_error(error), attempts=self._attempts)
        self._left.discard(row.pk)
        event = MESSAGE_DEAD if is_dead else TASK_NOT_RELAYED
        event.emit(
            Relay,
            task=row.task,
            task_id=row.task_id,
            error=error,
            kept=True,
            attempts=row.attempts,
        )


def drain_all(relays: list[Relay], until: Callable[[], bool]) -> None:
    """
    Let each relay send what is due, also if another one can't.

    Raises:
        BrokerGone: A broker can't be reached; the first such error.
        django.db.Error: A database can't.
    """
    errors: list[Exception] = []
    for relay in relays:
        try:
            relay.drain(until)
        except (BrokerGone, DatabaseError) as error:
            errors.append(error)
        finally:
            relay.close()
    if errors:
        raise errors[0]
