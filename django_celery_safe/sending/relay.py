"""
Sending what is left in the outbox.

A relay claims a batch of rows under a lease, publishes them, and deletes them: dying on
any line, it sends a batch again at most, and loses nothing. Any number of relays work
side by side. A broker or database that is gone costs no message an attempt; a message
that fails while the broker is there is tried again later, and set aside as dead in the
end, never in the way of others.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import (
    DEFAULT_DB_ALIAS,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    router,
)
from django.db import Error as DatabaseError
from django.db.models.functions import Now

from .. import conf
from ..concurrency.header import read_header
from ..databases import is_tested, refuse_untested
from ..exceptions import ConfigurationError, LockBackendError, describe_error
from ..locks.lock import HOST
from ..signals import emit, message_dead, task_send_failed, task_sent
from ..texts import get_logger
from ..transactions import lacks_table
from .broker import (
    connect_bounded,
    drop,
    is_backend_gone,
    is_out_of_order,
    is_timeout,
    is_unreachable,
)
from .capture import Message, announce, put
from .outbox import keeps_sent, tell_all
from .publication import is_claiming, publish_once
from .rows import AppNotLoaded, to_message

if TYPE_CHECKING:
    from ..models import OutboxMessage

logger = get_logger(__name__)

#: Rows that are claimed at a time; a relay that is killed sends as many again.
BATCH: Final = 100
#: For how long they are claimed. No message is published in the second half of that.
LEASE: Final = timedelta(seconds=60)
#: Longest wait for an answer of the broker, s.
PATIENCE: Final = 10.0
#: How often a message is tried before it is dead: about two hours, see ``models``.
ATTEMPTS: Final = 20
#: Time until a message is due again that could not be sent for another's fault, such as
#: that of a lock's store.
PUT_OFF: Final = timedelta(seconds=10)
#: The same for one on which the broker fell silent twice: if that was its fault, others go
#: out meanwhile.
PUT_BEHIND: Final = timedelta(seconds=60)
#: How often a busy relay looks for what is due from the very beginning, s.
LOOK_BACK: Final = 1.0
#: Pause when nothing is due, s.
IDLE: Final = 1.0
#: Shortest and longest pause while the broker or the database is gone, s; it doubles.
SHORTEST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
#: How a message is published: a failed attempt is the relay's to repeat.
ONCE: Final[dict[str, Any]] = {
    "retry": False,
    "timeout": PATIENCE,
    "confirm_timeout": PATIENCE,
}
#: How often a fault that lasts is logged, and a relay notes that it is there, s.
MINUTE: Final = 60.0


class BrokerGone(Exception):
    """The broker can't be reached, or is out of order; what was claimed was given back."""


class PutOff(Exception):
    """A message can't be sent now, for no fault of its own nor of the broker."""


class Claimed(NamedTuple):
    """A row that was claimed, and its message."""

    row: OutboxMessage
    message: Message

    @property
    def needs(self) -> str:
        """What has to answer right before its publication; empty: nothing."""
        headers, needed = self.message.options["headers"], []
        if self.row.chord:
            needed.append("the result backend")
        if is_claiming(headers):
            cache = read_header(headers, self.message.task).get("cache")
            needed.append(f"the store of its lock {cache or ''}")
        return " and ".join(needed)


def find_outboxes() -> list[str]:
    """
    Return the aliases of the databases that have an outbox.

    One that does not answer counts as one that has: a relay waits for it.
    """
    from ..models import OutboxMessage  # a model-free door, see __init__

    found = []
    for alias in connections:
        connection = connections[alias]
        if connection.settings_dict["TEST"].get("MIRROR"):
            continue  # a replica
        if not is_tested(alias) or not router.allow_migrate_model(alias, OutboxMessage):
            continue
        try:
            if lacks_table(alias, OutboxMessage):
                continue
            if _is_read_only(connection):
                logger.info("The outbox of %r is left alone, since it is read-only.", alias)
                continue
            found.append(alias)
        except DatabaseError:
            found.append(alias)
    return found


def _is_read_only(connection: Any) -> bool:
    """Tell whether it is a replica that takes no writes."""
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_read_only")
        return bool(cursor.fetchone()[0] == "on")


class Relay:
    """
    Sends what is due in the outbox of one database.

    Args:
        using: Alias of the database.
        attempts: How often a message is tried before it is dead.
        beside: What is to be done for that database once a minute, too. It gets the alias,
            and raises nothing that a relay is not to stop for.

    Raises:
        ConfigurationError: The database has autocommit off, so nothing would be kept.
        BackendNotSupported: It is neither PostgreSQL nor SQLite.
    """

    def __init__(
        self,
        using: str = DEFAULT_DB_ALIAS,
        *,
        attempts: int = ATTEMPTS,
        beside: Callable[[str], object] | None = None,
    ) -> None:
        refuse_untested(using, "hold an outbox")
        if not connections[using].settings_dict["AUTOCOMMIT"]:
            raise ConfigurationError(
                f"The database {using!r} has AUTOCOMMIT off, and the relay's steps would not be "
                f"committed. Give the relay an alias without it: --database=ALIAS."
            )
        self.using = using
        self._attempts = attempts
        self._beside = beside
        self._producers: dict[Celery, Any] = {}
        #: Rows of the batch that nothing was decided about yet.
        self._left: set[int] = set()
        #: Rows that were sent, and are to be deleted.
        self._sent: list[int] = []
        #: Messages that were sent, of which others are to be told.
        self._untold: list[Message] = []
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
                self.look_after()
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
        self.look_after()
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

    def look_after(self) -> None:
        """Once a minute: note that a relay is here, clear up, and do what is to be done too."""
        if time.monotonic() < self._looks_after_at:
            return
        from ..models import OutboxRelay  # a model-free door, see __init__

        relays = OutboxRelay.objects.using(self.using)
        seen = {"host": HOST, "pid": os.getpid(), "seen_at": Now()}
        if not relays.filter(pk=1).update(**seen):
            relays.bulk_create([OutboxRelay(pk=1, **seen)], ignore_conflicts=True)
        self._rows().recall()
        self._rows().prune(conf.retention("OUTBOX_RETENTION"))
        self._looks_after_at = time.monotonic() + MINUTE
        if self._beside is not None:
            self._beside(self.using)

    def close(self) -> None:
        """Close the connections to the broker."""
        for app in list(self._producers):
            self._drop(app)

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
        from ..models import OutboxMessage  # a model-free door, see __init__

        return OutboxMessage.objects.using(self.using)

    def _read(self, rows: list[OutboxMessage]) -> list[Claimed]:
        claimed: list[Claimed] = []
        strange: dict[str, list[int]] = {}
        for row in rows:
            try:
                claimed.append(Claimed(row, to_message(row)[0]))
            except AppNotLoaded as error:
                strange.setdefault(str(error), []).append(row.pk)
            except ValueError as error:
                self._fail(row, error)
        for reason, ids in strange.items():
            self._put_off(ids, reason)
        return claimed

    def _publish(self, app: Celery, claimed: list[Claimed], stop_at: float) -> None:
        # Where a message leads to is declared once for each batch: a broker that came back
        # without its memory has lost it.
        self._connect(app).connection.declared_entities.clear()
        together = [one for one in claimed if not one.needs]
        if len(together) > 1 and self._try_pipeline(app, together):
            claimed = [one for one in claimed if one.needs]
        faults: dict[str, PutOff] = {}
        put_off: dict[str, list[int]] = {}
        for one in claimed:
            if time.monotonic() > stop_at:
                break  # another relay may have them soon
            needs = one.needs
            try:
                if needs not in faults:  # else it would only wait for the same answer
                    self._publish_one(one)
                    continue
            except PutOff as error:
                faults[needs] = error
            put_off.setdefault(needs, []).append(one.row.pk)
        for needs, ids in put_off.items():
            self._put_off(ids, str(faults[needs]))

    def _try_pipeline(self, app: Celery, claimed: list[Claimed]) -> bool:
        """
        Publish many in one request, where the transport can; tell whether all went out.

        If not, nobody knows which did, so all of them are published one by one.
        """
        producer = self._connect(app)
        if not getattr(producer.connection.transport, "supports_batch_publish", False):
            return False
        try:
            with producer.batch(max_size=len(claimed)):
                for one in claimed:
                    put(one.message, producer, **ONCE)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - which message it was, and why, shows one by one
            self._drop(app)
            return False
        for one in claimed:
            self._note_sent(one)
        return True

    def _publish_one(self, one: Claimed, *, again: bool = False) -> None:
        """
        Publish a message on its own.

        Raises:
            PutOff: What it needs does not answer.
            BrokerGone: The broker can take nothing now.
        """
        app, message = one.message.app, one.message
        producer = self._connect(app)

        def publish() -> None:
            put(message, producer, **ONCE)

        try:
            self._tell_chord(one)
            # The very message may have been published before, by who died before saying so.
            held = publish_once(message.options["headers"], publish, again=True)
        except SoftTimeLimitExceeded:
            raise
        except (PutOff, LockBackendError) as error:
            raise PutOff(str(error)) from error
        except Exception as error:
            self._drop(app)
            if not is_unreachable(app, error):
                self._fail(one.row, error)
            elif is_out_of_order(error):
                raise BrokerGone(describe_error(error)) from error
            elif not again:
                self._publish_one(one, again=True)
            elif is_timeout(error):
                self._rows().filter(pk=one.row.pk).put_off(PUT_BEHIND, describe_error(error))
                self._left.discard(one.row.pk)
                raise BrokerGone(describe_error(error)) from error
            else:
                self._connect(app)  # the broker is there, before it and after it
                self._fail(one.row, error)
        else:
            self._note_sent(one, was_told=held is not None)

    def _tell_chord(self, one: Claimed) -> None:
        if not one.row.chord:
            return

        def tell(row: OutboxMessage | None, seconds: float) -> None:
            # Nothing to tell where somebody discarded the row that said it.
            tell_all([] if row is None else to_message(row)[1], seconds)

        try:
            self._rows().tell_chord(one.row.chord, tell, PATIENCE)
        except IntegrityError:
            # A backend that keeps chords in a table was told by who died before noting it.
            self._rows().filter(chord=one.row.chord).update(chord="")
        except Exception as error:
            if is_backend_gone(one.message.app, error):
                raise PutOff(
                    f"the result backend could not be told of a chord: {describe_error(error)}"
                ) from error
            raise

    def _connect(self, app: Celery) -> Any:
        """Return the relay's own producer for ``app``, connected."""
        producer: Any = self._producers.get(app)
        try:
            if producer is None:
                connection = connect_bounded(app, PATIENCE)
                producer = app.amqp.Producer(connection, auto_declare=False)
                self._producers[app] = producer
            producer.connection.default_channel  # noqa: B018 - connects
        except SoftTimeLimitExceeded:
            self._drop(app)
            raise
        except Exception as error:
            self._drop(app)
            raise BrokerGone(describe_error(error)) from error
        return producer

    def _drop(self, app: Celery) -> None:
        producer = self._producers.pop(app, None)
        if producer is not None:
            drop(producer.connection)

    def _note_sent(self, one: Claimed, *, was_told: bool = False) -> None:
        self._left.discard(one.row.pk)
        self._sent.append(one.row.pk)
        self.count += 1
        if not was_told:  # else it was a duplicate, of which publish_once has told
            self._untold.append(one.message)

    def _announce(self) -> None:
        """Tell who listens of what was sent, when that is noted: they may be slow."""
        untold, self._untold = self._untold, []
        for message in untold:
            producer = self._producers.get(message.app)
            borrow = None if producer is None else partial(nullcontext, producer)
            if not announce(message, borrow, retry=False):
                self._drop(message.app)  # one wait is enough for the events of a batch
            emit(
                task_sent,
                logger,
                logging.DEBUG,
                "Sent task %s[%s] from the outbox.",
                message.task,
                message.task_id,
                sender=Relay,
                task=message.task,
                task_id=message.task_id,
                relayed=True,
            )

    def _settle(self) -> None:
        if self._sent:
            self._rows().filter(pk__in=self._sent).settle(keep=keeps_sent())
            self._sent = []

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
        emit(
            message_dead if is_dead else task_send_failed,
            logger,
            logging.ERROR if is_dead else logging.WARNING,
            "Task %s could not be sent from the outbox, attempt %d of %d%s: %s",
            row,
            row.attempts,
            self._attempts,
            "; it is dead, see manage.py celery_outbox list" if is_dead else "",
            describe_error(error),
            sender=Relay,
            task=row.task,
            task_id=row.task_id,
            error=error,
            kept=True,
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


class Trouble:
    """
    A broker or database that is gone: for how long to wait, and when to say so.

    Args:
        using: Alias of the database with the outbox.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        #: The last one, s; 0: all is well.
        self._pause = 0.0
        self._tells_at = -math.inf

    def pause(self, error: Exception) -> float:
        """Return how long to wait now, s; tell of the error, once a minute."""
        self._pause = min(max(2 * self._pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        if time.monotonic() >= self._tells_at:
            self._tells_at = time.monotonic() + MINUTE
            what = "broker" if isinstance(error, BrokerGone) else "database"
            logger.error(
                "The %s can't be reached, so the outbox of %r waits: %s", what, self._using, error
            )
        return self._pause

    def is_over(self) -> None:
        """Tell that all is well again, if it was not."""
        if self._pause:
            logger.warning("The outbox of %r is relayed again.", self._using)
        self._pause, self._tells_at = 0.0, -math.inf
