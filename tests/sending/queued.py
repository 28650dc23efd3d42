"""The messages in the queues of a private Redis or RabbitMQ, read without Celery."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import amqp
from celery.result import ResultBase

from tests.sending.published import BROKER_DATABASE, UUID, Published, take_published
from tests.servers import RabbitMQServer, RedisServer

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
