"""A Celery app whose messages stay in memory, and are given out by hand as a worker does it."""

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery, Task, current_app
from celery.app import trace as tracing
from celery.states import SUCCESS
from django.db import connections
from kombu.message import Message as Received
from kombu.utils.imports import symbol_by_name

from django_celery_safe.delivery.header import HEADER


@dataclass(frozen=True)
class Message:
    """One message of a task, as a worker reads it from the broker."""

    headers: dict[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]
    embed: dict[str, Any]
    delivery_info: dict[str, Any]

    @property
    def id(self) -> str:
        """The task's id."""
        return str(self.headers["id"])

    @property
    def ours(self) -> dict[str, Any]:
        """The fields of our header; empty without one."""
        return dict(self.headers.get(HEADER, {}))

    @property
    def eta(self) -> datetime:
        """When it is to be run."""
        return datetime.fromisoformat(self.headers["eta"])

    @property
    def delay(self) -> float:
        """Seconds from now until it is to be run."""
        return (self.eta - datetime.now(UTC)).total_seconds()

    def with_headers(self, **headers: Any) -> "Message":
        """Return the message with more headers."""
        return replace(self, headers={**self.headers, **headers})


class Outcome(NamedTuple):
    """How a delivery ended: Celery's state, and what the task returned or raised."""

    state: str
    value: Any


class Mailbox:
    """
    Takes what the app's tasks send, and runs it through Celery's own tracer.

    Args:
        broker_url: Unset: in memory. With another, only :meth:`deliver` works.
    """

    def __init__(self, broker_url: str = "memory://") -> None:
        # The transport's memory is the process's: a queue of its own keeps tests apart.
        self.queue = uuid.uuid4().hex
        self.queues = [self.queue]
        self.app = Celery(
            self.queue, broker=broker_url, backend="cache+memory://", set_as_current=False
        )
        self.app.conf.update(
            task_default_queue=self.queue,
            task_publish_retry_policy={"max_retries": 0},
            accept_content=["json", "pickle"],
        )

    def task(self, function: Callable[..., Any], **options: Any) -> Any:
        """Make a task of this app, as ``@app.task`` does; no other app gets it."""
        return self.app.task(function, shared=False, **options)

    def take(self) -> list[Message]:
        """Return what was sent since the last time, in order, from one queue after the other."""
        return [message for queue in self.queues for message in self._take(queue)]

    def add_queue(self) -> str:
        """Return the name of another queue, whose messages are taken too."""
        self.queues.append(f"{self.queue}-{len(self.queues)}")
        return self.queues[-1]

    def _take(self, name: str) -> list[Message]:
        found = []
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(name, accept=["json", "pickle"])
            while queue.qsize():
                message = queue.get(block=False)
                message.ack()
                args, kwargs, embed = message.payload
                # A worker's request has it there.
                priority = message.properties.get("priority")
                info = {**message.delivery_info, "priority": priority}
                found.append(Message(dict(message.headers), args, kwargs, embed, info))
            queue.close()
        return found

    def take_one(self) -> Message:
        """Return the only message that was sent since the last time."""
        (message,) = self.take()
        return message

    def send(self, task: Any, *args: Any, **options: Any) -> Message:
        """Send a task with these options; return its message."""
        task.apply_async(args, **options)
        return self.take_one()

    def deliver(self, message: Message) -> Outcome:
        """Run the message here, as a worker's child would."""
        task: Task[Any, Any] = self.app.tasks[message.headers["task"]]
        # By its module's name, which integrations replace, such as Sentry's.
        trace = tracing.build_tracer(task.name, task, app=self.app)
        request = {**message.headers, **message.embed, "delivery_info": message.delivery_info}
        traced = trace(message.id, message.args, message.kwargs, request)
        if traced.info is None:
            return Outcome(SUCCESS, traced.retval)
        return Outcome(traced.info.state, traced.info.retval)

    def receive(self, message: Message) -> Any:
        """Return the request that the main process of a worker makes of a message."""
        received = Received(
            body=json.dumps([message.args, message.kwargs, message.embed]),
            content_type="application/json",
            content_encoding="utf-8",
            headers=message.headers,
            delivery_info=message.delivery_info,
            accept=["application/json"],
        )
        task: Any = self.app.tasks[message.headers["task"]]
        return symbol_by_name(task.Request)(received, app=self.app, task=task)

    def deliver_elsewhere(self, message: Message) -> Outcome:
        """Run a message as another process does, with connections of its own to databases."""

        def deliver() -> Outcome:
            self.app.set_current()
            try:
                return self.deliver(message)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(deliver).result()

    def close(self) -> None:
        """Forget the app and its connections."""
        self.app.close()


def end_child(request: Any, error: BaseException) -> None:
    """Report the end of a child to the main process, as the pool does."""
    try:
        raise error
    except BaseException:
        request.on_failure(ExceptionInfo())


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A Celery app in memory, without tasks; it is the current one."""
    before = current_app._get_current_object()
    with closing(Mailbox()) as mailbox:
        mailbox.app.set_current()
        yield mailbox
    before.set_current()
