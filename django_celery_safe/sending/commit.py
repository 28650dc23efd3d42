"""Holding messages back until a transaction commits, and letting them go then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Celery
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, transaction

from ..exceptions import WrongTransaction, describe_error
from ..locks import HeldLock
from ..signals import emit, task_send_failed, task_sent
from ..transactions import aliases_in_atomic, in_atomic
from .broker import is_unreachable
from .capture import Captured, Message, capture, publish, subscribe
from .eager import run_on_commit
from .outbox import Kept, keep, publish_kept, publish_together, wants_outbox
from .publication import is_claiming, is_marked, publish_once

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .typed import SentResult

T = TypeVar("T")

logger = logging.getLogger(__name__)


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
            "A send through the outbox has a connection or producer of its own, which no row can "
            "keep: a relay sends what is left through the app's broker. Leave it out, or "
            "outbox=False."
        )
    with capture(app) as captured:
        result = note_result(send(options))
    kept = keep(captured, using) if outbox and captured.messages else None
    transaction.on_commit(lambda: _let_go(captured, result, producer, kept), using=using)
    return result


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


def _let_go(captured: Captured, result: Any, producer: Any, kept: Kept | None) -> None:
    """Publish all; whatever fails is told and kept, and leaves neither the commit nor the rest."""
    if kept is not None and not kept.begin():
        return
    hopeless = _prepare_chords(captured, kept)
    if hopeless is None and kept is None:
        sure = [one for one in captured.messages if not is_claiming(one.options["headers"])]
        subscribe(sure, captured.subscriptions, producer)
    done, interruption, together = [], None, 0
    try:
        if kept is not None and hopeless is None and len(captured.messages) > 1:
            together, hopeless = publish_together(captured.messages, kept)
        for number, message in enumerate(captured.messages):
            held = None
            if kept is not None and number >= together:
                hopeless = hopeless or interruption or kept.find_lateness()
            try:
                if number >= together:
                    if hopeless is not None:
                        raise hopeless
                    held = _publish(message, producer, kept)
                done.append(number)
                if result is not None and result.id == message.task_id:
                    settle(result, message.options["headers"], held)
            except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
                if isinstance(error, SoftTimeLimitExceeded):
                    interruption = error
                elif is_unreachable(message.app, error):
                    # Each attempt at a broker that is gone takes its retries' time.
                    hopeless = error
                if result is not None and result.send_error is None:
                    result.send_error = error
                _tell_failed(message, error, kept is not None)
            else:
                if held is None:
                    _tell_sent(message)
    finally:
        if kept is not None:
            kept.end(done)
    if interruption is not None:
        raise interruption  # it is meant for the task that commits


def _publish(message: Message, producer: Any, kept: Kept | None) -> HeldLock | None:
    headers = message.options["headers"]

    def publish_now() -> None:
        if kept is not None:
            publish_kept(message)
            return
        if is_claiming(headers):
            subscribe([message], producer=producer)
        publish(message, producer)

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


def _prepare_chords(captured: Captured, kept: Kept | None) -> Exception | None:
    """Return why a chord could never complete; None if the result backend knows all it must."""
    try:
        if kept is not None:
            kept.tell_chord(captured.chord_calls)
            return None
        for call in captured.chord_calls:
            call.tell()
    except Exception as error:  # noqa: BLE001 - it is told with each message
        return error
    return None


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
