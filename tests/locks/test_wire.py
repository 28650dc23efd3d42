"""The one connection that locks in Redis use: it leaves nothing open, and waits as told."""

import gc
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_celery_safe.locks.stores.wire import Wire
from tests.locks.lines import connections_to
from tests.processes import run_in_processes, wait_for
from tests.servers import RedisServer


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this module alone: connections of other tests may close at any time."""
    with RedisServer() as server:
        yield server


def test_it_closes_with_its_owner(redis_server: RedisServer) -> None:
    """A wire that goes out of use closes its connection, also as a part of a cycle."""
    gc.collect()  # what other tests left
    before = connections_to(redis_server.port)
    with warnings.catch_warnings(), redis_server.client() as client:
        warnings.simplefilter("error")
        for _ in range(5):
            wire = Wire(client)
            assert wire.ask("PING") == b"PONG"
            wire.itself = wire  # type: ignore[attr-defined]
        assert connections_to(redis_server.port) > before
        del wire
        gc.collect()
        assert connections_to(redis_server.port) == before


def test_an_interrupted_connection_is_closed(redis_server: RedisServer) -> None:
    """A connection that a signal interrupted before the answer came serves no other command."""

    def interrupt(*args: object) -> None:
        raise SystemExit

    gc.collect()  # what other tests left
    before = connections_to(redis_server.port)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with redis_server.client() as client:
            wire = Wire(client)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(SystemExit):
                wire.ask("BLPOP", "nothing here", "1", within=10)
            assert connections_to(redis_server.port) == before
            assert wire.ask("ECHO", "another", within=10) == b"another"
            wire.close()
    finally:
        signal.signal(signal.SIGALRM, handler)


class Interrupted(float):
    """A number that can't be written down: a time limit hits each time."""

    def __str__(self) -> str:
        raise SoftTimeLimitExceeded

    __repr__ = __str__


def test_numbers_are_text_before_they_are_packed(redis_server: RedisServer) -> None:
    """A time limit that hits while a command is packed is an error, and no crash of hiredis."""
    assert run_in_processes(pack_numbers, 1, redis_server.url) == [
        [b"1", b"2.5", b"-3", b"x", b"\xff", "interrupted", b"alive"]
    ]


def pack_numbers(url: str) -> list[object]:
    """Return what the server makes of numbers, texts, and a number that is interrupted."""
    with Redis.from_url(url) as client:
        wire = Wire(client)
        answers: list[object] = [wire.ask("ECHO", one) for one in (1, 2.5, -3, "x", b"\xff")]
        try:
            wire.ask("ECHO", Interrupted(1))
        except SoftTimeLimitExceeded:
            answers.append("interrupted")
        answers.append(wire.ask("ECHO", "alive"))
        wire.close()
    return answers


def test_a_connection_opened_in_haste_is_not_for_others(redis_server: RedisServer) -> None:
    """A request waits as long as its settings say, on a connection that another opened, too."""
    gc.collect()  # what other tests left
    before = connections_to(redis_server.port)
    with Redis.from_url(redis_server.url, socket_timeout=30) as client:
        wire = Wire(client)
        for _ in range(3):
            assert wire.ask("PING", within=0.5) == b"PONG"
        assert connections_to(redis_server.port) == before + 1
        # Three times as long as the first one waits.
        assert wire.ask("BLPOP", "nothing here", "1.5") is None
        assert connections_to(redis_server.port) == before + 1
        assert wire.ask("PING", within=0.5) == b"PONG"
        assert connections_to(redis_server.port) == before + 1
        wire.close()
        assert connections_to(redis_server.port) == before


@pytest.mark.parametrize(("own", "within"), [(None, 0.2), (30, 0.2), (0.2, 30)])
def test_a_silent_server_is_given_up_in_time(
    own: float | None, within: float, fragile_redis: RedisServer
) -> None:
    """No connection to a silent server takes longer than asked, nor than the settings say."""
    options = {"socket_timeout": own, "socket_connect_timeout": own}
    with Redis.from_url(fragile_redis.url, **options) as client, ThreadPoolExecutor(1) as pool:
        fragile_redis.pause()
        try:
            asked = pool.submit(Wire(client).ask, "PING", within=within)
            wait_for(asked.done, 10, "it waits still")
        finally:
            fragile_redis.resume()
        assert isinstance(asked.exception(), TimeoutError | RedisTimeoutError)
