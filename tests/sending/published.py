"""The messages in the queues of the private Redis or RabbitMQ, read without Celery."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import amqp
from celery import Celery
from celery.app.trace import build_tracer
from celery.result import ResultBase
from kombu.compression import decompress
from kombu.serialization import loads

from tests.servers import RabbitMQServer, RedisServer

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


#: Ids of tasks, and the token of a lock of the send.
ID = re.compile(f"{UUID.pattern}|\\b[0-9a-f]{{32}}\\b")

#: Keys that differ with each publication, or count the messages left in the queue.
NEW = ("delivery_tag", "message_count")


class RedisQueues:
    """Queues of the private Redis; all are taken, whatever their names."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.url = server.database_url(BROKER_DATABASE)
        self.transport_options: dict[str, Any] = {}

    def take(self, *names: str) -> list[Published]:
        """Take all messages."""
        return take_published(self.server)

    def forget(self, queues: Iterable[str], exchanges: Iterable[str]) -> None:
        """Remove all."""
        with self.server.client(db=BROKER_DATABASE) as client:
            client.flushdb()


class RabbitMQQueues:
    """Queues of the private RabbitMQ."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.address = f"{server.host}:{server.port}"
        self.url = server.url
        self.transport_options: dict[str, Any] = {"confirm_publish": True}

    def take(self, *names: str) -> list[Published]:
        """Take the messages out of these queues; one that does not exist has none."""
        with amqp.Connection(self.address) as connection:
            return [message for name in names for message in _get_all(connection, name)]

    def forget(self, queues: Iterable[str], exchanges: Iterable[str]) -> None:
        """Remove queues and exchanges, if they are there."""
        with amqp.Connection(self.address) as connection:
            for queue in queues:
                connection.channel().queue_delete(queue)
            for exchange in exchanges:
                connection.channel().exchange_delete(exchange)


#: The queues of one broker; ``transport_options`` are kombu's, so that a message is in its
#: queue when the publication returns.
Queues = RedisQueues | RabbitMQQueues


def _get_all(connection: Any, name: str) -> Iterator[Published]:
    channel = connection.channel()
    channel.auto_decode = False
    while True:
        try:
            message = channel.basic_get(name, no_ack=True)
        except amqp.NotFound:
            return
        if message is None:
            return
        properties = dict(message.properties)
        yield Published(
            queue=name,
            headers=properties.pop("application_headers", {}),
            content_type=properties.pop("content_type"),
            content_encoding=properties.pop("content_encoding"),
            properties={**properties, "delivery_info": without(message.delivery_info, NEW)},
            data=bytes(message.body),
        )


def without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a copy without some of the keys."""
    return {name: value for name, value in values.items() if name not in names}


def comparable(messages: Iterable[Published], result: ResultBase | None = None) -> Any:
    """Return all about messages and the ids of their result as data, ids numbered in order."""
    parts = [{**vars(message), "data": message.plain.decode("latin-1")} for message in messages]
    announced = None if result is None else result.as_tuple()
    text = json.dumps([announced, parts], default=lambda value: f"{type(value)} {value!r}")
    numbers: dict[str, str] = {}
    return json.loads(
        ID.sub(lambda found: numbers.setdefault(found[0], f"id {len(numbers)}"), text)
    )
