"""
Making a message complete without publishing it.

Celery's own code builds every message: routing, headers, stamps, serialized
body. While :func:`capture` is on, only the very last step, the producer's
``publish``, is replaced by one that keeps what it was given; :func:`publish`
does that step later. It hooks in at ``app.amqp.send_task_message``, the one
place through which every kind of send goes, on the first use for each app. What
Celery wants of the result backend meanwhile is put off in the same way.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from celery import Celery, signals
from celery.backends.base import Backend
from kombu.serialization import loads

from ..exceptions import describe_error
from .arguments import serialize

logger = logging.getLogger(__name__)

_captured: ContextVar[Captured | None] = ContextVar("django_celery_safe_captured", default=None)
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


@dataclass(slots=True)
class Captured:
    """
    All that was sent inside :func:`capture`, in order.

    Attributes:
        messages: What has to be published.
        chord_calls: What the result backend has to know before that, so that it
            can tell when a chord is complete.
        subscriptions: Calls that let this process hear of results.
    """

    messages: list[Message] = field(default_factory=list)
    chord_calls: list[Callable[[], Any]] = field(default_factory=list)
    subscriptions: list[Callable[[], Any]] = field(default_factory=list)


def is_capturing() -> bool:
    """Tell whether messages that this context makes are kept instead of published."""
    return _captured.get() is not None


@contextmanager
def capture(app: Celery) -> Iterator[Captured]:
    """
    Keep every message that is sent inside, in order, in what is yielded.

    Nothing connects to the broker or the result backend. Ids, results and
    argument checks are as in any send.
    """
    _install(app)
    captured = Captured()
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


def subscribe(captured: Captured, producer: Any = None) -> None:
    """
    Let this process hear of the results of what will be published.

    A result backend that does not answer costs only that, with a warning: who
    waits for a result asks for it again.
    """
    try:
        for call in captured.subscriptions:
            call()
        for message in captured.messages:
            if message.result_wanted:
                with message.app.producer_or_acquire(producer) as own:
                    message.app.backend.on_task_call(own, message.task_id)
    except Exception as error:  # noqa: BLE001 - the messages must go out whatever it is
        logger.warning(
            "The result backend could not be told of a task to be sent on commit, which is sent "
            "nevertheless: %s",
            describe_error(error),
        )


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
    backend: Any = app.backend
    with _installing:
        _switch(app.amqp, "send_task_message", functools.partial(_keep, app))
        # Backends belong to threads. Some open a connection when a task is sent or
        # a group's result is made, and hang if their server is down.
        _switch(backend, "on_task_call", lambda *_: None)  # `subscribe` does it
        _switch(backend, "set_chord_size", _put_off_chord_call)
        _switch(backend, "apply_chord", _apply_chord)
        if (consumer := getattr(backend, "result_consumer", None)) is not None:
            _switch(consumer, "consume_from", _put_off_subscription)


def _switch(owner: Any, name: str, while_capturing: Callable[..., Any]) -> None:
    """
    Replace a method, on first use, by one that does something else inside :func:`capture`.

    Args:
        while_capturing: Gets the original first, then what the method gets.
    """
    original = getattr(owner, name)
    if hasattr(original, "celery_safe"):
        return

    def switched(*args: Any, **kwargs: Any) -> Any:
        if _captured.get() is None:
            return original(*args, **kwargs)
        return while_capturing(original, *args, **kwargs)

    switched.celery_safe = True  # type: ignore[attr-defined]
    setattr(owner, name, switched)


def _current() -> Captured:
    captured = _captured.get()
    assert captured is not None
    return captured


def _put_off_chord_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _current().chord_calls.append(functools.partial(original, *args, **kwargs))


def _put_off_subscription(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _current().subscriptions.append(functools.partial(original, *args, **kwargs))


def _apply_chord(original: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(original, "__func__", None) is Backend.apply_chord:
        # It refuses a chord without result backend, or sends the task that asks
        # again and again whether the chord is complete, which is captured.
        original(*args, **kwargs)
    else:
        _put_off_chord_call(original, *args, **kwargs)


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
    try:
        original(_StandIn(producer.connection), name, message, **options)
    except _Kept as kept:
        publishing = kept.options
        content_type, encoding, data = serialize(name, kept.body, publishing.pop("serializer"))
        # The caller's own headers may still change, as the arguments may.
        headers = publishing["headers"] = copy.deepcopy(publishing["headers"])
        _current().messages.append(
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
