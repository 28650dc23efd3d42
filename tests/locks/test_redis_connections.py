"""The connections that locks in Redis use: they leave nothing open, and wait as told."""

import gc
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_celery_safe.locks.stores.redis_connections import Connections
from tests.locks.lines import connections_to
from tests.processes import wait_for
from tests.servers import RedisServer
from tests.statements import raising


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this module alone: connections of other tests may close at any time."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def before(redis_server: RedisServer) -> int:
    """How many connections there are without those of other tests."""
    gc.collect()
    return connections_to(redis_server.port)


def test_it_closes_with_its_owner(redis_server: RedisServer, before: int) -> None:
    """Connections that go out of use close, also as a part of a cycle."""
    with warnings.catch_warnings(), redis_server.client() as client:
        warnings.simplefilter("error")
        for _ in range(5):
            own = Connections(client)
            assert own.ask(("PING",)) == (b"PONG", False)
            own.itself = own  # type: ignore[attr-defined]
        assert connections_to(redis_server.port) > before
        del own
        gc.collect()
        assert connections_to(redis_server.port) == before


def test_an_interrupted_connection_is_closed(redis_server: RedisServer, before: int) -> None:
    """A connection that a signal interrupted before the answer came serves no other command."""
    handler = signal.signal(signal.SIGALRM, raising(SystemExit()))
    try:
        with redis_server.client() as client:
            own = Connections(client)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(SystemExit):
                own.ask(("BLPOP", "nothing here", "1"), within=10)
            assert connections_to(redis_server.port) == before
            assert own.ask(("ECHO", "another"), within=10)[0] == b"another"
            own.close()
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_a_greeting_has_no_numbers_for_hiredis(redis_server: RedisServer) -> None:
    """A time limit that hits while redis-py packs its greeting can't crash the interpreter."""
    with Redis.from_url(redis_server.url, db=2, protocol=3) as client:
        own = Connections(client)
        own.connect()
        (connection,) = own.idle
        packed = connection.pack_command("SELECT", 2, 1.5, b"x")
        assert packed == [b"*4\r\n$6\r\nSELECT\r\n$1\r\n2\r\n$3\r\n1.5\r\n$1\r\nx\r\n"]
        assert "Hiredis" not in type(connection._command_packer).__name__
        own.close()


def test_a_connection_opened_in_haste_is_not_for_others(
    redis_server: RedisServer, before: int
) -> None:
    """A request waits as long as its settings say, on a connection that another opened, too."""
    with Redis.from_url(redis_server.url, socket_timeout=30) as client:
        own = Connections(client)
        for _ in range(3):
            assert own.ask(("PING",), within=0.5)[0] == b"PONG"
        assert connections_to(redis_server.port) == before + 1
        # Three times as long as the first one waits.
        assert own.ask(("BLPOP", "nothing here", "1.5"))[0] is None
        assert connections_to(redis_server.port) == before + 1
        assert own.ask(("PING",), within=0.5)[0] == b"PONG"
        assert connections_to(redis_server.port) == before + 1
        own.close()
        assert connections_to(redis_server.port) == before


@pytest.mark.parametrize(("own", "within"), [(None, 0.2), (30, 0.2), (0.2, 30)])
def test_a_silent_server_is_given_up_in_time(
    own: float | None, within: float, fragile_redis: RedisServer
) -> None:
    """No connection to a silent server takes longer than asked, nor than the settings say."""
    options = {"socket_timeout": own, "socket_connect_timeout": own}
    with Redis.from_url(fragile_redis.url, **options) as client, ThreadPoolExecutor(1) as pool:
        with fragile_redis.silence():
            asked = pool.submit(Connections(client).ask, ("PING",), within=within)
            wait_for(asked.done, 10, "it waits still")
        assert isinstance(asked.exception(), TimeoutError | RedisTimeoutError)
