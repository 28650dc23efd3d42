"""Messages that are kept instead of published, so that a test can inspect them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

from celery import Celery
from celery.backends.cache import CacheBackend
from kombu import Producer
from kombu.serialization import dumps, loads

from .. import conf
from ..concurrency.sent import find_lock_of
from ..delivery.header import read_header
from ..locks.stores import get_store
from ..sending import broker
from ..sending.departure import OutboxBatch

_begin = OutboxBatch.begin
#: Whether this context runs a callback of ``transaction.on_commit()``.
committing_now: ContextVar[bool] = ContextVar("django_celery_safe_committing", default=False)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """
    A task message that was sent, and kept instead of published.

    Attributes:
        headers: The message's headers, such as ``eta`` and ``expires``.
        properties: The options of its publication: ``exchange``, ``routing_key``, ``priority`` …
        on_commit: Whether it was sent when a transaction committed.
        data: The serialized arguments, as ``content_type`` and ``content_encoding`` describe.
    """

    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    on_commit: bool
    data: Any
    content_type: str
    content_encoding: str

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.headers["task"])

    @property
    def task_id(self) -> str:
        """The task's id."""
        return str(self.headers["id"])

    @property
    def args(self) -> list[Any]:
        """The positional arguments, as a worker would get them."""
        return list(self._body()[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, as a worker would get them."""
        return dict(self._body()[1])

    def __str__(self) -> str:
        return shown(self.task, self.args, self.kwargs)

    def _body(self) -> Any:
        accept = {self.content_type}
        return loads(self.data, self.content_type, self.content_encoding, accept=accept)


@contextmanager
def kept_from_broker(app: Celery) -> Iterator[list[Sent]]:
    """
    Keep sent messages in the yielded list instead of publishing them, and results in memory.

    Inside the block tasks don't run eagerly. An enclosing block of this kind also gets every
    message.
    """
    sent: list[Sent] = []
    outer: Any = Producer.publish

    def publish(self: Producer, body: Any, **options: Any) -> None:
        if "task" not in (options.get("headers") or ()):
            return  # an event, or a command to workers
        sent.append(as_sent(body, **options))
        if hasattr(outer, "celery_safe"):
            outer(self, body, **options)

    publish.celery_safe = True  # type: ignore[attr-defined]
    results = functools.cache(_memory_backend)
    with ExitStack() as stack:
        if app.conf.task_always_eager:
            stack.enter_context(mock.patch.dict(app.conf.changes, task_always_eager=False))
        stack.enter_context(mock.patch.object(Producer, "publish", publish))
        stack.enter_context(mock.patch.object(Celery, "backend", property(results)))
        bounded = mock.patch.object(broker, "bounded_backend", lambda app, seconds: results(app))
        stack.enter_context(bounded)
        stack.enter_context(mock.patch.object(broker, "connect", return_value=None))
        stack.enter_context(mock.patch.object(OutboxBatch, "begin", _begin))  # even if held
        stack.callback(free_locks_of, sent)
        yield sent


@contextmanager
def outbox_held() -> Iterator[None]:
    """Leave messages of the outbox in their rows at a commit, as if the broker were gone."""
    with mock.patch.object(OutboxBatch, "begin", return_value=False):
        yield


def is_outbox_held() -> bool:
    """Return whether this code is inside of :func:`outbox_held`."""
    return OutboxBatch.begin is not _begin


def as_sent(
    body: Any,
    *,
    headers: dict[str, Any],
    content_type: str | None = None,
    content_encoding: str | None = None,
    **options: Any,
) -> Sent:
    """Return the message that a producer would publish, whether or not it is serialized yet."""
    if content_type is None or content_encoding is None:
        content_type, content_encoding, body = dumps(body, options.get("serializer"))
    on_commit = committing_now.get()
    return Sent(copy.deepcopy(headers), options, on_commit, body, content_type, content_encoding)


def _memory_backend(app: Celery) -> CacheBackend:
    backend: Any = CacheBackend(app, url="memory://")
    backend.client.cache = type(backend.client.cache)()  # not the one all backends share
    return backend  # type: ignore[no-any-return]


def free_locks_of(messages: Iterable[Sent]) -> None:
    """Free the ``unique_until`` locks of messages that will never run."""
    for message in messages:
        free_own_lock(message)
        header = read_header(message.headers, message.task)
        if "period" not in header or "key" not in header:
            continue
        store = get_store(header.get("cache", conf.UNSET))
        held = store.peek(f"sent:{header.get('lock', message.task)}:{header['key']}")
        if held is not None and held.holder.task_id == message.task_id:
            store.release(held.name, held.token)


def free_own_lock(message: Sent) -> None:
    """Free the lock that a message holds until it starts or ends, in case it never does."""
    held = find_lock_of(message.task, read_header(message.headers, message.task))
    if held is not None:
        held.move(0)


def check_task(task: Any, what: str) -> None:
    """
    Refuse anything that is not a task.

    Raises:
        TypeError: ``task`` is not a task.
    """
    if not (hasattr(task, "apply_async") and hasattr(task, "run")):
        raise TypeError(
            f"{what}() got {task!r}, which is not a task. Pass the task itself, such as "
            f"import_feed, and not its name, a signature or one of its methods."
        )


def shown(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    parts = [repr(value) for value in args]
    parts += [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{name}({', '.join(parts)})"
