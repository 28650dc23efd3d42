"""Holding messages back until a transaction commits, and publishing them then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Celery
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from kombu.exceptions import OperationalError

from .. import conf
from ..delivery.header import HEADER
from ..events import TASK_KEPT, TASK_LOST, TASK_SENT
from ..exceptions import ConfigurationError, WrongTransaction
from ..foreign_errors import describe_error, find_interruption
from ..locks import HeldLock
from ..texts import get_logger
from ..transactions import aliases_in_atomic, attempts, in_atomic
from .broker import BrokerGone, is_backend_gone, pooled_producer
from .capture import Captured, Message, capture
from .departure import Departure, OutboxBatch
from .eager import run_on_commit
from .outbox import Outbox, is_ours, keep, wants_outbox
from .publisher import Publisher, bounded_publisher, takes_lock
from .unsent import allow_get, refuse_get

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .typed import SentResult

T = TypeVar("T")

logger = get_logger(__name__)


def send_on_commit(
    signature: Signature[Any],
    *,
    using: str | None = None,
    outbox: Outbox | None = None,
    **options: Any,
) -> Any:
    """
    Send a signature or a canvas (chain, group, chord) when the transaction commits.

    All messages are made now: ids are final, arguments are frozen, and values that
    can't be sent raise here. If the transaction, or its savepoint, is rolled back,
    nothing is sent. Outside a transaction the signature is sent at once.

    Args:
        signature: The signature to send, such as ``chain(fetch.si(1), parse.si(2))``.
        using: Database alias whose commit to wait for; unset: ``"default"``.
        outbox: Whether to keep the messages in the outbox until the broker has
            them, even outside a transaction; ``"until_done"``: until their tasks have
            ended; None: as its tasks or ``OUTBOX`` say.
        options: See ``apply_async``.

    Returns:
        The result of ``apply_async``. Its ``send_error`` is None, or the error if a
        publication failed after the commit.

    Raises:
        NotSerializable: A value can't travel in a message.
        ConfigurationError: The database has no outbox.
        WrongTransaction: ``using`` is in autocommit while another database is inside
            ``atomic()``, so the send would not wait for that other database.
    """
    if not isinstance(signature, Signature):
        raise TypeError(
            f"send_on_commit got {signature!r} instead of a signature. Write task.si(...), "
            f"chain(...), group(...) or chord(...); for one task, task.delay_on_commit(...)."
        )
    app = signature.app
    canvas = type(signature) is not Signature
    if not canvas and is_ours(app, str(signature.task)):
        given = {"using": using, "outbox": outbox, "send_on_commit": True, **options}
        return cast("Any", signature).apply_async(**given)
    outbox = wants_outbox(app, signature) if outbox is None else conf.outbox(outbox)
    if not must_wait(using) and (not outbox or app.conf.task_always_eager):
        return as_sent_result(signature.apply_async(**options))
    if app.conf.task_always_eager:
        return as_sent_result(run_on_commit(signature, using, options))
    return hold(
        app,
        lambda given: signature.apply_async(**given),
        using,
        options,
        outbox=outbox,
        canvas=canvas,
    )


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
    if not in_atomic(alias):
        others = [other for other in aliases_in_atomic() if other != alias]
        if others:
            raise WrongTransaction(
                f"A task is to be sent on commit of the database {alias!r}, which has no open "
                f"transaction, while {others[0]!r} has one: it would be sent before that commits. "
                f"Pass using={others[0]!r}."
            )
    if connection.in_atomic_block:
        return True
    if not _is_autocommit(connection):
        raise WrongTransaction(
            f"A task is to be sent on commit of the database {alias!r}, whose autocommit is off "
            f"without an atomic() block: Django does not know of its commits. Use atomic(), or "
            f"send the task yourself after the commit."
        )
    return False


def _is_autocommit(connection: Any) -> bool:
    # get_autocommit() would open a closed connection, although the send needs none.
    if connection.connection is None:
        return bool(connection.settings_dict["AUTOCOMMIT"])
    return bool(connection.get_autocommit())


def hold(
    app: Celery,
    send: Callable[[dict[str, Any]], Any],
    using: str | None,
    options: dict[str, Any],
    *,
    outbox: Outbox,
    canvas: bool = False,
) -> Any:
    """
    Make the messages of ``send`` now, and publish them when ``using`` commits.

    Args:
        send: Called with the options; sends the task or canvas.
        options: The caller's options; ``producer`` and ``connection`` are kept for the
            publication.
        outbox: Whether to keep the messages in the outbox until then. Without an open
            transaction their rows are committed, and the messages published, at once.
        canvas: Whether there may be several messages, whose rows are written all or none.

    Returns:
        The result of ``send``.
    """
    options = dict(options)
    producer = _lasting_producer(app, options)
    if outbox and producer is not None:
        raise TypeError(
            f"A send through the outbox has a connection or producer to another broker, "
            f"{producer.connection.as_uri()}, which no row can keep: a relay sends through the "
            f"app's broker, {app.connection_for_write().as_uri()}. Leave it out, or outbox=False."
        )
    captured = Captured()
    result = as_sent_result(capture(app, captured, lambda: send(options)))

    def leave(outbox: Outbox) -> None:
        departure = Departure.join(using)
        kept = keep(captured, departure, outbox) if outbox else None
        if kept is not None and not was_in_atomic:
            departure.rows.trust()
        refuse_get(result, using)
        transaction.on_commit(Held(departure, app, captured, result, producer, kept), using=using)

    connection = transaction.get_connection(using)
    was_in_atomic = connection.in_atomic_block
    # The row of a single message needs no transaction: its INSERT commits by itself.
    several = canvas if was_in_atomic else len(captured.messages) > 1
    if not (outbox and several):
        leave(outbox if captured.messages else False)
        return result
    for attempt in attempts(connection.alias, "The row of a message"):
        with attempt, transaction.atomic(using=using):
            leave(outbox)
            attempt.is_won = True
    return result


@dataclass
class Held:
    """
    The captured messages of one call; the commit calls this object to publish them.

    Attributes:
        departure: The departure that all sends of that commit share.
        producer: The caller's own producer; None: one from the app's pool.
        kept: The rows of the messages in the outbox, if there are any.
        goes_on: Whether a running task continues with these messages, so that they are not
            duplicates of its own message.
    """

    departure: Departure
    app: Celery
    captured: Captured
    result: Any
    producer: Any
    kept: OutboxBatch | None
    goes_on: bool = False

    def __call__(self) -> None:
        """Publish all messages."""
        self.departure.has_begun = True
        allow_get(self.result)
        _publish_held(self)

    def timeout_error(self) -> Exception | None:
        """Return why no more messages are published at this commit; None: there is time."""
        # Messages without the outbox must be sent now, because no relay sends them later.
        if self.kept is None or time.monotonic() < self.departure.give_up_at:
            return None
        return OperationalError("OUTBOX_SEND_TIMEOUT is over for this commit; a relay sends it")

    def publisher(self, app: Celery) -> Publisher:
        """Return the publisher of an app's messages, which all sends of the commit share."""
        # By identity: two connections with the same URI may have different options.
        connection = None if self.producer is None else id(self.producer.connection)
        publishers, key = self.departure.publishers, (app, connection, self.kept is not None)
        if key not in publishers:
            publishers[key] = self._make_publisher(app)
        return publishers[key]

    def _make_publisher(self, app: Celery) -> Publisher:
        if self.kept is not None:
            departure = self.departure
            return bounded_publisher(app, departure.timeout, lambda: not departure.is_time_over)
        lend = partial(pooled_producer, app, self.producer)
        return Publisher(app, lend, prepare=partial(_subscribe_to, self.departure))


def _lasting_producer(app: Celery, options: dict[str, Any]) -> Any:
    """
    Remove the caller's producer from ``options`` and return it; None: use the app's own.

    A group passes each of its members a producer from the app's pool, which others
    may be using by the time of the commit.
    """
    producer = options.pop("producer", None) or options.pop("publisher", None)
    connection = options.pop("connection", None)
    if connection is not None:
        producer = app.amqp.Producer(connection, auto_declare=False)
    if producer is None:
        return None
    ours = app.connection_for_write().as_uri()
    return None if producer.connection.as_uri() == ours else producer


def as_sent_result(result: AsyncResult[T]) -> SentResult[T]:
    """Set ``send_error`` of a result to None, and ``is_duplicate`` to False unless it is set."""
    sent = cast("SentResult[T]", result)
    if sent is not None:
        sent.send_error = None
        sent.__dict__.setdefault("is_duplicate", False)
    return sent


def _publish_held(held: Held) -> None:
    """Publish all messages; a failure is emitted and affects neither the commit nor the rest."""
    if held.kept is None:
        _publish_all(held, [])
    elif held.kept.begin():
        sent: list[int] = []
        try:
            _publish_all(held, sent)
        finally:
            held.kept.end(sent)


def _publish_all(held: Held, sent: list[int]) -> None:
    """
    Publish the messages that can be published, and emit the outcome of each message.

    Args:
        sent: The numbers of the messages that the broker has are added to this list.

    Raises:
        SoftTimeLimitExceeded: A soft time limit of the task that commits was reached.
    """
    messages = held.captured.messages
    interruption: SoftTimeLimitExceeded | None = None
    stopped = _prepare_chords(held)
    if stopped is None and held.kept is not None and len(messages) > 1:
        stopped = _publish_together(held, sent)
    together = len(sent)
    for number, message in enumerate(messages):
        error, duplicate = None, None
        if number >= together:
            error = stopped or held.timeout_error()
            if error is None:
                error, duplicate = _publish(held, message)
            if isinstance(error, SoftTimeLimitExceeded):
                interruption = error
                if held.kept is not None:  # a relay sends the others
                    stopped = error
        if error is not None:
            _record_failure(held, message, error)
            continue
        if number >= together:
            sent.append(number)
        if held.result is not None and held.result.id == message.task_id:
            settle(held.result, message.options["headers"], duplicate)
        if duplicate is not None and held.kept is not None:
            held.kept.drop(number)
        if duplicate is None:
            interruption = _announce(held, message) or interruption
            stopped = stopped or (interruption if held.kept is not None else None)
    interruption = interruption or held.departure.interruption
    if isinstance(stopped, SoftTimeLimitExceeded):
        interruption = stopped
    if interruption is not None:
        raise interruption


def _announce(held: Held, message: Message) -> SoftTimeLimitExceeded | None:
    """Emit that a message was sent; return a soft time limit that interrupted a receiver."""
    try:
        held.publisher(message.app).announce(message)
        TASK_SENT.emit(send_on_commit, task=message.task, task_id=message.task_id, relayed=False)
    except SoftTimeLimitExceeded as limit:
        return limit
    return None


def _publish_together(held: Held, sent: list[int]) -> Exception | None:
    """Publish many messages in one request; return why no more can be published."""
    messages = held.captured.messages
    if any(one.app is not held.app or takes_lock(one) for one in messages):
        return None
    if (late := held.timeout_error()) is not None:
        return late
    in_time = takewhile(lambda _: held.timeout_error() is None, messages)
    try:
        held.publisher(held.app).publish_together(in_time, lambda _: sent.append(len(sent)))
    except BrokerGone as gone:
        return gone.error
    except SoftTimeLimitExceeded as error:
        return error
    return None


def _publish(held: Held, message: Message) -> tuple[Exception | None, HeldLock | None]:
    """Publish a message; return the error, and the lock that makes the message a duplicate."""
    try:
        is_retry = held.goes_on and bool(message.options["headers"].get("retries"))
        publisher = held.publisher(message.app)
        return None, publisher.publish(message, again=held.goes_on, begun=is_retry)
    except BrokerGone as gone:
        return gone.error, None
    except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
        return error, None


def settle(result: Any, headers: dict[str, Any], held: HeldLock | None) -> None:
    """Record on the result of a send whether its message was published or was a duplicate."""
    ours = headers.get(HEADER)
    is_marked = isinstance(ours, dict) and "duplicate" in ours  # it was published for its canvas
    result.is_duplicate = held is not None or is_marked
    if held is not None and held.holder.task_id is not None:
        result.id = held.holder.task_id


def _prepare_chords(held: Held) -> Exception | None:
    """Register chords; return the error that keeps a chord from ever completing, or None."""
    calls = held.captured.chord_calls
    if not calls:
        return None
    if (late := held.timeout_error()) is not None:
        return late
    app, faults = calls[0].app, held.departure.faults
    backend = "result backend of chords", app, held.kept is not None
    if backend in faults:
        return faults[backend]  # don't wait for this backend again
    try:
        if held.kept is not None:
            held.kept.register_chord(calls)
        else:
            for call in calls:
                call.register()
    except Exception as error:  # noqa: BLE001 - it is emitted with each message
        if is_backend_gone(app, error):
            faults[backend] = error
        return error
    return None


def _subscribe_to(departure: Departure, message: Message, producer: Any) -> None:
    """
    Subscribe to the result of a message that will be published.

    If that failed before in the same commit for this app, nothing is tried. A failure is only
    logged as a warning, because a caller that waits for a result requests it again. A soft time
    limit is raised once all messages are published.
    """
    if not message.result_wanted or message.app in departure.without_results:
        return
    outer = sys.exc_info()[1]
    backend: Any = message.app.backend
    try:
        backend.on_task_call(producer, message.task_id)
    except Exception as error:  # noqa: BLE001 - the messages must go out whatever it is
        departure.without_results.add(message.app)
        departure.interruption = find_interruption(error, outer) or departure.interruption
        logger.warning(
            "The result backend did not take a subscription, and the task is sent all the same: %s",
            describe_error(error),
        )


def _record_failure(held: Held, message: Message, error: Exception) -> None:
    if held.result is not None and held.result.send_error is None:
        held.result.send_error = error
    kept = held.kept is not None
    event = TASK_KEPT if kept else TASK_LOST
    event.emit(
        send_on_commit,
        exc_info=None if kept else error,
        task=message.task,
        task_id=message.task_id,
        error=error,
        kept=kept,
        attempts=0,
    )
