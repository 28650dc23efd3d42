"""The one connection that locks in Redis use: it leaves nothing open."""

import gc
import warnings

import psutil
import pytest
from redis.exceptions import ResponseError

from django_celery_safe.locks.stores.wire import Wire
from tests.servers import RedisServer


def connections_to(server: RedisServer) -> int:
    """Return how many connections this process has to the server."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port == server.port for one in found)


def test_it_closes_with_its_owner(redis_server: RedisServer) -> None:
    """A wire that goes out of use closes its connection, also as a part of a cycle."""
    gc.collect()  # what other tests left
    before = connections_to(redis_server)
    with warnings.catch_warnings(), redis_server.client() as client:
        warnings.simplefilter("error")
        for _ in range(5):
            wire = Wire(client)
            assert wire.ask("PING") == b"PONG"
            wire.itself = wire  # type: ignore[attr-defined]
        assert connections_to(redis_server) > before
        del wire
        gc.collect()
        assert connections_to(redis_server) == before


def test_it_closes_when_told(redis_server: RedisServer) -> None:
    """close() closes the connection, and the next command opens another."""
    before = connections_to(redis_server)
    with redis_server.client() as client:
        wire = Wire(client)
        assert wire.ask("ECHO", "one") == b"one"
        assert connections_to(redis_server) == before + 1
        wire.close()
        assert connections_to(redis_server) == before
        assert wire.ask("ECHO", "two") == b"two"
        wire.close()


def test_an_error_of_the_server_is_an_answer(redis_server: RedisServer) -> None:
    """An error that the server answers with leaves the connection as it was."""
    with redis_server.client() as client:
        wire = Wire(client)
        assert wire.ask("PING") == b"PONG"
        before = list(wire._idle)
        with pytest.raises(ResponseError, match="unknown command"):
            wire.ask("NO-SUCH-COMMAND")
        assert wire.ask("PING") == b"PONG"
        assert wire._idle == before
        wire.close()
