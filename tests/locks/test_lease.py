"""The thread that renews leases: what it renews, what it forgets, what it closes."""

import sys
import threading
import time
from collections.abc import Sequence

import pytest
from django.db import connections
from pytest_django import Settings

from django_celery_safe import CacheLock, HeldLock, cache_lock, find_lock, release_lock
from django_celery_safe.locks.stores.base import Renewal
from django_celery_safe.locks.stores.local import LocalStore
from django_celery_safe.signals import lock_backend_failed, lock_lost
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.processes import wait_for
from tests.servers import PostgresServer, RedisServer


def renewing_threads() -> list[threading.Thread]:
    """Return the threads that renew leases."""
    return [one for one in threading.enumerate() if one.name == "django_celery_safe leases"]


def test_an_abandoned_lock_is_forgotten_after_renewals(locks_in_memory: None) -> None:
    """A lock that was renewed and that nobody has any more ends with its lease."""
    lock: CacheLock | None = cache_lock("renewed, then abandoned", timeout=0.3)
    assert lock is not None
    assert lock.acquire()
    time.sleep(0.5)
    assert lock.held
    lock = None
    wait_for(lambda: find_lock("renewed, then abandoned") is None, 2, "it was renewed still")


def test_one_thread_renews_all(locks_in_memory: None) -> None:
    """Many locks are renewed by one thread, each in time."""
    locks = [cache_lock(f"many:{number}", timeout=0.4) for number in range(50)]
    assert all(lock.acquire() for lock in locks)
    assert len(renewing_threads()) == 1
    time.sleep(1.0)
    assert all(lock.held for lock in locks)
    assert all(lock.release() for lock in locks)


def test_a_connection_closes_though_other_locks_are_held(
    settings: Settings,
    make_database: MakeDatabase,
    postgres_server: PostgresServer,
    redis_cache_settings: MakeRedisCache,
) -> None:
    """With the last lock in one store the thread's connection there closes; others go on."""
    alias = make_database("postgres")
    settings.CACHES = redis_cache_settings("django-redis")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with cache_lock("in Redis", cache="default", timeout=0.4) as other:
        with cache_lock("in PostgreSQL", timeout=0.3) as lock:
            time.sleep(0.5)
            assert lock.held
            name = settings.DATABASES[alias]["NAME"]
            assert len(postgres_server.sessions(name)) == 2
        assert len(postgres_server.sessions(name)) == 1
        time.sleep(0.5)
        assert other.held


def test_a_store_that_is_gone_for_a_while_costs_no_lock(fragile_redis: RedisServer) -> None:
    """A renewal that fails is told, tried again, and the lease goes on if that was in time."""
    told: list[str] = []

    def listen(reason: str, **fields: object) -> None:
        told.append(reason)

    lock_backend_failed.connect(listen)
    try:
        with cache_lock("paused", timeout=3) as lock, fragile_redis.client() as admin:
            assert lock
            admin.config_set("maxclients", "1")
            admin.client_kill_filter(_type="normal", skipme=True)
            wait_for(lambda: told, 5, "no renewal failed")
            admin.config_set("maxclients", "100")
            wait_for(lambda: lock.remaining > 2, 5, "the lease was not renewed again")
            lock.ensure()
    finally:
        lock_backend_failed.disconnect(listen)
    assert "did not answer to extend" in told[0]


def test_a_broken_connection_of_the_thread_is_replaced(
    settings: Settings, make_database: MakeDatabase, postgres_server: PostgresServer
) -> None:
    """A renewing thread whose database connection was cut goes on with another."""
    alias = make_database("postgres")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with cache_lock("cut", timeout=1.2) as lock:
        name = settings.DATABASES[alias]["NAME"]
        wait_for(lambda: len(postgres_server.sessions(name)) == 2, 3, "nothing was renewed")
        with postgres_server.connect("postgres") as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [name],
            )
        time.sleep(1.5)
        assert lock.held
        connections[alias].close()
        lock.ensure()


def test_a_shorter_lease_is_renewed_in_time(locks_in_memory: None) -> None:
    """A lease that extend() made shorter is renewed by its new length."""
    with cache_lock("shorter", timeout=30) as lock:
        lock.extend(0.4)
        time.sleep(1.0)
        assert lock.held
        lock.ensure()


def test_only_one_request_at_a_time_moves_a_lease(
    locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """extend() waits for a renewal under way, so the store gets the last word last."""
    extend = LocalStore.extend

    def late(self: LocalStore, renewals: Sequence[Renewal]) -> list[bool]:
        if threading.current_thread() in renewing_threads():
            time.sleep(0.3)
        return extend(self, renewals)

    with cache_lock("moved", timeout=0.6) as lock:
        monkeypatch.setattr(LocalStore, "extend", late)
        time.sleep(0.25)
        lock.extend(60)
        found = find_lock("moved")
        assert found is not None
        assert found.remaining is not None
        assert found.remaining > 50


def test_a_lost_lease_is_lost_at_once(
    locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store says no, the lock is not held, before anybody asks for its new holder."""
    peek = LocalStore.peek
    asked = threading.Event()

    def late(self: LocalStore, name: str) -> HeldLock | None:
        if threading.current_thread() in renewing_threads():
            time.sleep(1.0)
            asked.set()
        return peek(self, name)

    with cache_lock("freed", timeout=3) as lock:
        seen = find_lock("freed")
        assert seen is not None
        assert release_lock(seen)
        monkeypatch.setattr(LocalStore, "peek", late)
        wait_for(lambda: not lock.held, 1.5, "it was held still")
        assert not asked.is_set()
    # The locks of the next test are not to wait for that.
    assert asked.wait(5)


def test_the_thread_outlives_what_its_receivers_do(locks_in_memory: None) -> None:
    """A receiver of lock_lost that exits takes neither the thread nor other locks along."""

    def leave(**fields: object) -> None:
        raise SystemExit

    lock_lost.connect(leave)
    try:
        with cache_lock("other", timeout=0.6) as other, cache_lock("lost", timeout=0.3) as lost:
            seen = find_lock("lost")
            assert seen is not None
            assert release_lock(seen)
            wait_for(lambda: not lost.held, 2, "the loss was not noticed")
            time.sleep(1.0)
            assert other.held
            lock_lost.disconnect(leave)
    finally:
        lock_lost.disconnect(leave)


def test_the_thread_outlives_locks_that_vanish(locks_in_memory: None) -> None:
    """Locks that are dropped while the thread looks at them do it no harm."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        ends_at = time.monotonic() + 1
        while time.monotonic() < ends_at:
            lock = cache_lock("vanishing", timeout=0.001)
            lock.acquire()
            del lock
    finally:
        sys.setswitchinterval(before)
    with cache_lock("stays", timeout=0.3) as lock:
        time.sleep(0.6)
        assert lock.held


def test_a_lock_that_is_released_before_its_turn_is_not_asked_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several stores that are due, one whose lock was released meanwhile gets no request."""
    memory = "django.core.cache.backends.locmem.LocMemCache"
    aliases = ["default", "second"]
    settings.CACHES = {alias: {"BACKEND": memory, "LOCATION": alias} for alias in aliases}
    asked: list[str] = []
    may_go_on = threading.Event()
    extend = LocalStore.extend

    def late(
        self: LocalStore, renewals: Sequence[Renewal], within: float | None = None
    ) -> list[bool]:
        asked.extend(renewal.name for renewal in renewals)
        assert may_go_on.wait(60)
        return extend(self, renewals, within)

    monkeypatch.setattr(LocalStore, "extend", late)
    locks = {alias: cache_lock(alias, cache=alias, timeout=3) for alias in aliases}
    try:
        assert all(lock.acquire() for lock in locks.values())
        wait_for(lambda: asked, 30, "nothing was renewed")
        # Both are due: the thread asks for the other one next.
        (name,) = asked
        (other,) = set(aliases) - {name}
        locks.pop(other).release()
        may_go_on.set()
        wait_for(lambda: len(asked) >= 2, 30, "nothing was renewed again")
        assert asked == [name, name]
    finally:
        may_go_on.set()
        for lock in locks.values():
            lock.release()
