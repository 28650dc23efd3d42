"""
Making a complete message without publishing it.

Celery's own code builds every message: routing, headers, stamps, serialized
body. Inside :func:`capture` only the last step, the producer's ``publish``, is
replaced: it keeps the message, and a ``Publisher`` publishes it later. The hook is
``app.amqp.send_task_message``, through which every kind of send goes; it is
installed on the first use for each app. A chord is made known to the result backend while it
is captured.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from celery import Celery
from celery.backends.base import Backend

from .. import conf
from .arguments import PLAIN, serialize
from .broker import bounded_backend

T = TypeVar("T")

#: Keeps the messages that are made in this context; None: they are published.
CAPTURED: ContextVar[list[Message] | None] = ContextVar("django_celery_safe_captured", default=None)


@dataclass(slots=True)
class Message:
    """
    A message as Celery made it, before its publication.

    Attributes:
        task: Name of the task.
        task_id: Id of the task.
        data: The serialized body; later changes to the arguments don't affect it.
        options: The other arguments of ``Producer.publish``.
        eta, expires: When the task may start and when it expires, as text; None: no limit.
        event: Celery's task-sent event; None unless ``task_send_sent_event`` is on.
        context: The context in which the message was made, a copy of the caller's: a receiver
            of ``before_task_publish`` may set a variable that a receiver of
            ``after_task_publish`` resets, as tracing does.
        attempt: The id of its attempt, for which its row stays; "": its row ends once it is sent.
    """

    app: Celery
    task: str
    task_id: str
    data: Any
    content_type: str
    content_encoding: str
    options: dict[str, Any]
    eta: str | None
    expires: str | None
    event: dict[str, Any] | None
    context: Context = field(default_factory=copy_context)
    attempt: str = ""


def capture(app: Celery, messages: list[Message], send: Callable[..., T]) -> T:
    """
    Call ``send``, and append every message that it sends, in order, to ``messages``.

    It gets a ``producer`` for its sends; with that, they need none from the app's pool.

    Nothing connects to the broker; only a chord connects to the result backend. The ids, the
    results and the checks of arguments are those of any other send.
    """
    app = getattr(app, "_get_current_object", lambda: app)()  # shared tasks have a stand-in
    amqp: Any = app.amqp
    if not hasattr(amqp, "celery_safe_stand_in"):
        _switch(amqp, "send_task_message", functools.partial(_keep, app))
        amqp.celery_safe_stand_in = _StandIn(app.connection_for_write())
    _install_in_backend(app)
    # In a context of its own: a signal handler that raises can't leave this one capturing.
    context = copy_context()
    context.run(CAPTURED.set, messages)
    return context.run(send, producer=amqp.celery_safe_stand_in)


def _install_in_backend(app: Celery) -> None:
    """Keep this thread's result backend from connecting for a message that is only captured."""
    backend: Any = app.backend
    if hasattr(backend.set_chord_size, "celery_safe"):
        return
    # Some open a connection when a task is sent or a group's result is made, and hang if their
    # server is down.
    if type(backend).on_task_call is not Backend.on_task_call:  # which does nothing
        _switch(backend, "on_task_call", lambda *_: None)  # see Publisher
    if (consumer := getattr(backend, "result_consumer", None)) is not None:
        _switch(consumer, "consume_from", lambda *_, **__: None)  # whoever waits subscribes
        wait = consumer._wait_for_pending
        consumer._wait_for_pending = functools.partial(_subscribe_and_wait, consumer, wait)
    # The second one is the last of all, because it shows that the backend has them.
    for name in ("apply_chord", "set_chord_size"):
        _switch(backend, name, functools.partial(_register_chord, app, name))


def _switch(owner: Any, name: str, while_capturing: Callable[..., Any]) -> None:
    """
    Replace a method, on first use, with one that does something else inside :func:`capture`.

    Args:
        while_capturing: Called with what is captured, the original method, and its arguments.
    """
    original = getattr(owner, name)
    if hasattr(original, "celery_safe"):
        return

    def switched(*args: Any, **kwargs: Any) -> Any:
        if (captured := CAPTURED.get()) is not None:
            return while_capturing(captured, original, *args, **kwargs)
        return original(*args, **kwargs)

    switched.celery_safe = True  # type: ignore[attr-defined]
    setattr(owner, name, switched)


def _register_chord(
    app: Celery, method: str, captured: list[Message], _: Any, *args: Any, **kwargs: Any
) -> None:
    """Tell the result backend of a chord now, in one try: the caller may hold rows locked."""
    try:
        getattr(bounded_backend(app, conf.get("OUTBOX_SEND_TIMEOUT")), method)(*args, **kwargs)
    except Exception as error:
        error.add_note(
            "Nothing was sent. Check the result backend: it has to know a chord before its tasks."
        )
        raise


def _subscribe_and_wait(consumer: Any, original: Any, result: Any, **kwargs: Any) -> Any:
    """Subscribe to a result that is waited for, because its send may not have subscribed to it."""
    for task_id in _unknown_ids(result):
        consumer.consume_from(task_id)
    return original(result, **kwargs)


def _unknown_ids(result: Any) -> list[str]:
    """Return the ids of the single results whose value is not known here yet."""
    parts = getattr(result, "results", None)
    if parts is None:
        return [] if result._cache else [result.id]
    return [task_id for part in parts for task_id in _unknown_ids(part)]


class _PublishIntercepted(BaseException):
    """Leaves Celery's sender at the moment of publication; no error handler may catch it."""

    def __init__(self, body: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.body, self.options = body, options


class _StandIn:
    """Replaces the producer while messages are captured; its connection is never opened."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def publish(self, body: Any, **options: Any) -> NoReturn:
        raise _PublishIntercepted(body, options)


def _keep(
    app: Celery, into: list[Message], send: Any, producer: Any, name: str, message: Any, **more: Any
) -> None:
    context = copy_context()
    try:
        context.run(send, _StandIn(producer.connection), name, message, **more)
    except _PublishIntercepted as kept:
        publishing = kept.options
        serializer = publishing.pop("serializer")
        content_type, encoding, data = serialize(name, kept.body, serializer)
        # Message protocol 1 has these fields in the body, later protocols in the headers.
        about = publishing["headers"] if isinstance(kept.body, tuple) else kept.body
        declared = publishing["declare"] or (None,)
        event = message[3] and {**message[3], "queue": getattr(declared[0], "name", None)}
        # The caller may still change these headers, like the arguments.
        publishing["headers"] = {
            name: value if type(value) in PLAIN else copy.deepcopy(value)
            for name, value in publishing["headers"].items()
        }
        into.append(
            Message(
                app=app,
                task=name,
                task_id=str(about["id"]),
                data=data,
                content_type=content_type,
                content_encoding=encoding,
                options=publishing,
                eta=about.get("eta"),
                expires=about.get("expires"),
                event=event,
                context=context,
            )
        )
        # Messages that receivers send during the publication are not captured.
        context.run(CAPTURED.set, None)
