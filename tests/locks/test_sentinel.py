"""Locks in a Redis that Sentinel watches, through django-redis: a failover moves them along."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.cache import cache
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, iter_locks
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.locks.lines import connections_to
from tests.locks.renewals import is_answered, wait_and_release
from tests.processes import wait_for
from tests.servers import RedisServer, SentinelServer


@pytest.fixture
def sentinel(settings: Settings) -> Iterator[SentinelServer]:
    """A Sentinel of this test alone; locks live in its master by django-redis' client for it."""
    with SentinelServer() as server:
        settings.DJANGO_REDIS_CONNECTION_FACTORY = "django_redis.pool.SentinelConnectionFactory"
        options = {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "SENTINELS": [(server.host, server.port)],
            "SENTINEL_KWARGS": {"socket_timeout": 1},
            "SOCKET_TIMEOUT": 1,
            "SOCKET_CONNECT_TIMEOUT": 1,
        }
        settings.CACHES = cache_at(server.url, OPTIONS=options)
        yield server


def holds(server: RedisServer, name: str) -> bool:
    """Whether this server itself has the lock's key."""
    with server.client() as client:
        return bool(client.exists(cache.make_key(f"celery_safe:lock:{name}")))


def replicate(server: RedisServer) -> None:
    """Wait until the master's replica has what the master has."""
    with server.client() as client:
        offset = client.info("replication")["master_repl_offset"]
        wait_for(lambda: client.info("replication")["slave0"]["offset"] >= offset)


def test_a_planned_failover_costs_no_lock(sentinel: SentinelServer, clock: HeldClock) -> None:
    """Locks that the replica has are held, excluded and renewed in it after a planned failover."""
    with cache_lock("renewed", timeout=600) as lock, cache_lock("asked") as other:
        replicate(sentinel.first)
        sentinel.fail_over()
        # The old master is a replica and has the connections still: it refuses to write.
        wait_for(lambda: is_answered(lambda: not cache_lock("asked").acquire()), 40)
        other.ensure()
        lock.ensure()
        clock.advance(201)
        if lock.remaining < 500:  # the first renewal may have met the old master
            clock.advance(60)
        assert lock.remaining > 500
        with cache_lock("new") as new:
            assert new
            assert holds(sentinel.second, "new")
        assert other.release()
        assert not holds(sentinel.second, "asked")
    assert connections_to(sentinel.first.port) == 0


def test_a_killed_master_is_replaced(sentinel: SentinelServer) -> None:
    """With the master killed nobody is told that a lock is held; then the replica has them all."""
    with ThreadPoolExecutor(1) as pool, cache_lock("before", timeout=60) as lock:
        waiting = pool.submit(wait_and_release, "before")
        sentinel.first.wait_for_waiters()
        replicate(sentinel.first)
        sentinel.first.kill()
        with pytest.raises(LockBackendError, match="acquire"):
            cache_lock("after").acquire()
        after = cache_lock("after")
        wait_for(lambda: is_answered(after.acquire), 40, "no lock could be taken")
        assert holds(sentinel.second, "after")
        assert after.fence > lock.fence  # type: ignore[operator]
        lock.ensure()
        assert not cache_lock("before").acquire()
        assert after.release()
        assert lock.release()
        # It may have asked while there was no master, but no other holder has the lock.
        with contextlib.suppress(LockBackendError):
            assert waiting.result(60) is True
    assert not list(iter_locks())
