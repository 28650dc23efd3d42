"""Holding messages back until a transaction commits, and letting them go then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Celery
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, transaction

from ..exceptions import WrongTransaction, describe_error
from ..locks import HeldLock
from ..signals import emit, task_send_failed, task_sent
from ..texts import get_logger
from ..transactions import aliases_in_atomic, in_atomic
from .broker import is_backend_gone, is_unreachable
from .capture import Captured, Message, capture, publish, subscribe
from .departure import Departure
from .eager import run_on_commit
from .outbox import Kept, keep, publish_kept, publish_together, wants_outbox
from .publication import is_claiming, is_marked, publish_once

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .typed import SentResult

T = TypeVar("T")

logger = get_logger(__name__)


def send_on_commit(
    signature: Signature[Any],
    *,
    using: str | None = None,
    outbox: bool | None = None,
    **options: Any,
) -> Any:
    """
    Send a signature or a canvas (chain, group, chord) when the transaction commits.

    The whole is built now, so ids are final, arguments are frozen, and what
    can't be sent raises here. Rolled back, savepoint included: nothing is sent.
    Outside a transaction it is sent at once.

    Args:
        signature: What to send, such as ``chain(fetch.si(1), parse.si(2))``.
        using: Database alias whose commit to wait for; unset: ``"default"``.
        outbox: Whether to keep its messages in the outbox until the broker has
            them, also outside a transaction; None: if one of its tasks says so, or
            ``OUTBOX``.
        options: As for ``apply_async``.

    Returns:
        What ``apply_async`` returns. Its ``send_error`` is None, or, once the
        publication failed after the commit, that error.

    Raises:
        NotSerializable: A value can't travel in a message.
        ConfigurationError: The database has no outbox.
        WrongTransaction: ``using`` is in autocommit while another database is
            inside ``atomic()``, so the send would not wait for that one.
    """
    if not isinstance(signature, Signature):
        raise TypeError(
            f"send_on_commit got {signature!r} instead of a signature. Write task.si(...), "
            f"chain(...), group(...) or chord(...); for one task, task.delay_on_commit(...)."
        )
    app = signature.app
    outbox = wants_outbox(app, signature) if outbox is None else outbox
    if not must_wait(using) and (not outbox or app.conf.task_always_eager):
        return note_result(signature.apply_async(**options))
    if app.conf.task_always_eager:
        return note_result(run_on_commit(signature, using, options))
    canvas = type(signature) is not Signature
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
    Tell whether a send has to wait for a commit of ``using``; False: send now.

    Raises:
        WrongTransaction: Which transaction was meant is not clear.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
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
    # Asking a connection that is not open would open it, for a send that needs none.
    if connection.connection is None:
        return bool(connection.settings_dict["AUTOCOMMIT"])
    return bool(connection.get_autocommit())


def hold(
    app: Celery,
    send: Callable[[dict[str, Any]], Any],
    using: str | None,
    options: dict[str, Any],
    *,
    outbox: bool,
    canvas: bool = False,
) -> Any:
    """
    Let ``send`` make its messages now, and publish them when ``using`` commits.

    Args:
        send: Sends with the options that it is given.
        options: The caller's; ``producer`` and ``connection`` are kept for the
            publication.
        outbox: Whether to keep them in the outbox until then. Without an open
            transaction they are committed, and published, at once.
        canvas: Whether they are several, of which all are kept or none.

    Returns:
        What ``send`` returned.
    """
    if outbox and (canvas or not transaction.get_connection(using).in_atomic_block):
        with transaction.atomic(using=using):
            return hold(app, send, using, options, outbox=True)
    options = dict(options)
    producer = _lasting_producer(app, options)
    if outbox and producer is not None:
        raise TypeError(
            f"A send through the outbox has a connection or producer to another broker, "
            f"{producer.connection.as_uri()}, which no row can keep: a relay sends through the "
            f"app's broker, {app.connection_for_write().as_uri()}. Leave it out, or outbox=False."
        )
    with capture(app) as captured:
        result = note_result(send(options))
    departure = Departure.join(using)
    kept = keep(captured, departure) if outbox and captured.messages else None
    held = Held(departure, app, captured, result, producer, kept)
    transaction.on_commit(held, using=using)
    return result


@dataclass
class Held:
    """
    What one call sent, until its commit, which calls this.

    Attributes:
        departure: What it has in common with the other sends of that commit.
        producer: The caller's own; None: one of the app's.
        kept: Its rows in the outbox, if it has any.
    """

    departure: Departure
    app: Celery
    captured: Captured
    result: Any
    producer: Any
    kept: Kept | None

    def __call__(self) -> None:
        """Publish all of it."""
        self.departure.has_begun = True
        if self.kept is None:
            _let_go(self)
            return
        with self.departure.spending():
            _let_go(self)

    def find_lateness(self) -> Exception | None:
        """Return why no more of it is published at this commit; None: there is time."""
        # Nobody would send later what is not in the outbox.
        return None if self.kept is None else self.departure.find_lateness()

    def find_fault(self, message: Message) -> Exception | None:
        """Return why the broker of a message is not asked again at this commit, if it is not."""
        return self.departure.faults.get(self._broker_of(message))

    def note_fault(self, message: Message, error: Exception) -> None:
        """Record that the broker of a message can't be reached: each attempt takes its time."""
        self.departure.faults.setdefault(self._broker_of(message), error)

    def _broker_of(self, message: Message) -> Hashable:
        # The outbox has connections of its own, and gives up sooner.
        uri = None if self.producer is None else self.producer.connection.as_uri()
        return "broker", message.app, uri, self.kept is not None


def _lasting_producer(app: Celery, options: dict[str, Any]) -> Any:
    """
    Take the caller's broker connection out of ``options``; None if it is the app's own.

    A group lends each of its members a producer of the app's pool, which
    belongs to others by the time of the commit.
    """
    producer = options.pop("producer", None) or options.pop("publisher", None)
    connection = options.pop("connection", None)
    if connection is not None:
        producer = app.amqp.Producer(connection, auto_declare=False)
    if producer is None:
        return None
    ours = app.connection_for_write().as_uri()
    return None if producer.connection.as_uri() == ours else producer


def note_result(result: AsyncResult[T]) -> SentResult[T]:
    """Give a result its ``send_error`` and, where nothing else has, its ``is_duplicate``."""
    noted = cast("SentResult[T]", result)
    if noted is not None:
        noted.send_error = None
        noted.__dict__.setdefault("is_duplicate", False)
    return noted


def _let_go(held: Held) -> None:
    """Publish all; a failure is emitted and recorded, and harms neither the commit nor the rest."""
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
    Publish what can be published, and emit what became of each message.

    Args:
        sent: Gets the numbers of the messages that the broker has.

    Raises:
        SoftTimeLimitExceeded: It is meant for the task that commits.
    """
    messages, together = held.captured.messages, 0
    interruption: SoftTimeLimitExceeded | None = None
    stopped = held.find_lateness() or _prepare_chords(held)
    if stopped is None and held.kept is None:
        sure = [one for one in messages if not is_claiming(one.options["headers"])]
        _subscribe(held, sure, held.captured.subscriptions)
    if stopped is None and held.kept is not None and len(messages) > 1:
        together, stopped = publish_together(messages, held.departure)
    for number, message in enumerate(messages):
        error, duplicate = None, None
        if number >= together:
            error = stopped or held.find_fault(message) or held.find_lateness()
            if error is None:
                error, duplicate = _try_publish(message, held)
            if isinstance(error, SoftTimeLimitExceeded):
                interruption = error
                if held.kept is not None:  # else nobody sends the others
                    stopped = error
        if error is not None:
            _note_failed(held, message, error)
            continue
        sent.append(number)
        if held.result is not None and held.result.id == message.task_id:
            settle(held.result, message.options["headers"], duplicate)
        if duplicate is None:
            _tell_sent(message)
    interruption = stopped if isinstance(stopped, SoftTimeLimitExceeded) else interruption
    if interruption is not None:
        raise interruption


def _try_publish(message: Message, held: Held) -> tuple[Exception | None, HeldLock | None]:
    """Publish a message; return why that failed, and the lock that makes it a duplicate."""
    try:
        return None, _publish(message, held)
    except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
        if is_unreachable(message.app, error):
            held.note_fault(message, error)
        return error, None


def _publish(message: Message, held: Held) -> HeldLock | None:
    headers = message.options["headers"]

    def publish_now() -> None:
        if held.kept is not None:
            publish_kept(message)
            return
        if is_claiming(headers):
            _subscribe(held, [message])
        publish(message, held.producer)

    return publish_once(headers, publish_now)


def settle(result: Any, headers: dict[str, Any], held: HeldLock | None) -> None:
    """Note on the result of a send what became of its message: published, or a duplicate."""
    result.is_duplicate = held is not None or is_marked(headers)
    if held is not None and held.holder.task_id is not None:
        result.id = held.holder.task_id


def _tell_sent(message: Message) -> None:
    emit(
        task_sent,
        logger,
        logging.DEBUG,
        "Sent task %s[%s] on commit.",
        message.task,
        message.task_id,
        sender=send_on_commit,
        task=message.task,
        task_id=message.task_id,
        relayed=False,
    )


def _prepare_chords(held: Held) -> Exception | None:
    """Return why a chord could never complete; None if the result backend knows all it must."""
    calls = held.captured.chord_calls
    if not calls:
        return None
    app, faults = calls[0].app, held.departure.faults
    backend = "result backend of chords", app, held.kept is not None
    if backend in faults:
        return faults[backend]  # nobody waits for it again
    try:
        if held.kept is not None:
            held.kept.tell_chord(calls)
        else:
            for call in calls:
                call.tell()
    except Exception as error:  # noqa: BLE001 - it is emitted with each message
        if is_backend_gone(app, error):
            faults[backend] = error
        return error
    return None


def _subscribe(held: Held, messages: Sequence[Message], calls: Sequence[Any] = ()) -> None:
    """Let this process hear of results, unless the result backend did not answer a moment ago."""
    backend = "result backend", held.app
    if backend in held.departure.faults:
        return
    error = subscribe(messages, calls, held.producer)
    if error is not None:
        held.departure.faults[backend] = error


def _note_failed(held: Held, message: Message, error: Exception) -> None:
    if held.result is not None and held.result.send_error is None:
        held.result.send_error = error
    _tell_failed(message, error, held.kept is not None)


def _tell_failed(message: Message, error: Exception, kept: bool) -> None:
    what = (
        "Task %s[%s] could not be sent after its transaction committed, and is lost: %s"
        if not kept
        else "Task %s[%s] could not be sent right after its commit; the outbox keeps it: %s"
    )
    emit(
        task_send_failed,
        logger,
        logging.WARNING if kept else logging.ERROR,
        what,
        message.task,
        message.task_id,
        describe_error(error),
        sender=send_on_commit,
        exc_info=None if kept else error,
        task=message.task,
        task_id=message.task_id,
        error=error,
        kept=kept,
    )
