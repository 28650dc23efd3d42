"""The broker, looked at from outside of kombu."""

import json
from types import TracebackType
from typing import Any, Self

from tests.servers import RedisServer

#: Number of the broker's database.
DATABASE = 1


class Broker:
    """What the broker has, as its Redis shows it."""

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client(db=DATABASE)

    def waiting(self) -> int:
        """Return how many workers wait for a message, and have taken none just now."""
        return len(_waiting(self._client.client_list()))

    def send_away(self) -> int:
        """
        End the waiting of all workers that wait for a message; return how many did.

        One that is stopped gets no message any more, since it can't begin to wait again.
        """
        waiting = _waiting(self._client.client_list())
        return sum(self._client.client_unblock(client) for client in waiting)

    def messages(self) -> list[str]:
        """Return the ids of all messages, given out or not."""
        _, waiting, given_out = self._look()
        messages = [json.loads(text) for text in waiting]
        messages += [json.loads(text)[0] for text in given_out]
        return sorted(message["headers"]["id"] for message in messages)

    def is_drained(self, workers: int) -> bool:
        """Tell whether there is no message, and all workers wait for one."""
        clients, waiting, given_out = self._look()
        return len(_waiting(clients)) == workers and not waiting and not given_out

    def _look(self) -> Any:
        with self._client.pipeline(transaction=True) as moment:
            return moment.client_list().lrange("celery", 0, -1).hvals("unacked").execute()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()


def _waiting(clients: list[dict[str, str]]) -> list[int]:
    return [int(one["id"]) for one in clients if one["cmd"] == "brpop" and "b" in one["flags"]]
