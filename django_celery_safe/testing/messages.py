"""Messages that are kept instead of published, so that a test can run or inspect them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from celery import Celery
from celery.backends.cache import CacheBackend
from django.db import connections
from django.test import TestCase
from kombu import Producer
from kombu.serialization import dumps, loads

from ..concurrency.sent import find_lock_of
from ..delivery.header import read_header
from ..sending import capture, publisher
from ..sending.commit import OutboxSender
from ..transactions import in_testcase_only


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """
    A task message that was sent, and kept instead of published.

    Its ``task``, ``task_id``, ``args`` and ``kwargs`` are as a worker would get them.

    Attributes:
        headers: The message's headers, such as ``eta`` and ``expires``.
        properties: The options of its publication: ``exchange``, ``routing_key``, ``priority`` …
        data: The serialized arguments, as ``content_type`` and ``content_encoding`` describe.
    """

    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
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
        parts = [repr(value) for value in self.args]
        parts += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task}({', '.join(parts)})"

    def _body(self) -> Any:
        accept = {self.content_type}
        return loads(self.data, self.content_type, self.content_encoding, accept=accept)


@contextmanager
def kept_from_broker(app: Celery, *, outbox_too: bool = False) -> Iterator[list[Sent]]:
    """
    Keep sent messages in the yielded list instead of publishing them, and results in memory.

    Inside the block tasks don't run eagerly.

    Args:
        outbox_too: Whether messages of the outbox stay in their rows.
    """
    sent: list[Sent] = []

    def publish(self: Producer, body: Any, **options: Any) -> None:
        if "task" in (options.get("headers") or ()):  # otherwise an event, or a command to workers
            sent.append(as_sent(body, **options))

    results = functools.cache(lambda app: CacheBackend(app, url="memory://"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(app.conf.changes, task_always_eager=False))
        for owner, name, replacement in (
            (Producer, "publish", publish),
            (Celery, "backend", property(results)),
            (capture, "bounded_backend", lambda app, seconds: CacheBackend(app, url="memory://")),
            (publisher, "connect", lambda producer: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        if outbox_too:
            stack.enter_context(mock.patch.object(OutboxSender, "send"))
        stack.callback(_free_locks_of, sent)
        yield sent


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
    return Sent(copy.deepcopy(headers), options, body, content_type, content_encoding)


def _free_locks_of(messages: list[Sent]) -> None:
    """Free the locks of messages with ``unique_until``, which no worker runs."""
    for message in messages:
        held = find_lock_of(message.task, read_header(message.headers, message.task))
        if held is not None:
            held.move(0)


@contextmanager
def committing() -> Iterator[None]:
    """Run the block's ``on_commit`` callbacks at its end, where a TestCase never commits."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if in_testcase_only(connection.alias):
                # Callbacks from before go on waiting; those that ran are forgotten, because a
                # block of captureOnCommitCallbacks() around this one would run them again.
                stack.callback(setattr, connection, "run_on_commit", connection.run_on_commit)
                connection.run_on_commit = []
                capture = TestCase.captureOnCommitCallbacks(using=connection.alias, execute=True)
                stack.enter_context(capture)
        yield


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
