"""The brokers of the runs: how to reach one, what it has, and how it is restarted."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import amqp

from tests.crashes.recorder import LastingRedis
from tests.runs.plan import VISIBILITY_TIMEOUT
from tests.servers import RabbitMQServer, RedisServer, Server

#: Name of the queue: Celery's own.
QUEUE: Final = "celery"

#: Longest wait for an answer where the package sets none, s.
SILENCE: Final = 2.0


class Broker(ABC):
    """What carries the messages."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the Django settings of who uses it."""

    @abstractmethod
    def waiting(self) -> int:
        """Return how many messages it has; those that a worker holds may count or not."""

    def restart(self) -> None:
        """Stop it and start it again; it keeps its messages."""
        raise NotImplementedError


class ServerBroker(Broker):
    """
    A server.

    Args:
        server: Is stopped and started; empty.
    """

    def __init__(self, server: Server) -> None:
        self.server = server

    def restart(self) -> None:
        self.server.restart()


class RedisBroker(ServerBroker):
    """Redis; one that is to be restarted must be lasting."""

    server: RedisServer

    def settings(self) -> dict[str, Any]:
        return {
            "CELERY_BROKER_URL": self.server.database_url(1),
            "CELERY_BROKER_TRANSPORT_OPTIONS": {
                "visibility_timeout": VISIBILITY_TIMEOUT,
                "unacked_restore_interval": 0.5,
                "unacked_restore_throttle": 1,
                "socket_timeout": SILENCE,
                "socket_connect_timeout": SILENCE,
            },
        }

    def waiting(self) -> int:
        with self.server.client(db=1) as client:
            return int(client.llen(QUEUE)) + int(client.hlen("unacked"))


class RabbitMQBroker(ServerBroker):
    """RabbitMQ."""

    def settings(self) -> dict[str, Any]:
        return {
            "CELERY_BROKER_URL": self.server.url,
            "CELERY_BROKER_TRANSPORT_OPTIONS": {"confirm_publish": True},
        }

    def waiting(self) -> int:
        with amqp.Connection(f"{self.server.host}:{self.server.port}") as connection:
            queue = connection.channel().queue_declare(QUEUE, passive=True)
        assert queue is not None
        return int(queue[1])


class FolderBroker(Broker):
    """
    A folder, which can't be restarted.

    Args:
        folder: New.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("messages", "taken", "control"):
            (folder / name).mkdir(parents=True)

    def settings(self) -> dict[str, Any]:
        messages = str(self.folder / "messages")
        return {
            "CELERY_BROKER_URL": "filesystem://",
            "CELERY_BROKER_TRANSPORT": "tests.runs.folder:Transport",
            "CELERY_BROKER_TRANSPORT_OPTIONS": {
                "data_folder_in": messages,
                "data_folder_out": messages,
                "control_folder": str(self.folder / "control"),
                # Who is killed with a message leaves it here, not in the machine's own folder.
                "processed_folder": str(self.folder / "taken"),
                "store_processed": True,
                "polling_interval": 0.02,
            },
        }

    def waiting(self) -> int:
        return sum(1 for _ in (self.folder / "messages").glob(f"*.{QUEUE}.msg"))


BROKERS: Final[dict[str, tuple[type[ServerBroker], type[Server]]]] = {
    "redis": (RedisBroker, LastingRedis),
    "rabbitmq": (RabbitMQBroker, RabbitMQServer),
}
