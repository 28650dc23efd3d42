"""
Making a complete message without publishing it, and refusing values that can't travel in one.

Celery's own code builds every message: routing, headers, stamps, serialized
body. Inside :func:`capture` only the last step, the producer's ``publish``, is
replaced: it keeps the message, and a ``Publisher`` publishes it later. The hook is
``app.amqp.send_task_message``, through which every kind of send goes; it is
installed on the first use for each app. A chord is made known to the result backend while it
is captured.

Option names that resemble no option are left alone: Celery ignores them, and projects have some
of their own.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from celery import Celery
from celery.backends.base import Backend
from django.db.models import Model, QuerySet
from kombu import Producer
from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from .. import conf
from ..concurrency.options import check_call_options
from ..exceptions import ConfigurationError, NotSerializable

T = TypeVar("T")

#: Keeps the messages that are made in this context; None: they are published.
CAPTURED: ContextVar[list[Message] | None] = ContextVar("django_celery_safe_captured", default=None)
#: How many times, and with which pauses in s, kombu and Celery retry: never.
ONCE: Final = {"max_retries": 0, "interval_start": 0, "interval_step": 0, "interval_max": 0}
#: Backends belong to threads.
_backends = threading.local()

#: Types of values that contain nothing to check; most items of a long list have one of these.
PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})

#: How similar two names must be, up to 1.0, for one to count as a misspelling of the other.
SLIP: Final = 0.8

#: Our options of a send, which Celery does not know.
OURS: Final = ("outbox", "using", "send_on_commit", "single_instance")

#: Names of options of ``@app.task`` that Celery's task class does not have as attributes.
_READ_BY_CELERY: Final = (
    *signature(Celery._task_from_fun).parameters,
    *signature(Producer.publish).parameters,
    "queue",
    "autoretry_for",
    "dont_autoretry_for",
    "retry_kwargs",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "lazy",
    "shared",
)


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


def bounded_backend(app: Celery, seconds: float) -> Any:
    """Return this thread's result backend, which tries a request once, for ``seconds`` at most."""
    backends = _backends.__dict__.setdefault("by_app", WeakKeyDictionary()).setdefault(app, {})
    if seconds not in backends:
        backend: Any = app._get_backend()  # type: ignore[attr-defined]
        backend.retry_policy = ONCE
        parameters = getattr(backend, "connparams", None)  # Redis'
        if isinstance(parameters, dict):
            bounds = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), seconds)
            backend.connparams = {**parameters, **bounds, "retry_on_timeout": False}
        backends[seconds] = backend
    return backends[seconds]


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
        # A SafeTask has checked its arguments before; JSON refuses what came to them since.
        done = serializer == "json" and getattr(app.tasks.get(name), "_ends_rows", False)
        content_type, encoding, data = serialize(name, kept.body, serializer, is_checked=done)
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


def check_arguments(
    task: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, *more: Any
) -> None:
    """
    Refuse values that must not travel in a message, whatever the serializer.

    A model instance would be a stale copy of its row, a QuerySet would be evaluated
    at some unknown time, and an iterator can be read only once.

    Args:
        more: Other parts of the message, such as links.

    Raises:
        TypeError: ``args`` is one argument instead of a list of them.
        ConfigurationError: A signature has ``single_instance`` options that are not valid.
        NotSerializable: The error names the argument, even if the value is nested. In a
            signature (chain, link), it names that signature's task and argument.
    """
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(
            f"The arguments of task {task} are {args!r:.100}, which is not a list or tuple of "
            f"them. One argument is a tuple with a comma: ({args!r:.100},)."
        )
    values = kwargs.values() if isinstance(kwargs, Mapping) else ()
    if PLAIN.issuperset(map(type, (*(args or ()), *values, *more))):
        return
    seen: set[int] = set()
    for place, value in [*_places(args, kwargs), *(("the message", part) for part in more)]:
        for owner, where, part in _walk(task, place, value, seen):
            if (refused := _refuse(part)) is not None:
                raise NotSerializable(owner, where, *refused)


def serialize(
    task: str, body: Any, serializer: str, *, is_checked: bool = False
) -> tuple[str, str, Any]:
    """
    Return the content type, encoding and data of a message's body.

    Args:
        is_checked: Whether :func:`check_arguments` has checked the arguments.

    Raises:
        NotSerializable: The error names the argument that the serializer refused.
    """
    # Message protocol 1 has everything in one dict.
    parts = body if isinstance(body, tuple) else (body["args"], body["kwargs"], body)
    args, kwargs, *embedded = parts
    if not is_checked:
        check_arguments(task, args, kwargs, *(one for one in embedded if any(one.values())))
    try:
        content_type, encoding, data = dumps(body, serializer=serializer)
    except EncodeError as error:
        raise explain(task, args, kwargs, embedded, serializer, error) from error
    return content_type, encoding, data


def explain(
    task: str, args: Any, kwargs: Any, embedded: Any, serializer: str, error: EncodeError
) -> NotSerializable:
    """Return an error that names the argument that the serializer refused."""
    seen: set[int] = set()
    for place, value in [*_places(args, kwargs), ("the message", embedded)]:
        for owner, where, part in _walk(task, place, value, seen):
            try:
                dumps(part, serializer=serializer)
            except EncodeError as refused:
                hint = f"The serializer {serializer!r} says: {refused}. Send plain data instead."
                return NotSerializable(owner, where, _name(part), hint)
    return NotSerializable(task, "the message", "made of something", f"It says: {error}.")


def _walk(task: str, place: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """
    Yield the parts of a value, and then the value, each with its task and its place.

    The parts of a signature have its task, and places there.
    """
    if type(value) not in PLAIN and id(value) not in seen:
        seen.add(id(value))
        owner, inside = task, list[tuple[str, Any]]()
        if isinstance(value, Mapping) and "subtask_type" in value and "task" in value:
            owner, options = value["task"], value.get("options") or {}
            if "single_instance" in options:
                # Otherwise the error would appear only in the worker that sends it later.
                check_call_options(options["single_instance"])
            inside = [*_places(value.get("args"), value.get("kwargs")), ("its options", options)]
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            items = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
            inside = [(place, item) for item in items if type(item) not in PLAIN]
        for where, part in inside:
            yield from _walk(owner, where, part, seen)
    yield task, place, value


def _places(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args or ()):
        yield f"args[{index}]", value
    # If kwargs is not a mapping, Celery itself raises an error.
    for name, value in kwargs.items() if isinstance(kwargs, Mapping) else ():
        yield f"kwargs[{name!r}]", value


def _refuse(value: Any) -> tuple[str, str] | None:
    """Return a description of ``value`` and what to send instead; None: ``value`` is allowed."""
    if isinstance(value, Model):
        hint = "Pass the primary key, and read the row again in the task, where it is fresh."
        return _name(value), hint
    if isinstance(value, QuerySet):
        hint = "Pass a list of primary keys: list(queryset.values_list('pk', flat=True))."
        return f"a QuerySet of {value.model.__name__}", hint
    if isinstance(value, Iterator):
        return f"an instance of {type(value).__name__}", "It can be read only once. Pass a list."
    return None


def _name(value: Any) -> str:
    # Not type(): request.user is a lazy object around the real user.
    return f"an instance of {value.__class__.__name__}"


@functools.lru_cache(maxsize=256)
def refuse_misspelt(name: str) -> None:
    """
    Refuse an option of a send that is one of ours, misspelt.

    Raises:
        ConfigurationError: The error names the option and the one that was meant.
    """
    meant = None if name in OURS else conf.closest(name, OURS, SLIP)
    if meant is not None:
        raise ConfigurationError(
            f"A task is sent with {name}=..., which is not an option of a send and does nothing. "
            f"Did you mean {meant!r}?"
        )


def find_misspelt(task: Any, ours: type) -> Iterator[tuple[str, str]]:
    """
    Yield each misspelt option of a task, and the option that was meant.

    Args:
        ours: The class with this app's options; the task's own class may not have them.
    """
    own = type(task)
    known = frozenset(_READ_BY_CELERY).union(*map(dir, (ours, *own.__bases__)))
    # Celery turns the options of @app.task into attributes of a class.
    for name, value in vars(own).items():
        is_odd = name not in known and name[:1] != "_" and not callable(value)
        if is_odd and (meant := conf.closest(name, known, SLIP)) is not None:
            yield name, meant
