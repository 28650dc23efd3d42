"""Locks on lines that are slow, and on those that lose an answer."""

import select
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from django.core.cache.backends.locmem import LocMemCache
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, find_lock, iter_locks, release_lock
from django_celery_safe.leases.holder import HeldLock
from django_celery_safe.leases.store import Renewable
from django_celery_safe.locks import stores
from django_celery_safe.locks.stores import local, locate
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from django_celery_safe.locks.stores.local import LocalStore
from tests.conftest import REDIS_BACKENDS, MakeRedisCache
from tests.locks.lines import Line, line_to
from tests.processes import wait_for
from tests.servers import MemcachedServer, RedisServer

#: More bytes than any answer has.
WHOLE = 1000


@pytest.fixture
def redis_line(settings: Settings, redis_server: RedisServer) -> Iterator[Line]:
    """The line to Redis, where locks live."""
    with line_to(redis_server.port) as line:
        settings.CACHES = {
            "default": {
                "BACKEND": REDIS_BACKENDS["django-redis"],
                "LOCATION": f"redis://127.0.0.1:{line.port}/0",
                "KEY_PREFIX": f"line {line.port}",
            }
        }
        yield line


@pytest.fixture
def memcached_line(settings: Settings, memcached_server: MemcachedServer) -> Iterator[Line]:
    """The line to memcached, where locks live."""
    with line_to(memcached_server.port) as line:
        settings.CACHES = {
            "default": {
                "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
                "LOCATION": f"127.0.0.1:{line.port}",
                "KEY_PREFIX": f"line{line.port}",
            }
        }
        yield line


# Answers that get lost


@pytest.mark.parametrize("bytes_read", range(4))
@pytest.mark.parametrize("limit", [1, 3])
def test_a_request_whose_answer_is_lost_is_done_once(
    limit: int, bytes_read: int, redis_line: Line, losses: list[str]
) -> None:
    """A request whose answer is cut off takes no second place, and its lock is not lost."""
    locks = [cache_lock("cut off", renew=False, limit=limit) for _ in range(limit)]
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
    lock = cache_lock("cut off", renew=False)
    assert lock.acquire()
    monkeypatch.setattr(Client, "cas", cut)
    assert lock.release() is True
    assert cuts
    assert find_lock("cut off") is None
    assert not losses


def test_a_lock_freed_by_an_operator_is_lost_though_the_connection_broke(
    redis_line: Line, losses: list[str]
) -> None:
    """A release on a connection that had broken before it tells of a lock that was freed."""
    lock = cache_lock("freed", renew=False)
    assert lock.acquire()
    seen = find_lock("freed")
    assert seen is not None
    assert release_lock(seen)
    connection = locate().store()._wire._idle[-1]  # type: ignore[attr-defined]
    redis_line.drop()
    # The end of the connection has arrived.
    assert select.select([connection._connection._sock], [], [], 10)[0]
    assert lock.release() is False
    assert losses == ["freed"]


# Slow lines


class DistantCache(LocMemCache):
    """Chooses DistantStore."""


class DistantStore(LocalStore):
    """Takes its time over every answer, and gives up when it is told to."""

    takes = 0.0

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        """Acquire, and answer late."""
        outcome = super().take(request)
        time.sleep(self.takes)
        return outcome

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        """Extend, unless nobody waits for that."""
        if within is not None and within < self.takes:
            time.sleep(within)
            raise LockBackendError(self.where, "extend", "it is far away")
        time.sleep(self.takes)
        return super().extend(renewals, within)


@pytest.fixture
def distant(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DistantStore]]:
    """A store that is far away, where locks live."""
    path = f"{__name__}.DistantCache"

    monkeypatch.setitem(stores._MAKERS, path, DistantStore)
    settings.CACHES = {"default": {"BACKEND": path, "LOCATION": "distant"}}
    yield DistantStore
    DistantStore.takes = 0.0
    local.clear()


@pytest.mark.quarantine("2026-11-26", "answers in 0.8 s, 4 s lease")
@pytest.mark.parametrize(("short", "long", "takes"), [(4, 12, 0.8), (1, 6, 1.5)])
def test_a_short_lease_costs_no_longer_one(
    short: float, long: float, takes: float, distant: type[DistantStore], losses: list[str]
) -> None:
    """Beside a lock whose lease is too short for its line, or nearly so, a longer one is kept."""
    with (
        cache_lock("long", timeout=long) as lock,
        cache_lock("short", timeout=short) as short_lock,
    ):
        distant.takes = takes
        token = lock.token
        began = lock.lease.asked_at  # type: ignore[union-attr]
        wait_for(lambda: lock.lease.asked_at > began, 60, "it is not renewed")  # type: ignore[union-attr]
        assert lock.held
        assert lock.token == token
        # The one for which there is time is kept, too.
        assert short_lock.held or takes > short
        distant.takes = 0.0
    assert "long" not in losses


def test_a_lease_that_was_over_before_the_answer_came_is_an_error(
    distant: type[DistantStore],
) -> None:
    """acquire() is no True, and no False, for a lease that is over by then; nothing is held."""
    distant.takes = 0.2
    lock = cache_lock("late", timeout=0.1)
    with pytest.raises(LockBackendError, match=r"not in time: .* the lease of 0.1 s was over"):
        lock.acquire()
    assert not lock.held
    distant.takes = 0.0
    with cache_lock("late") as next_one:
        assert next_one


def test_the_last_release_waits_for_no_renewal(
    distant: type[DistantStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release does not wait for a renewal under way, whose connection closes after it."""
    monkeypatch.setattr(DistantStore, "connects_threads", True)
    asked, released = threading.Event(), threading.Event()
    extend = DistantStore.extend
    #: Others may be those of locks that tests before this one left to their leases.
    closed: list[DistantStore] = []

    def slow(self: DistantStore, *args: object) -> list[bool]:
        asked.set()
        assert released.wait(60)
        return extend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DistantStore, "extend", slow)
    monkeypatch.setattr(DistantStore, "close", lambda self: closed.append(self))
    lock = cache_lock("last", timeout=3)
    assert lock.acquire()
    assert asked.wait(10)
    assert lock.release()
    assert locate().store() not in closed
    released.set()
    wait_for(lambda: locate().store() in closed)


@pytest.mark.quarantine("2026-11-26", "mark left within 10 ms")
def test_a_lock_that_was_handed_on_leaves_the_list(
    settings: Settings, redis_cache_settings: MakeRedisCache, redis_server: RedisServer
) -> None:
    """A lock that was freed for a waiter who is gone stands on the list no more."""
    settings.CACHES = redis_cache_settings("django-redis")
    with cache_lock("handed on"):
        # It leaves its mark, and gives up.
        assert cache_lock("handed on").acquire(blocking_timeout=0.01) is False
    store = locate().store()
    assert list(iter_locks()) == []
    with redis_server.client() as admin:
        assert admin.zcard(store._keys[""].listing) == 0  # type: ignore[attr-defined]
