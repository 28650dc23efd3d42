"""
Making a message complete without publishing it.

Celery's own code builds every message: routing, headers, stamps, serialized
body. While :func:`capture` is on, only the very last step, the producer's
``publish``, is replaced by one that keeps what it was given; :func:`publish`
does that step later. It hooks in at ``app.amqp.send_task_message``, the one
place through which every kind of send goes, on the first use for each app.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from celery import Celery, signals
from kombu.serialization import loads

from .arguments import serialize

_captured: ContextVar[list[Message] | None] = ContextVar(
    "django_celery_safe_captured", default=None
)
_installing = threading.Lock()


@dataclass(slots=True)
class Message:
    """
    A message as Celery made it, up to its publication.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        data: The serialized body; changes to the arguments no longer reach it.
        options: What else goes to ``Producer.publish``.
        event: Celery's task-sent event; None unless ``task_send_sent_event`` is on.
        result_wanted: Whether the result backend is told of the send.
    """

    app: Celery
    task: str
    task_id: str
    data: Any
    content_type: str
    content_encoding: str
    options: dict[str, Any]
    event: dict[str, Any] | None
    result_wanted: bool


def is_capturing() -> bool:
    """Tell whether messages that this context makes are kept instead of published."""
    return _captured.get() is not None


@contextmanager
def capture(app: Celery) -> Iterator[list[Message]]:
    """
    Keep every message that is sent inside, in order, in the list that is yielded.

    Nothing connects to the broker. Ids, results and argument checks are as in
    any send.
    """
    _install(app)
    messages: list[Message] = []
    token = _captured.set(messages)
    try:
        yield messages
    finally:
        _captured.reset(token)


def publish(message: Message, producer: Any = None) -> None:
    """
    Publish a captured message.

    Args:
        producer: The kombu producer to use; None takes one of the app's pool.

    Raises:
        kombu.exceptions.OperationalError: The broker can't be reached.
    """
    app, options = message.app, dict(message.options)
    headers = options["headers"]
    _renew_expiration(app, options, headers)
    with app.producer_or_acquire(producer) as own, own.connection._reraise_as_library_errors():
        if message.result_wanted:
            app.backend.on_task_call(own, message.task_id)
        own.publish(
            message.data,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            **options,
        )
        _announce(message, own, options, headers)


def _announce(message: Message, producer: Any, options: Any, headers: Any) -> None:
    """Say that the message was sent, as Celery's own sender does after its publish."""
    if signals.after_task_publish.receivers:
        body = loads(
            message.data,
            message.content_type,
            message.content_encoding,
            accept={message.content_type},
        )
        signals.after_task_publish.send(
            sender=message.task,
            body=body,
            headers=headers,
            exchange=options["exchange"],
            routing_key=options["routing_key"],
        )
    if message.event:
        exchange = options["exchange"]
        declared = options["declare"] or []
        amqp: Any = message.app.amqp
        amqp._event_dispatcher.publish(
            "task-sent",
            {
                **message.event,
                "queue": declared[0].name if declared else options["routing_key"],
                "exchange": getattr(exchange, "name", exchange),
                "routing_key": options["routing_key"],
            },
            producer,
            retry=options["retry"],
            retry_policy=options["retry_policy"],
        )


def _renew_expiration(app: Celery, options: dict[str, Any], headers: Any) -> None:
    """Count the time to live from now: it is relative, and the message has waited."""
    expires = headers.get("expires")
    if options.get("expiration") is not None and isinstance(expires, str):
        left = (datetime.fromisoformat(expires) - app.now()).total_seconds()
        options["expiration"] = max(left, 0)


def _install(app: Celery) -> None:
    amqp: Any = app.amqp
    backend: Any = app.backend
    with _installing:
        if not hasattr(amqp.send_task_message, "celery_safe"):
            amqp.send_task_message = _switched(
                amqp.send_task_message,
                lambda original, *args, **options: _keep(app, original, *args, **options),
            )
        # Backends belong to threads. Some open a connection when a task is sent,
        # and hang if their server is down; `publish` calls it instead.
        if not hasattr(backend.on_task_call, "celery_safe"):
            backend.on_task_call = _switched(backend.on_task_call, lambda *_: {})


def _switched(original: Callable[..., Any], while_capturing: Callable[..., Any]) -> Any:
    """Return a function that is ``original``, except inside :func:`capture`."""

    def switched(*args: Any, **kwargs: Any) -> Any:
        if _captured.get() is None:
            return original(*args, **kwargs)
        return while_capturing(original, *args, **kwargs)

    switched.celery_safe = True  # type: ignore[attr-defined]
    return switched


class _Kept(BaseException):
    """Leaves Celery's sender at the moment of publication; no handler for errors may see it."""

    def __init__(self, body: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.body, self.options = body, options


class _StandIn:
    """What Celery's sender gets for a producer."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def publish(self, body: Any, **options: Any) -> NoReturn:
        raise _Kept(body, options)

    def revive(self, channel: Any) -> None:
        """Nothing is connected, so nothing needs to be anew."""


def _keep(
    app: Celery,
    original: Callable[..., Any],
    producer: Any,
    name: str,
    message: Any,
    **options: Any,
) -> None:
    messages = _captured.get()
    assert messages is not None
    try:
        original(_StandIn(producer.connection), name, message, **options)
    except _Kept as kept:
        publishing = kept.options
        content_type, encoding, data = serialize(name, kept.body, publishing.pop("serializer"))
        headers = publishing["headers"]
        messages.append(
            Message(
                app=app,
                task=name,
                # Message protocol 1 has no headers; its id is the correlation id.
                task_id=headers.get("id") or publishing.get("correlation_id", ""),
                data=data,
                content_type=content_type,
                content_encoding=encoding,
                options=publishing,
                event=message[3],
                result_wanted=not headers.get("ignore_result"),
            )
        )
