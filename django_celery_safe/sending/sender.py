"""
Sending the messages of one transaction right after its commit.

The commit calls a :class:`Send` for each call that sent something. Those without rows go out at
that place, and are lost if the broker does not take them; see :class:`Sender`. Those with rows go
out together at the first of these calls; see :class:`OutboxSender`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, Self

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction
from kombu.exceptions import OperationalError

from .. import conf, queries
from ..events import TASK_KEPT, TASK_KEPT_TOO, TASK_LOST, TASK_SENT
from ..exceptions import CelerySafeError, find_soft_time_limit
from ..locks import HeldLock
from ..texts import describe_error, get_logger
from ..transactions import is_in_testcase
from .broker import BrokerGone
from .capture import Message
from .deduplicate import settle
from .message_table import NOT_REACHED, Next, message_table
from .outbox import resend_delay, time_to_wait
from .publisher import Publisher, takes_lock
from .typed import allow_get

logger = get_logger(__name__)

#: A relay takes a row this long, in s, plus ``OUTBOX_SEND_TIMEOUT`` after its INSERT: by then
#: the sender has died, or its transaction takes too long.
GRACE: Final = 5.0
#: Errors that must not escape from the commit if a row's state can't be read or written.
UNSETTLED: Final = (DatabaseError, CelerySafeError)


@dataclass(eq=False)
class Send:
    """
    The messages of one call; the commit calls this object.

    Attributes:
        sender: The sender of the open transaction.
        result: The result of the call; None: it has none.
        ids: The keys of the rows, in the order of the messages; empty: there are none.
        goes_on: As for ``outbox.keep``.
    """

    sender: Sender
    messages: Sequence[Message]
    result: Any = None
    ids: Sequence[int] = ()
    goes_on: bool = False

    def __call__(self) -> None:
        """
        Send the messages; a failure affects neither the commit nor its other callbacks.

        Raises:
            SoftTimeLimitExceeded: A soft time limit of the task that commits was reached.
        """
        if self.result is not None:
            allow_get(self.result)
        self.sender.send(self)


class Sender:
    """
    Sends what one transaction has sent without rows.

    All calls share it, so they wait only once for a broker that is gone.

    Args:
        using: Alias of the database.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        #: The messages that have rows, by their keys. SQLite gives the key of a row that was rolled
        #: back to the next row.
        self._kept: dict[int, tuple[Send, Message]] = {}
        self._limit: SoftTimeLimitExceeded | None = None
        self._publishers: dict[Celery, Publisher] = {}

    @classmethod
    def join(cls, using: str | None) -> Self:
        """Return the sender of this kind of the open transaction."""
        connection = transaction.get_connection(using)
        for _, send, *_ in reversed(connection.run_on_commit):
            if isinstance(send, Send) and type(send.sender) is cls:
                # A test runs the callbacks of one block at a time, and not all of its transaction.
                if is_in_testcase(connection.alias):
                    break
                return send.sender
        return cls(connection.alias)

    def add(self, messages: Sequence[Message], result: Any = None, **facts: Any) -> None:
        """Send the messages of a call when the open transaction commits; see :class:`Send`."""
        send = Send(self, messages, result, **facts)
        rows = zip(send.ids, messages, strict=False)
        self._kept |= {pk: (send, message) for pk, message in rows}
        transaction.on_commit(send, using=self.using)

    def send(self, send: Send) -> None:
        """Send the messages of a call."""
        for message in send.messages:
            if self._send(send, message):
                self._announce(message)
        if self._limit is not None:
            raise self._limit

    def _send(self, send: Send, message: Message, *, now: bool = True) -> bool | None:
        """
        Publish a message, and report what became of it.

        Args:
            now: Whether the broker gets it; otherwise it only takes its lock.

        Returns:
            True: it was published. False: it is a duplicate. None: it could not be published.
        """
        outer = sys.exc_info()[1]
        try:
            duplicate = self._publish(send, message, now=now)
        except BrokerGone as gone:
            self._record_failure(send, message, gone.error)
            return None
        except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
            limit = find_soft_time_limit(error, outer)
            self._limit = limit or self._limit
            self._record_failure(send, message, limit or error)
            return None
        if send.result is not None and send.result.id == message.task_id:
            settle(send.result, message.options["headers"], duplicate)
        return duplicate is None

    def _publish(self, send: Send, message: Message, *, now: bool) -> HeldLock | None:
        """Publish a message; return the lock that makes it a duplicate, or None."""
        is_retry = send.goes_on and bool(message.options["headers"].get("retries"))
        if message.app not in self._publishers:
            self._publishers[message.app] = self._make_publisher(message.app)
        publisher = self._publishers[message.app]
        return publisher.publish(message, again=send.goes_on, begun=is_retry, now=now)

    def _make_publisher(self, app: Celery) -> Publisher:
        return Publisher(app)

    def _announce(self, message: Message) -> None:
        try:
            self._publishers[message.app].announce(message)
            TASK_SENT.emit(Sender, task=message.task, task_id=message.task_id, relayed=False)
        except SoftTimeLimitExceeded as limit:
            self._limit = limit

    def _record_failure(self, send: Send, message: Message, error: Exception) -> None:
        if send.result is not None and send.result.send_error is None:
            send.result.send_error = error
        self._emit_failure(message, error)

    def _emit_failure(self, message: Message, error: Exception) -> None:
        facts: dict[str, Any] = {"task": message.task, "task_id": message.task_id, "error": error}
        TASK_LOST.emit(Sender, exc_info=error, kept=False, attempts=0, **facts)


class OutboxSender(Sender):
    """
    A relay for the outbox rows that its own transaction wrote.

    The rows are born claimed, by the one token of their transaction. After the commit their
    messages are published within ``OUTBOX_SEND_TIMEOUT``: the sender looks which rows were
    committed and are still its own, publishes their messages, ends the rows of those that the
    broker has, and leaves the others to a relay. If the process dies on any line, a relay has the
    rows when their time is over.

    Attributes:
        is_sure: Whether nothing can have rolled the rows back: they were committed at once.
        token: The claim of the rows.
        held: How long the rows belong to it after their INSERT, s.
    """

    is_sure = False

    def __init__(self, using: str) -> None:
        super().__init__(using)
        self.token = os.urandom(16).hex()
        self._timeout = float(conf.get("OUTBOX_SEND_TIMEOUT"))
        self.held = self._timeout + GRACE
        #: A send that starts before this time ends before a relay takes its rows, even if its
        #: last publication takes as long as all others together.
        self._ours_until = time.monotonic() + max(0.0, GRACE - self._timeout)
        #: When the sends of the commit have had their time; 0: they have not begun.
        self._give_up_at = 0.0
        #: The errors that were reported for a message of the commit.
        self._reported: set[str] = set()

    def send(self, send: Send) -> None:
        """Send all messages of the transaction, at the first call."""
        if self._give_up_at:
            return
        self._give_up_at = time.monotonic() + self._timeout
        try:
            ours = self._find()
        except UNSETTLED as error:
            what = "could not be looked for after the commit, and wait for a relay"
            self._warn(self._kept, what, error)
            return
        outcomes = dict.fromkeys(ours, NOT_REACHED)
        try:
            for pk, (each, message) in self._kept.items():
                if pk in ours:
                    self._send_kept(pk, each, message, outcomes)
        finally:
            self._end(outcomes)
        if self._limit is not None:
            raise self._limit

    def _find(self) -> set[int]:
        """Return the keys of the rows that were committed and that no relay takes meanwhile."""
        in_time = time.monotonic() < self._ours_until
        checked = (_is_checked_by_run(message) for _, message in self._kept.values())
        if self.is_sure or (in_time and all(checked)):
            return set(self._kept)
        name = "find_written" if in_time else "hold_messages"
        values = {"token": self.token, "held": self.held}
        return {pk for (pk,) in queries.fetch(self.using, name, [*self._kept], **values)}

    def _send_kept(self, pk: int, send: Send, message: Message, outcomes: dict[int, Next]) -> None:
        """Publish a message unless its eta is far away; set what its row is to say."""
        wait = None if message.eta is None else time_to_wait(message)
        is_sent = self._send(send, message, now=wait is None)
        if is_sent and wait is not None:
            outcomes[pk] = Next(wait, "await_eta")
        elif is_sent is not None:
            outcomes[pk] = Next(resend_delay(message) if is_sent and message.attempt else None)
        if is_sent and wait is None:
            self._announce(message)

    def _publish(self, send: Send, message: Message, *, now: bool) -> HeldLock | None:
        if self._limit is not None:
            raise self._limit
        if not self._has_time():
            raise OperationalError("OUTBOX_SEND_TIMEOUT is over for this commit; a relay sends it")
        return super()._publish(send, message, now=now)

    def _make_publisher(self, app: Celery) -> Publisher:
        return Publisher(app, self._timeout, has_time=self._has_time)

    def _has_time(self) -> bool:
        return time.monotonic() < self._give_up_at

    def _emit_failure(self, message: Message, error: Exception) -> None:
        text = describe_error(error)
        event = TASK_KEPT_TOO if text in self._reported else TASK_KEPT
        self._reported.add(text)
        facts: dict[str, Any] = {"task": message.task, "task_id": message.task_id, "error": error}
        event.emit(Sender, kept=True, attempts=0, **facts)

    def _end(self, outcomes: dict[int, Next]) -> None:
        """Record which messages were sent, and leave the others to a relay."""
        try:
            message_table(self.using).record_sent(self.token, outcomes)
        except UNSETTLED as error:
            what = "stay in the outbox, so that a relay sends them, again if need be"
            self._warn(outcomes, what, error)

    def _warn(self, rows: Sized, what: str, error: Exception) -> None:
        said = describe_error(error)
        logger.warning("%d message(s) of %r %s: %s", len(rows), self.using, what, said)


def _is_checked_by_run(message: Message) -> bool:
    """Return whether a message without a row does nothing at all, because no run can claim it."""
    return bool(message.attempt) and not takes_lock(message)
