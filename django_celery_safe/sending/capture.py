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
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, ParamSpec, TypeAlias, TypeVar

from celery import Celery, signals
from celery.backends.base import Backend
from kombu.serialization import loads
from kombu.transport.native_delayed_delivery import calculate_routing_key

from ..concurrency.sent import seconds_until
from ..exceptions import describe_error
from ..texts import get_logger
from .arguments import PLAIN, check_headers, serialize

P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger(__name__)

_captured: ContextVar[Captured | None] = ContextVar("django_celery_safe_captured", default=None)
#: Publishes the next message of this context, or does not; see :func:`publishing_through`.
_publisher: ContextVar[Publisher | None] = ContextVar("django_celery_safe_publisher", default=None)
_installing = threading.Lock()

#: Exchange by which Celery delays what goes to a quorum queue (celery/app/base.py), and what
#: it puts in front of the routing key: the seconds, in 28 binary digits.
DELAYED: Final = "celery_delayed_27"
DELAY: Final = re.compile(r"(?:[01]\.){28}")

#: Gets a message's headers and what publishes it; tells whether it did.
Publisher: TypeAlias = Callable[[dict[str, Any], Callable[[], object]], bool]


@dataclass(slots=True)
class Message:
    """
    A message as Celery made it, up to its publication.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        data: The serialized body; changes to the arguments no longer reach it.
        options: What else goes to ``Producer.publish``.
        eta, expires: When it is to run, and until when, as text; None: at once, for ever.
        event: Celery's task-sent event; None unless ``task_send_sent_event`` is on.
        result_wanted: Whether the result backend is told of the send.
        context: In which it was made, a copy of the caller's: a receiver of
            ``before_task_publish`` may set there what one of ``after_task_publish`` sets
            back, as tracing does. None: it was made in another process.
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
    result_wanted: bool
    context: Context | None = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the context in which this message was made."""
        if self.context is None:
            return function(*args, **kwargs)
        return self.context.run(function, *args, **kwargs)


@dataclass(slots=True)
class ChordCall:
    """
    What a result backend has to know of a chord, to tell when it is complete.

    Attributes:
        method: Of the backend: ``set_chord_size`` or ``apply_chord``.
    """

    app: Celery
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tell(self, backend: Any = None) -> None:
        """Tell the app's result backend, or another object for it, and subscribe to nothing."""
        if backend is None:
            getattr(self.app.backend, self.method)(*self.args, **self.kwargs)
            return
        # Making the group's result would subscribe to it, by the app's own backend.
        with capture(self.app):
            getattr(backend, self.method)(*self.args, **self.kwargs)


@dataclass(slots=True)
class Captured:
    """
    All that was sent inside :func:`capture`, in order.

    Attributes:
        messages: What has to be published.
        chord_calls: What has to be done before that.
        subscriptions: Calls that let this process hear of results.
    """

    messages: list[Message] = field(default_factory=list)
    chord_calls: list[ChordCall] = field(default_factory=list)
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


@contextmanager
def publishing_through(app: Celery, publisher: Publisher) -> Iterator[None]:
    """Let ``publisher`` decide, at its publication, on the message that is sent inside."""
    _install(app)
    token = _publisher.set(publisher)
    try:
        yield
    finally:
        _publisher.reset(token)


def subscribe(
    messages: Sequence[Message], calls: Sequence[Callable[[], Any]] = (), producer: Any = None
) -> Exception | None:
    """
    Let this process hear of the results of what will be published.

    Args:
        calls: What else was put off for that.

    A result backend that does not answer costs only that, with a warning: who
    waits for a result asks for it again.

    Returns:
        None if it answered; otherwise its error.
    """
    try:
        for call in calls:
            call()
        for message in messages:
            if message.result_wanted:
                with message.app.producer_or_acquire(producer) as own:
                    message.app.backend.on_task_call(own, message.task_id)
    except Exception as error:  # noqa: BLE001 - the messages must go out whatever it is
        logger.warning(
            "The result backend could not be told of a task, which is sent nevertheless: %s",
            describe_error(error),
        )
        return error
    return None


def publish(message: Message, producer: Any = None) -> None:
    """
    Publish a captured message, and say so.

    Args:
        producer: The kombu producer to use; None takes one of the app's pool.

    Raises:
        kombu.exceptions.OperationalError: The broker can't be reached.
    """
    app = message.app
    with app.producer_or_acquire(producer) as own, own.connection._reraise_as_library_errors():
        put(message, own)
    announce(message, lambda: app.producer_or_acquire(producer))


def put(message: Message, producer: Any, **options: Any) -> None:
    """
    Hand a captured message to a producer; nobody is told.

    Args:
        options: Of ``Producer.publish``, above the message's own.
    """
    given = {**message.options, **options}
    # A time to live and a delay are relative, and the message has waited.
    if given.get("expiration") is not None:
        left = seconds_until(message.expires)
        given["expiration"] = given["expiration"] if left is None else max(0.0, left)
    if _is_delayed(given) and (left := seconds_until(message.eta)) is not None:
        key = DELAY.sub("", given["routing_key"], count=1)
        given["routing_key"] = calculate_routing_key(max(1, math.ceil(left)), key)
    producer.publish(
        message.data,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        **given,
    )


def announce(
    message: Message, borrow: Callable[[], AbstractContextManager[Any]] | None, **options: Any
) -> bool:
    """
    Say that a message was published, as Celery's own sender does after its publish.

    What fails here costs only that, with a warning: the message is out.

    Args:
        borrow: Lends a producer, for Celery's event; None: no event is sent.
        options: Of ``Producer.publish``, above the message's own, for the event.

    Returns:
        Whether the event could be sent, if there is one.
    """
    with _harmless(message):
        if signals.after_task_publish.receivers:
            message.run(_send_after_publish, message)
    if message.event is None or borrow is None:
        return True
    with _harmless(message), borrow() as producer:
        _publish_event(message, message.event, producer, options)
        return True
    return False


@contextmanager
def _harmless(message: Message) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the message is out
        logger.warning(
            "Task %s[%s] was published, but who listens could not be told: %s",
            message.task,
            message.task_id,
            describe_error(error),
        )


def _send_after_publish(message: Message) -> None:
    body = loads(
        message.data,
        message.content_type,
        message.content_encoding,
        accept={message.content_type},
    )
    signals.after_task_publish.send(
        sender=message.task,
        body=body,
        headers=message.options["headers"],
        exchange=message.options["exchange"],
        routing_key=message.options["routing_key"],
    )


def _publish_event(
    message: Message, event: dict[str, Any], producer: Any, above: dict[str, Any]
) -> None:
    options = {**message.options, **above}
    exchange = options["exchange"]
    _dispatcher(message.app).publish(
        "task-sent",
        {
            **event,
            "exchange": getattr(exchange, "name", exchange),
            "routing_key": options["routing_key"],
        },
        producer,
        retry=options["retry"],
        retry_policy=options["retry_policy"],
    )


def _dispatcher(app: Celery) -> Any:
    """Return what sends an app's events, and unlike Celery's own raises if it can't."""
    amqp: Any = app.amqp
    found = getattr(amqp, "celery_safe_dispatcher", None)
    if found is None:
        events: Any = app.events
        found = events.Dispatcher(enabled=False, buffer_while_offline=False)
        amqp.celery_safe_dispatcher = found
    return found


def _is_delayed(options: dict[str, Any]) -> bool:
    """Tell whether the broker delays the message by its routing key, as quorum queues do."""
    exchange = getattr(options["exchange"], "name", options["exchange"])
    return exchange == DELAYED and DELAY.match(options["routing_key"] or "") is not None


def _install(app: Celery) -> None:
    # Shared tasks have a stand-in for the app.
    app = getattr(app, "_get_current_object", lambda: app)()
    backend: Any = app.backend
    if hasattr(app.amqp.send_task_message, "celery_safe") and hasattr(
        backend.on_task_call, "celery_safe"
    ):
        return
    with _installing:
        _switch(app.amqp, "send_task_message", functools.partial(_keep, app), _send_through)
        # Backends belong to threads. Some open a connection when a task is sent or
        # a group's result is made, and hang if their server is down.
        _switch(backend, "on_task_call", lambda *_: None)  # `subscribe` does it
        _switch(
            backend, "set_chord_size", functools.partial(_put_off_chord_call, app, "set_chord_size")
        )
        _switch(backend, "apply_chord", functools.partial(_apply_chord, app))
        if (consumer := getattr(backend, "result_consumer", None)) is not None:
            _switch(consumer, "consume_from", _put_off_subscription)


def _switch(
    owner: Any,
    name: str,
    while_capturing: Callable[..., Any],
    else_do: Callable[..., Any] | None = None,
) -> None:
    """
    Replace a method, on first use, by one that does something else inside :func:`capture`.

    Args:
        while_capturing: Gets the original first, then what the method gets.
        else_do: What it does outside, likewise; None: the original.
    """
    original = getattr(owner, name)
    if hasattr(original, "celery_safe"):
        return

    def switched(*args: Any, **kwargs: Any) -> Any:
        if _captured.get() is None:
            if else_do is not None:
                return else_do(original, *args, **kwargs)
            return original(*args, **kwargs)
        return while_capturing(original, *args, **kwargs)

    switched.celery_safe = True  # type: ignore[attr-defined]
    setattr(owner, name, switched)


def _current() -> Captured:
    captured = _captured.get()
    assert captured is not None
    return captured


def _put_off_chord_call(app: Celery, method: str, original: Any, *args: Any, **kwargs: Any) -> None:
    _current().chord_calls.append(ChordCall(app, method, args, kwargs))


def _put_off_subscription(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _current().subscriptions.append(functools.partial(original, *args, **kwargs))


def _apply_chord(app: Celery, original: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(original, "__func__", None) is Backend.apply_chord:
        # It refuses a chord without result backend, or sends the task that asks
        # again and again whether the chord is complete, which is captured.
        original(*args, **kwargs)
    else:
        _put_off_chord_call(app, "apply_chord", original, *args, **kwargs)


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


class _Dropped(BaseException):
    """Leaves Celery's sender where the message would be published, and was not to be."""


class _Through:
    """What Celery's sender gets for a producer, where a publisher decides."""

    def __init__(self, producer: Any, name: str, publisher: Publisher) -> None:
        self._producer, self._name, self._publisher = producer, name, publisher
        self.connection = producer.connection

    def publish(self, body: Any, *, serializer: str, headers: Any, **options: Any) -> None:
        # First of all, so that what can't be sent is not asked about.
        content_type, encoding, data = serialize(self._name, body, serializer, checked=True)

        def publish_now() -> None:
            self._producer.publish(
                data,
                content_type=content_type,
                content_encoding=encoding,
                headers=headers,
                **options,
            )

        if not self._publisher(headers, publish_now):
            raise _Dropped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


def _send_through(
    original: Callable[..., Any], producer: Any, name: str, message: Any, **options: Any
) -> None:
    publisher = _publisher.get()
    if publisher is None:
        original(producer, name, message, **options)
        return
    # In a context of its own: of a message that is dropped, `after_task_publish` never comes.
    context = copy_context()
    # For this message alone: receivers of Celery's signals may send others.
    context.run(_publisher.set, None)
    with suppress(_Dropped):
        context.run(original, _Through(producer, name, publisher), name, message, **options)


def _keep(
    app: Celery,
    original: Callable[..., Any],
    producer: Any,
    name: str,
    message: Any,
    **options: Any,
) -> None:
    context = copy_context()
    try:
        context.run(original, _StandIn(producer.connection), name, message, **options)
    except _Kept as kept:
        publishing = kept.options
        content_type, encoding, data = serialize(name, kept.body, publishing.pop("serializer"))
        # Message protocol 1 has in the body what others have in the headers.
        about = publishing["headers"] if isinstance(kept.body, tuple) else kept.body
        event = message[3] and {**message[3], "queue": _queue_name(app, **options)}
        check_headers(name, publishing["headers"], producer.connection)
        # The caller's own headers may still change, as the arguments may.
        headers = publishing["headers"] = {
            name: value if type(value) in PLAIN else copy.deepcopy(value)
            for name, value in publishing["headers"].items()
        }
        _current().messages.append(
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
                result_wanted=not headers.get("ignore_result"),
                context=context,
            )
        )
        # Messages that receivers send during the publication are not captured.
        context.run(_captured.set, None)


def _queue_name(app: Celery, queue: Any = None, exchange: Any = None, **options: Any) -> str | None:
    """Return the queue that Celery's event names (celery/app/amqp.py)."""
    if queue is None and exchange is None:
        amqp: Any = app.amqp
        queue = amqp.default_queue
    name: str | None = getattr(queue, "name", queue)
    return name
