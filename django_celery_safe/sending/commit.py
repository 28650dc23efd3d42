"""Holding messages back until a transaction commits, and publishing them then."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Celery
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from .. import conf
from ..events import TASK_LOST, TASK_SENT
from ..exceptions import ConfigurationError, WrongTransaction
from ..locks import HeldLock
from ..texts import get_logger
from ..transactions import aliases_in_atomic, attempts, in_atomic
from .broker import BrokerGone, is_backend_gone, pooled_producer
from .capture import Captured, Message, capture
from .eager import run_on_commit
from .outbox import Outbox, is_ours, keep, wants_outbox
from .publisher import Publisher
from .sender import Sender, last_callback
from .unsent import allow_get, refuse_get, settle

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
    result = as_sent_result(capture(app, captured, send, options))

    def leave() -> None:
        refuse_get(result, using)
        if outbox and captured.messages:
            sender = Sender.join(using, is_sure=not was_in_atomic)
            keep(sender, captured, result, outbox)
        else:
            transaction.on_commit(Held.join(using, captured, result, producer), using=using)

    connection = transaction.get_connection(using)
    was_in_atomic = connection.in_atomic_block
    # The row of a single message needs no transaction: its INSERT commits by itself.
    several = canvas if was_in_atomic else len(captured.messages) > 1
    if not (outbox and several):
        leave()
        return result
    for attempt in attempts(connection.alias, "The row of a message"):
        with attempt, transaction.atomic(using=using):
            leave()
            attempt.is_won = True
    return result


@dataclass
class Shared:
    """
    The state that a commit's sends without rows share, so that they wait for each server once.

    Attributes:
        has_begun: Whether the commit has happened; a later send belongs to another commit.
        publishers: The publishers by broker.
        faults: Errors of result backends that did not register a chord, by app.
    """

    has_begun: bool = False
    publishers: dict[Hashable, Publisher] = field(default_factory=dict)
    faults: dict[Celery, Exception] = field(default_factory=dict)


@dataclass
class Held:
    """
    The messages of one call that have no rows; the commit calls this object to publish them.

    Attributes:
        producer: The caller's own producer; None: one from the app's pool.
    """

    shared: Shared
    captured: Captured
    result: Any
    producer: Any

    @classmethod
    def join(cls, using: str | None, captured: Captured, result: Any, producer: Any) -> Held:
        """Return the send of a call, which shares its waits with the others of the transaction."""
        before = last_callback(using, cls)
        shared = Shared() if before is None or before.shared.has_begun else before.shared
        return cls(shared, captured, result, producer)

    def __call__(self) -> None:
        """
        Publish all messages; a failure is emitted and affects neither the commit nor the rest.

        Raises:
            SoftTimeLimitExceeded: A soft time limit of the task that commits was reached.
        """
        self.shared.has_begun = True
        allow_get(self.result)
        interruption: SoftTimeLimitExceeded | None = None
        stopped = self._register_chords()
        for message in self.captured.messages:
            error, duplicate = stopped, None
            if error is None:
                error, duplicate = self._publish(message)
            if error is not None:
                interruption = error if isinstance(error, SoftTimeLimitExceeded) else interruption
                self._record_failure(message, error)
                continue
            if self.result is not None and self.result.id == message.task_id:
                settle(self.result, message.options["headers"], duplicate)
            if duplicate is None:
                interruption = self._announce(message) or interruption
        if interruption is not None:
            raise interruption

    def _publisher(self, app: Celery) -> Publisher:
        # By identity: two connections with the same URI may have different options.
        key = app, None if self.producer is None else id(self.producer.connection)
        publishers = self.shared.publishers
        if key not in publishers:
            publishers[key] = Publisher(app, partial(pooled_producer, app, self.producer))
        return publishers[key]

    def _publish(self, message: Message) -> tuple[Exception | None, HeldLock | None]:
        """Publish a message; return the error, and the lock that makes it a duplicate."""
        try:
            return None, self._publisher(message.app).publish(message)
        except BrokerGone as gone:
            return gone.error, None
        except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
            return error, None

    def _announce(self, message: Message) -> SoftTimeLimitExceeded | None:
        """Emit that a message was sent; return a soft time limit that interrupted a receiver."""
        try:
            self._publisher(message.app).announce(message)
            TASK_SENT.emit(
                send_on_commit, task=message.task, task_id=message.task_id, relayed=False
            )
        except SoftTimeLimitExceeded as limit:
            return limit
        return None

    def _register_chords(self) -> Exception | None:
        """Register chords; return the error that keeps a chord from ever completing, or None."""
        calls, faults = self.captured.chord_calls, self.shared.faults
        if not calls:
            return None
        app = calls[0].app
        if app in faults:
            return faults[app]  # don't wait for this backend again
        try:
            for call in calls:
                call.register()
        except Exception as error:  # noqa: BLE001 - it is emitted with each message
            if is_backend_gone(app, error):
                faults[app] = error
            return error
        return None

    def _record_failure(self, message: Message, error: Exception) -> None:
        if self.result is not None and self.result.send_error is None:
            self.result.send_error = error
        TASK_LOST.emit(
            send_on_commit,
            exc_info=error,
            task=message.task,
            task_id=message.task_id,
            error=error,
            kept=False,
            attempts=0,
        )


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
