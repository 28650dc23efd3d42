"""The brokers: how a process reaches one, what it has, and how it is restarted."""

import json
from pathlib import Path
from typing import Any, Final, TypeAlias

import amqp
import psutil

from tests.servers import RabbitMQServer, RedisServer

#: Name of the queue: Celery's own.
QUEUE: Final = "celery"

#: Number of Redis's database that is the broker's.
DATABASE: Final = 1

#: Longest wait for an answer of Redis where the package sets none, s.
SILENCE: Final = 2.0


class LastingRedis(RedisServer):
    """Redis that has everything on the disk before it answers."""

    def command(self) -> list[str | Path]:
        """Append each change to a file, and wait for the disk."""
        command = super().command()
        command[command.index("--appendonly") + 1] = "yes"
        return [*command, "--appendfsync", "always"]


class RedisBroker:
    """
    Redis, looked at from outside of kombu; only a lasting one keeps messages over a restart.

    Args:
        server: Empty.
        visibility_timeout: After so many seconds it redelivers; None: kombu's default.
    """

    def __init__(self, server: RedisServer, visibility_timeout: float | None = None) -> None:
        self.server = server
        self._options = {"socket_timeout": SILENCE, "socket_connect_timeout": SILENCE}
        if visibility_timeout is not None:
            self._options |= {
                "visibility_timeout": visibility_timeout,
                "unacked_restore_interval": 0.5,
                "unacked_restore_throttle": 1,
            }

    def settings(self) -> dict[str, Any]:
        """Return the Django settings of its clients."""
        return {
            "CELERY_BROKER_URL": self.server.database_url(DATABASE),
            "CELERY_BROKER_TRANSPORT_OPTIONS": self._options,
        }

    def flush(self) -> None:
        """Let it lose what waits in it."""
        self.server.flush()

    def waiting(self) -> int:
        """Return how many messages it has, given out or not."""
        return len(self.headers())

    def idle_workers(self) -> int:
        """Return how many workers wait for a message, and have taken none just now."""
        return len(_idle(self._look()[0]))

    def send_away(self, pid: int) -> bool:
        """
        End the waiting of a paused worker for a message; return whether it did wait.

        It gets no message any more, since it can't begin to wait again.
        """
        ports = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp")}
        with self.server.client(db=DATABASE) as admin:
            clients = admin.client_list()
            its = [one for one in clients if int(one["addr"].rpartition(":")[2]) in ports]
            return any(admin.client_unblock(client) for client in _idle(its))

    def headers(self) -> list[dict[str, Any]]:
        """Return the headers of all messages, given out or not."""
        _, waiting, given_out = self._look()
        messages = [json.loads(text) for text in waiting]
        messages += [json.loads(text)[0] for text in given_out]
        return [message["headers"] for message in messages]

    def is_drained(self, workers: int) -> bool:
        """Return whether there is no message, and all workers wait for one."""
        clients, waiting, given_out = self._look()
        return len(_idle(clients)) == workers and not waiting and not given_out

    def _look(self) -> Any:
        """Return the clients, the messages that wait, and those given out, at one moment."""
        with self.server.client(db=DATABASE) as client, client.pipeline(transaction=True) as moment:
            clients: Any = moment.client_list()
            return clients.lrange(QUEUE, 0, -1).hvals("unacked").execute()


def _idle(clients: list[dict[str, str]]) -> list[int]:
    waiting = [one for one in clients if one["cmd"] == "brpop" and "b" in one["flags"]]
    return [int(one["id"]) for one in waiting]


class RabbitMQBroker:
    """RabbitMQ, with the same methods."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server

    def settings(self) -> dict[str, Any]:
        """Return the Django settings of its clients."""
        return {
            "CELERY_BROKER_URL": self.server.url,
            "CELERY_BROKER_TRANSPORT_OPTIONS": {"confirm_publish": True},
        }

    def flush(self) -> None:
        """Let it lose what waits in it."""
        with self._connect() as connection:
            connection.channel().queue_purge(QUEUE)

    def waiting(self) -> int:
        """Return how many messages it has; those that a worker holds do not count."""
        with self._connect() as connection:
            queue: Any = connection.channel().queue_declare(QUEUE, passive=True)
        return int(queue[1])

    def _connect(self) -> Any:
        return amqp.Connection(f"{self.server.host}:{self.server.port}")


#: The server that carries the messages.
Broker: TypeAlias = RedisBroker | RabbitMQBroker
