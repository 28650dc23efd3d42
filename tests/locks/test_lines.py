"""Locks on lines that are slow, lose an answer, or fall silent."""

import select
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, find_lock, iter_locks
from django_celery_safe.leases.holder import HeldLock, Holder
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.local import LocalStore
from django_celery_safe.locks.stores.redis_connections import Connections
from tests.clock import HeldClock
from tests.conftest import MakeCaches, MakeDatabase
from tests.locks.hanging import hanging
from tests.locks.lines import Line, line_to
from tests.locks.renewals import acquired, free
from tests.processes import wait_for
from tests.servers import MemcachedServer, RedisServer
from tests.servers.databases import DatabaseKind


@pytest.fixture
def redis_line(
    settings: Settings, redis_server: RedisServer, redis_cache_settings: MakeCaches
) -> Iterator[Line]:
    """The line to Redis, where locks live."""
    with line_to(redis_server.port) as line:
        url = f"redis://127.0.0.1:{line.port}/0"
        settings.CACHES = redis_cache_settings("django-redis", LOCATION=url)
        yield line


@pytest.fixture
def memcached_line(
    settings: Settings, memcached_server: MemcachedServer, memcached_cache_settings: Any
) -> Iterator[Line]:
    """The line to memcached, where locks live."""
    with line_to(memcached_server.port) as line:
        settings.CACHES = memcached_cache_settings(LOCATION=f"127.0.0.1:{line.port}")
        yield line


# Answers that get lost


@pytest.mark.parametrize(("limit", "bytes_read"), [(1, 0), (1, 3), (3, 0), (3, 2)])
def test_a_request_whose_answer_is_lost_is_done_once(
    limit: int, bytes_read: int, redis_line: Line, losses: list[str]
) -> None:
    """A request whose answer is cut off takes no second place, and its lock is not lost."""
    locks = [cache_lock("cut off", limit=limit) for _ in range(limit)]
    # Each look makes a new connection, so that it is the request's own answer that is cut off.
    for number, lock in enumerate(locks):
        assert len(list(iter_locks())) == number
        redis_line.cut_after = bytes_read
        assert lock.acquire()
    for number, lock in enumerate(locks):
        assert len(list(iter_locks())) == limit - number
        redis_line.cut_after = bytes_read
        assert lock.release() is True
    assert list(iter_locks()) == []
    assert not losses


def test_a_release_at_memcached_whose_answer_is_lost_has_released(
    memcached_line: Line, losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that memcached did, and whose answer is cut off, is no loss of the lock."""
    from pymemcache.client.base import Client

    cas = Client.cas

    def cut(self: Client, *args: object, **options: object) -> object:
        if not cuts:
            cuts.append(0)
            memcached_line.cut_after = 0
        return cas(self, *args, **options)

    cuts: list[int] = []
    lock = acquired("cut off")
    monkeypatch.setattr(Client, "cas", cut)
    assert lock.release() is True
    assert cuts
    assert find_lock("cut off") is None
    assert not losses


def test_a_lock_freed_by_an_operator_is_lost_though_the_connection_broke(
    redis_line: Line, losses: list[str]
) -> None:
    """A release on a connection that had broken before it tells of a lock that was freed."""
    lock = acquired("freed")
    free("freed")
    connection = get_store()._connections.idle[-1]  # type: ignore[attr-defined]
    redis_line.drop()
    # The end of the connection has arrived.
    assert select.select([connection._sock], [], [], 10)[0]
    assert lock.release() is False
    assert losses == ["freed"]


# Slow lines


def test_a_lease_that_was_over_before_the_answer_came_is_an_error(
    locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """acquire() is no True, and no False, for a lease that is over by then; nothing is held."""
    take = LocalStore.take

    def answer_late(*request: Any) -> Acquired | HeldLock:
        outcome = take(*request)
        clock.jump(31)
        return outcome

    monkeypatch.setattr(LocalStore, "take", answer_late)
    lock = cache_lock("late", timeout=30)
    with pytest.raises(LockBackendError, match=r"not in time: .* the lease of 30 s was over"):
        lock.acquire()
    assert not lock.held
    assert find_lock("late") is None


def test_a_greeting_is_no_part_of_the_lease(
    in_redis: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease begins with its request, however long it took to connect to the server."""
    open_connection = Connections._open

    def open_late(own: Connections, within: float | None = None) -> Any:
        clock.jump(31)
        return open_connection(own, within)

    monkeypatch.setattr(Connections, "_open", open_late)
    with cache_lock("greeted", timeout=30) as lock:
        assert lock.remaining > 29


def test_the_last_release_waits_for_no_renewal(
    locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release does not wait for a renewal under way, whose connection closes after it."""
    monkeypatch.setattr(LocalStore, "connects_threads", True)
    #: Others may be those of locks that tests before this one left to their leases.
    closed: list[LocalStore] = []
    monkeypatch.setattr(LocalStore, "close", lambda store: closed.append(store))
    lock = acquired("last", timeout=30)
    with hanging("extend") as extending:
        clock.jump(11, settle=False)
        assert extending.wait(10)
        assert lock.release()
        assert get_store() not in closed
    wait_for(lambda: get_store() in closed)


def test_a_lock_that_was_handed_on_leaves_the_list(
    in_redis: None, redis_server: RedisServer
) -> None:
    """A lock that was freed for a waiter who is gone stands on the list no more."""
    store = get_store()
    with cache_lock("handed on"):
        # A waiter leaves its mark, and gives up.
        met = store.take(LockRequest("handed on", "w" * 32, 60, Holder(), 0.0))
        assert isinstance(met, HeldLock)
    assert list(iter_locks()) == []
    with redis_server.client() as admin:
        assert admin.zcard(store._listing) == 0  # type: ignore[attr-defined]


# Silent lines

LEASE = 30


@pytest.fixture
def line(db_kind: DatabaseKind, make_database: MakeDatabase, settings: Settings) -> Iterator[Line]:
    """The line to the database where locks and records live; a file has none."""
    alias = make_database("mariadb" if db_kind == "mariadb" else "postgres")
    database: dict[str, Any] = connections.settings[alias]
    with line_to(int(database["PORT"])) as line:
        database["PORT"] = str(line.port)
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        yield line
        connections[alias].close()


@pytest.mark.sql
def test_a_lock_outlives_the_silence_of_the_connection_that_renews_it(
    line: Line, losses: list[str], clock: HeldClock
) -> None:
    """While the database answers elsewhere, this and later locks of that length are renewed."""
    with cache_lock("held", timeout=LEASE) as lock:
        own = line.count
        clock.advance(11)
        assert line.count > own
        # The connection of the thread that renews, which has just been opened.
        line.silence()
        clock.jump(11, settle=False)
        assert line.swallowed.wait(30), "nothing is renewed"
        lock.ensure()
        lock.extend(LEASE + 1)
        with cache_lock("later", timeout=LEASE) as later:
            # The thread that hangs is replaced after two fifths of its lease.
            clock.jump(13, settle=False)
            wait_for(lambda: later.remaining > 25 and lock.remaining > 25, 30, "not renewed")
    assert not losses
