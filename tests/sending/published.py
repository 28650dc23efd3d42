"""The messages in the queues of the private Redis, read without Celery."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from kombu.compression import decompress
from kombu.serialization import loads

from tests.servers import RedisServer

UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")

#: The Redis database that the fixtures use as the broker.
BROKER_DATABASE = 1


@dataclass(frozen=True)
class Published:
    """One message in a queue. ``queue`` is the Redis key, priority included."""

    queue: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    data: bytes

    @property
    def id(self) -> str:
        """The task's id."""
        return str(self.headers["id"])

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.headers["task"])

    @property
    def plain(self) -> bytes:
        """The body as serialized, not compressed."""
        kind = self.headers.get("compression")
        plain: bytes = self.data if kind is None else decompress(self.data, kind)
        return plain

    @property
    def body(self) -> Any:
        """The decoded body: with message protocol 2 args, kwargs and what is embedded."""
        return loads(
            self.plain, self.content_type, self.content_encoding, accept={self.content_type}
        )


#: Takes what was published since the last time.
Sent = Callable[[], list[Published]]


def take_published(server: RedisServer, database: int = BROKER_DATABASE) -> list[Published]:
    """Take all messages out of the queues, oldest first in each queue."""
    with server.client(db=database) as client:
        keys = sorted(key for key in client.keys("*") if client.type(key) == b"list")
        # kombu pushes on the left and takes from the right.
        rows = [(key.decode(), row) for key in keys for row in reversed(client.lrange(key, 0, -1))]
        if keys:
            client.delete(*keys)
    return [_read(queue, json.loads(row)) for queue, row in rows]


def run_here(app: Celery, message: Published) -> Any:
    """Run a message in this process as a worker's child would; return what the task returned."""
    task: Any = app.tasks[message.task]
    args, kwargs, embedded = message.body
    trace = build_tracer(task.name, task, app=app)
    request = {**message.properties, **message.headers, **embedded}
    return trace(message.id, args, kwargs, request).retval


def _read(queue: str, row: dict[str, Any]) -> Published:
    assert row["properties"].pop("body_encoding") == "base64"
    del row["properties"]["delivery_tag"]  # new with each publication
    return Published(
        queue=queue,
        headers=row["headers"],
        properties=row["properties"],
        content_type=row["content-type"],
        content_encoding=row["content-encoding"],
        data=base64.b64decode(row["body"]),
    )


def ids_in(result: Any) -> set[str]:
    """Return every id that a result announces, its parents' and members' included."""
    return set(UUID.findall(json.dumps(result.as_tuple())))
