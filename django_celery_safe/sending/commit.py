"""Holding messages back until a transaction commits, and letting them go then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.canvas import Signature
from django.db import DEFAULT_DB_ALIAS, transaction
from kombu.exceptions import OperationalError

from ..exceptions import WrongTransaction
from ..signals import emit, task_send_failed, task_sent
from ..transactions import aliases_in_atomic, in_atomic
from .capture import Captured, Message, capture, publish, subscribe
from .eager import run_on_commit

logger = logging.getLogger(__name__)


def send_on_commit(signature: Signature[Any], *, using: str | None = None, **options: Any) -> Any:
    """
    Send a signature or a canvas (chain, group, chord) when the transaction commits.

    The whole is built now, so ids are final, arguments are frozen, and what
    can't be sent raises here. Rolled back, savepoint included: nothing is sent.
    Outside a transaction it is sent at once.

    Args:
        signature: What to send, such as ``chain(fetch.si(1), parse.si(2))``.
        using: Database alias whose commit to wait for; unset: ``"default"``.
        options: As for ``apply_async``.

    Returns:
        What ``apply_async`` returns. Its ``send_error`` is None, or, once the
        publication failed after the commit, that error.

    Raises:
        NotSerializable: A value can't travel in a message.
        WrongTransaction: ``using`` is in autocommit while another database is
            inside ``atomic()``, so the send would not wait for that one.
    """
    if not isinstance(signature, Signature):
        raise TypeError(
            f"send_on_commit got {signature!r} instead of a signature. Write task.si(...), "
            f"chain(...), group(...) or chord(...); for one task, task.delay_on_commit(...)."
        )
    app = signature.app
    if not must_wait(using):
        return note_result(signature.apply_async(**options))
    if app.conf.task_always_eager:
        return note_result(run_on_commit(signature, using, options))
    return hold(app, lambda given: signature.apply_async(**given), using, options)


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
) -> Any:
    """
    Let ``send`` make its messages now, and publish them when ``using`` commits.

    Args:
        send: Sends with the options that it is given.
        options: The caller's; ``producer`` and ``connection`` are kept for the
            publication.

    Returns:
        What ``send`` returned.
    """
    options = dict(options)
    producer = _lasting_producer(app, options)
    with capture(app) as captured:
        result = note_result(send(options))
    transaction.on_commit(lambda: _let_go(captured, result, producer), using=using)
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
        return app.amqp.Producer(connection, auto_declare=False)
    if producer is None:
        return None
    ours = app.connection_for_write().as_uri()
    return None if producer.connection.as_uri() == ours else producer


def note_result(result: Any) -> Any:
    """Give a result its ``send_error``."""
    if result is not None:
        result.send_error = None
    return result


def _let_go(captured: Captured, result: Any, producer: Any) -> None:
    """Publish all; whatever fails is told and kept, and leaves neither the commit nor the rest."""
    hopeless = _prepare_chords(captured)
    if hopeless is None:
        subscribe(captured, producer)
    for message in captured.messages:
        try:
            if hopeless is not None:
                raise hopeless
            publish(message, producer)
        except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
            if _is_unreachable(message.app, error):
                # Each attempt at a broker that is gone takes its retries' time.
                hopeless = error
            if result is not None and result.send_error is None:
                result.send_error = error
            _tell_failed(message, error)
        else:
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
            )


def _prepare_chords(captured: Captured) -> Exception | None:
    """Return why a chord could never complete; None if the result backend knows all it must."""
    try:
        for call in captured.chord_calls:
            call()
    except Exception as error:  # noqa: BLE001 - it is told with each message
        return error
    return None


def _is_unreachable(app: Celery, error: Exception) -> bool:
    """Tell whether the broker is gone, rather than refusing this one message."""
    if not isinstance(error, OperationalError):
        return False
    return not isinstance(error.__cause__, app.connection_for_write().channel_errors)


def _tell_failed(message: Message, error: Exception) -> None:
    emit(
        task_send_failed,
        logger,
        logging.ERROR,
        "Task %s[%s] could not be sent after its transaction committed, and is lost: %s",
        message.task,
        message.task_id,
        error,
        sender=send_on_commit,
        exc_info=error,
        task=message.task,
        task_id=message.task_id,
        error=error,
    )
