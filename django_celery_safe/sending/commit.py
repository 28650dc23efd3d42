"""
Holding messages back until a transaction commits, and publishing them then.

The commit calls a :class:`Send` for each call that sent something. Those without rows go out at
that place, and are lost if the broker does not take them; see :class:`Sender`. Those with rows go
out together at the first of these calls; see :class:`OutboxSender`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db import Error as DatabaseError
from kombu.exceptions import OperationalError

from .. import conf, queries
from ..events import TASK_KEPT, TASK_KEPT_TOO, TASK_LOST, TASK_SENT
from ..exceptions import CelerySafeError, ConfigurationError, WrongTransaction, find_soft_time_limit
from ..locks import HeldLock
from ..texts import describe_error, get_logger
from ..transactions import Attempts, aliases_in_atomic, is_in_testcase, is_transaction_open
from .capture import Message, capture
from .deduplicate import settle
from .outbox import (
    NOT_REACHED,
    Next,
    Outbox,
    message_table,
    resend_delay,
    rewrite,
    time_to_wait,
    write,
)
from .publisher import BrokerGone, Publisher, takes_lock

logger = get_logger(__name__)

#: A relay takes a row this long, in s, plus ``OUTBOX_SEND_TIMEOUT`` after its INSERT: by then
#: the sender has died, or its transaction takes too long.
GRACE: Final = 5.0
#: Errors that must not escape from the commit if a row's state can't be read or written.
UNSETTLED: Final = (DatabaseError, CelerySafeError)


def must_wait(using: str | None) -> bool:
    """
    Return whether a send has to wait for a commit of ``using``; False: send now.

    Raises:
        WrongTransaction: It is not clear which transaction was meant.
        ConfigurationError: DATABASES has no such alias.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
    if alias not in connections:
        known = ", ".join(map(repr, connections))
        raise ConfigurationError(
            f"using={using!r} names a database that DATABASES does not have. It has: {known}."
            f"{conf.did_you_mean(alias, connections)}"
        )
    connection = transaction.get_connection(alias)
    is_open = is_transaction_open(connection)
    if not is_open and (others := [other for other in aliases_in_atomic() if other != alias]):
        raise WrongTransaction(
            f"A task is to be sent on commit of the database {alias!r}, which has no open "
            f"transaction, while {others[0]!r} has one: it would be sent before that commits. "
            f"Pass using={others[0]!r}."
        )
    if is_open and not connection.in_atomic_block:
        raise WrongTransaction(
            f"A task is to be sent on commit of the database {alias!r}, whose autocommit is off "
            f"without an atomic() block: Django does not know of its commits. Use atomic(), or "
            f"send the task yourself after the commit."
        )
    return bool(connection.in_atomic_block)


def send_or_hold(
    app: Celery,
    send: Callable[..., Any],
    using: str | None,
    options: dict[str, Any],
    *,
    outbox: Outbox,
) -> Any:
    """
    Send now, or make the messages now, and publish them when ``using`` commits.

    Args:
        send: Called with the options; sends the task or canvas.
        options: The caller's options.
        outbox: Whether to keep the messages in the outbox until then. Without an open
            transaction their rows are committed, and the messages published, at once.

    Returns:
        The result of ``send``.

    Raises:
        TypeError: The options have a connection or producer to another broker.
        WrongTransaction, ConfigurationError: See :func:`must_wait`.
    """
    if not must_wait(using) and not outbox:
        return send(**options)
    return hold(app, send, using, options, outbox)


def hold(
    app: Celery,
    send: Callable[..., Any],
    using: str | None,
    options: dict[str, Any],
    outbox: Outbox,
) -> Any:
    """Make the messages of ``send`` now, and publish them later; see :func:`send_or_hold`."""
    options = dict(options)
    refuse_other_broker(app, options)
    messages = list[Message]()
    result = capture(app, messages, partial(send, **options))

    def leave() -> None:
        if result is not None:
            refuse_get(result, using)
        if outbox and messages:
            sender = OutboxSender.join(using)
            sender.is_sure = not was_in_atomic
            sender.keep(messages, result, outbox)
        else:
            Sender.join(using).add(messages, result)

    connection = transaction.get_connection(using)
    was_in_atomic = connection.in_atomic_block
    # The row of a single message needs no transaction: its INSERT commits by itself.
    if not outbox or was_in_atomic or len(messages) < 2:
        leave()
        return result
    for attempt in Attempts(connection.alias, "The row of a message"):
        with attempt, transaction.atomic(using=using):
            leave()
            attempt.is_won = True
    return result


def refuse_other_broker(app: Celery, options: dict[str, Any]) -> None:
    """
    Remove the caller's producer or connection from ``options``.

    A group passes each of its members a producer from the app's pool, which others
    may be using by the time of the commit.

    Raises:
        TypeError: It leads to another broker than the app's.
    """
    given = options.pop("producer", None) or options.pop("publisher", None)
    connection = options.pop("connection", None) or getattr(given, "connection", None)
    if connection is None:
        return
    own = app.connection_for_write()
    theirs, ours = connection.as_uri(), own.as_uri()
    # Of several hosts, a connection of the pool may have gone on to another.
    if theirs != ours and not (own.alt and connection.alt == own.alt):
        raise TypeError(
            f"A send on commit, or through the outbox, has a connection or producer to another "
            f"broker, {theirs}: it goes through the app's broker, {ours}. Leave it out, or send "
            f"the task yourself in transaction.on_commit(), with outbox=False."
        )


def refuse_get(result: Any, using: str | None) -> None:
    """Let ``get()`` of a result, and of its parts, raise inside the transaction, until its end."""
    for part in _parts(result):
        part.get = partial(_get, part, using)


def allow_get(result: Any) -> None:
    """Let ``get()`` be Celery's own: the transaction has committed."""
    for part in _parts(result):
        part.__dict__.pop("get", None)


def _get(result: Any, using: str | None, *args: Any, **kwargs: Any) -> Any:
    connection = transaction.get_connection(using)
    if connection.in_atomic_block:
        raise WrongTransaction(
            f"get() of the result {result.id} is called inside the transaction of "
            f"{connection.alias!r} whose commit the task waits for, so it would never return. "
            f"Call it after the block, or send the task with send_on_commit=False."
        )
    return type(result).get(result, *args, **kwargs)


def _parts(result: Any) -> Iterator[Any]:
    """Yield a result, the members of a group, and the results that come before it in a chain."""
    while result is not None:
        yield result
        for member in getattr(result, "results", None) or ():
            yield from _parts(member)
        result = result.parent


@dataclass(eq=False)
class Send:
    """
    The messages of one call; the commit calls this object.

    Attributes:
        sender: The sender of the open transaction.
        result: The result of the call; None: it has none.
        ids: The keys of the rows, in the order of the messages; empty: there are none.
        goes_on: Whether a running task continues with these messages, so that they are not
            duplicates of its own message.
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
        #: How long they may take; see :class:`Publisher`.
        self._bounds: dict[str, Any] = {}

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
            self._publishers[message.app] = Publisher(message.app, **self._bounds)
        publisher = self._publishers[message.app]
        return publisher.publish(message, again=send.goes_on, begun=is_retry, now=now)

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

    def keep(
        self,
        messages: Sequence[Message],
        result: Any = None,
        outbox: Outbox = True,
        *,
        goes_on: bool = False,
    ) -> None:
        """Write the messages of a call to the outbox, and send them after the commit."""
        ids = write(self.using, messages, outbox, token=self.token, held=self.held)
        self.add(messages, result, ids=ids, goes_on=goes_on)

    def rewrite(self, message: Message, name: str, token: str, *, other_work: bool) -> bool:
        """
        Write the message with which a carried task continues into its row, and send it.

        Args:
            name: The attempt that the row is for.
            token: The token of the run's claim.
            other_work: Whether the message is for other work, so that a result that this task was
                finished with does not count for it.

        Returns:
            Whether the claim still held the row.
        """
        values = {"name": name, "token": token, "result": "" if other_work else None}
        pk = rewrite(self.using, message, sender=self.token, held=self.held, **values)
        if pk is not None:
            self.add([message], ids=[pk], goes_on=True)
        return pk is not None

    def send(self, send: Send) -> None:
        """Send all messages of the transaction, at the first call."""
        if self._give_up_at:
            return
        self._give_up_at = time.monotonic() + self._timeout
        self._bounds = {"seconds": self._timeout, "until": self._give_up_at}
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
            self._kept.clear()  # otherwise all this would wait for the garbage collector
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
        if time.monotonic() >= self._give_up_at:
            raise OperationalError("OUTBOX_SEND_TIMEOUT is over for this commit; a relay sends it")
        return super()._publish(send, message, now=now)

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
