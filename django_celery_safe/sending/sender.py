"""
The sender: a relay for the outbox rows that its own transaction wrote.

Rows are born claimed, by the one token of their transaction. After the commit the first
:class:`Send` lets the :class:`Sender` publish the messages of all of them, within
``OUTBOX_SEND_TIMEOUT``: it looks which rows were committed and are still its own, publishes their
messages, ends the rows of those that the broker has, and leaves the others to a relay. If the
process dies on any line, a relay has the rows when their time is over.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction
from kombu.exceptions import OperationalError

from .. import conf, queries
from ..events import TASK_KEPT, TASK_KEPT_TOO, TASK_SENT
from ..exceptions import CelerySafeError
from ..foreign_errors import describe_error, find_interruption
from ..locks import HeldLock
from ..texts import get_logger
from ..transactions import is_in_testcase
from .broker import BrokerGone, is_backend_gone, register_all
from .capture import Captured, Message
from .message_table import message_table
from .outbox import attempt_id_of, resend_delay, time_to_wait
from .publisher import Publisher, bounded_publisher, takes_lock
from .unsent import allow_get, settle

C = TypeVar("C")

logger = get_logger(__name__)

#: A relay takes a row this long, in s, plus ``OUTBOX_SEND_TIMEOUT`` after its INSERT: by then
#: the sender has died, or its transaction takes too long.
GRACE: Final = 5.0
#: Errors that must not escape from the commit if a row's state can't be read or written.
UNSETTLED: Final = (DatabaseError, CelerySafeError)


def last_callback(using: str | None, kind: type[C]) -> C | None:
    """Return the open transaction's last ``on_commit`` callback of a kind; None: it has none."""
    callbacks = transaction.get_connection(using).run_on_commit
    return next((one for _, one, *_ in reversed(callbacks) if isinstance(one, kind)), None)


@dataclass(eq=False)
class Send:
    """
    The messages of one call, which have rows; the commit calls this object.

    Attributes:
        sender: The sender of the open transaction.
        ids: The keys of the rows, in the order of the messages.
        result, goes_on: As for ``outbox.keep``.
        chord: The chord that is to be registered first; "": none.
        fault: Why it could not be registered, so that none of its messages is sent.
    """

    sender: Sender
    captured: Captured
    ids: Sequence[int]
    result: Any
    chord: str
    goes_on: bool
    fault: Exception | None = None

    def __call__(self) -> None:
        """Publish the messages of all calls of the transaction, if this is its first call."""
        allow_get(self.result)
        self.sender.send_all()
        self.sender.report_missing(self)


class Kept(NamedTuple):
    """A message in the outbox, and the call that sent it."""

    message: Message
    send: Send


def _is_checked_by_run(kept: Kept) -> bool:
    """Return whether a message without a row does nothing at all, because no run can claim it."""
    message = kept.message
    return bool(attempt_id_of(message)) and not (kept.send.chord or takes_lock(message))


class Sender:
    """
    Sends the outbox messages of one transaction.

    Args:
        using: Alias of its database.
        is_sure: Whether nothing can have rolled the rows back: they were committed at once.

    Attributes:
        token: The claim of its rows.
        held: How long its rows belong to it after their INSERT, s.
    """

    def __init__(self, using: str, *, is_sure: bool = False) -> None:
        self.using, self.token, self._is_sure = using, os.urandom(16).hex(), is_sure
        self.timeout = float(conf.get("OUTBOX_SEND_TIMEOUT"))
        self.held = self.timeout + GRACE
        #: From then on a relay may have its rows, and may have ended them.
        self._held_until = time.monotonic() + self.held
        #: Whether the commit has happened.
        self.has_begun = False
        #: By key. SQLite gives the key of a row that was rolled back to the next row.
        self._kept: dict[int, Kept] = {}
        #: A send that starts before this time ends before a relay takes its rows, even if its
        #: last publication takes as long as all others together.
        self._ours_until = time.monotonic() + max(0.0, GRACE - self.timeout)
        self._give_up_at = 0.0
        #: The keys of the rows that were found after the commit; None: it is not known.
        self._found: set[int] | None = set()
        #: The messages that the broker has, by their rows' keys: how many seconds later a relay
        #: sends them again; None: their row ends.
        self._sent: dict[int, float | None] = {}
        #: How many seconds other messages wait in their rows for an eta that is far away.
        self._waits: dict[int, float] = {}
        self._limit: SoftTimeLimitExceeded | None = None
        self._publishers: dict[Celery, Publisher] = {}
        self._faults: dict[Hashable, Exception] = {}
        self._told: set[str] = set()

    @classmethod
    def join(cls, using: str | None, *, is_sure: bool = False) -> Sender:
        """Return the sender of the open transaction."""
        before = last_callback(using, Send)
        alias = transaction.get_connection(using).alias
        # A test runs the callbacks of one block at a time, which is not all of its transaction.
        if before is not None and not is_in_testcase(alias):
            return before.sender
        return cls(alias, is_sure=is_sure)

    def add(
        self,
        captured: Captured,
        ids: Sequence[int],
        result: Any = None,
        chord: str = "",
        *,
        goes_on: bool = False,
    ) -> None:
        """Send the messages of a call, whose rows were just written, when they are committed."""
        send = Send(self, captured, ids, result, chord, goes_on)
        for pk, message in zip(ids, captured.messages, strict=True):
            self._kept[pk] = Kept(message, send)
        transaction.on_commit(send, using=self.using)

    def send_all(self) -> None:
        """
        Send all messages of the transaction, at the first call.

        Raises:
            SoftTimeLimitExceeded: A soft time limit of the task that commits was reached.
        """
        if self.has_begun:
            return
        self.has_begun = True
        self._give_up_at = time.monotonic() + self.timeout
        try:
            self._found = self._find()
        except UNSETTLED as error:
            self._found = None
            self._warn(
                self._kept, "could not be looked for after the commit, and wait for a relay", error
            )
            return
        ours = [pk for pk in self._kept if pk in self._found]
        try:
            for pk in ours:
                self._send(pk, self._kept[pk])
        finally:
            self._end(ours)
        if self._limit is not None:
            raise self._limit

    def report_missing(self, send: Send) -> None:
        """Warn of rows of a call that were rolled back although its callback runs."""
        if self._found is None:
            return
        missing = [
            pk for pk in send.ids if pk not in self._found or self._kept[pk].send is not send
        ]
        if not missing:
            return
        ids = {one.task_id for one in send.captured.messages}
        table = message_table(self.using)
        with suppress(*UNSETTLED):
            theirs = table.all().filter(pk__in=missing, task_id__in=ids)
            if time.monotonic() > self._held_until or theirs.exists():
                return  # a relay has or had them, because the commit came late
        logger.warning(
            "%d message(s) of %r are not sent, since their rows are not in the outbox: Django "
            "does not know that they were rolled back, such as by savepoint_rollback() or by "
            "an error of a query that was caught inside atomic(). Put a nested atomic() "
            "around what may fail.",
            len(missing),
            self.using,
        )

    def _find(self) -> set[int]:
        """Return the keys of the rows that were committed and that no relay takes meanwhile."""
        in_time = time.monotonic() < self._ours_until
        if self._is_sure or (in_time and all(map(_is_checked_by_run, self._kept.values()))):
            return set(self._kept)
        name = "find_written" if in_time else "hold_messages"
        values = {"token": self.token, "held": self.held}
        return {pk for (pk,) in queries.fetch(self.using, name, self._kept, **values)}

    def _send(self, pk: int, kept: Kept) -> None:
        """Publish a message, unless the time is over; report the outcome."""
        message, send = kept
        error: Exception | None = self._limit
        duplicate, outer = None, sys.exc_info()[1]
        wait = None if message.eta is None else time_to_wait(message)
        if error is None:
            try:
                duplicate = self._publish(message, send, now=wait is None)
            except SoftTimeLimitExceeded as limit:
                error = self._limit = limit
            except BrokerGone as gone:
                error = gone.error
            except Exception as caught:  # noqa: BLE001 - other callbacks of the commit must run
                self._limit = find_interruption(caught, outer)
                error = self._limit or caught
        if error is not None:
            self._record_failure(message, send, error)
            return
        if duplicate is None and wait is not None:
            self._waits[pk] = wait
        else:
            self._sent[pk] = resend_delay(message) if duplicate is None else None
        if send.result is not None and send.result.id == message.task_id:
            settle(send.result, message.options["headers"], duplicate)
        if duplicate is None and wait is None:
            self._announce(message)

    def _publish(self, message: Message, send: Send, *, now: bool) -> HeldLock | None:
        """Publish a message; return the lock that makes it a duplicate, or None."""
        if time.monotonic() >= self._give_up_at:
            raise OperationalError("OUTBOX_SEND_TIMEOUT is over for this commit; a relay sends it")
        if now:
            self._register_chord(send)
        is_retry = send.goes_on and bool(message.options["headers"].get("retries"))
        publisher = self._publisher(message.app)
        return publisher.publish(message, again=send.goes_on, begun=is_retry, now=now)

    def _publisher(self, app: Celery) -> Publisher:
        if app not in self._publishers:
            self._publishers[app] = bounded_publisher(
                app, self.timeout, lambda: time.monotonic() < self._give_up_at
            )
        return self._publishers[app]

    def _register_chord(self, send: Send) -> None:
        """Register the chord of a call at its result backend, before its first message."""
        calls = send.captured.chord_calls
        if not send.chord or not calls:
            return
        app = calls[0].app
        # A backend that is gone is not waited for again.
        if (fault := send.fault or self._faults.get(app)) is not None:
            raise fault
        try:
            message_table(self.using).all().register_chord(
                send.chord, lambda row, seconds: register_all(calls, seconds), self.timeout
            )
        except Exception as error:
            send.fault = error
            if is_backend_gone(app, error):
                self._faults[app] = error
            raise
        send.chord = ""

    def _announce(self, message: Message) -> None:
        try:
            self._publisher(message.app).announce(message)
            TASK_SENT.emit(Sender, task=message.task, task_id=message.task_id, relayed=False)
        except SoftTimeLimitExceeded as limit:
            self._limit = limit

    def _record_failure(self, message: Message, send: Send, error: Exception) -> None:
        if send.result is not None and send.result.send_error is None:
            send.result.send_error = error
        text = describe_error(error)
        event = TASK_KEPT_TOO if text in self._told else TASK_KEPT
        self._told.add(text)
        task, task_id = message.task, message.task_id
        event.emit(Sender, task=task, task_id=task_id, error=error, kept=True, attempts=0)

    def _end(self, ours: Iterable[int]) -> None:
        """Record which messages were sent, and leave the others to a relay."""
        table, done = message_table(self.using), self._sent.keys() | self._waits.keys()
        left = [pk for pk in ours if pk not in done]
        try:
            table.record_sent(self.token, self._sent)
            if self._waits:
                table.record_sent(self.token, self._waits, is_far=True)
            if left:
                table.give_back(self.token, left)
        except UNSETTLED as error:
            what = "stay in the outbox, so that a relay sends them, again if need be"
            self._warn(ours, what, error)

    def _warn(self, rows: Iterable[int], what: str, error: Exception) -> None:
        logger.warning(
            "%d message(s) of %r %s: %s", len(list(rows)), self.using, what, describe_error(error)
        )
