"""The store that a lock lives in, and places that are refused."""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker, Settings

from django_celery_safe import (
    ConfigurationError,
    LockBackendError,
    WrongTransaction,
    cache_lock,
    find_lock,
    iter_locks,
)
from django_celery_safe.leases.holder import HeldLock, Holder
from django_celery_safe.locks.stores import database, get_store, redis
from django_celery_safe.locks.stores.base import LockRequest
from django_celery_safe.locks.stores.database import DatabaseStore
from django_celery_safe.locks.stores.local import LocalStore
from django_celery_safe.models import DatabaseLock
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.conftest import MakeCaches, MakeDatabase
from tests.locks.renewals import acquired, get_lock, take_lock
from tests.servers import PostgresServer, RedisServer
from tests.servers.databases import migrate, postgres_settings, registered, without_autocommit

#: The backend of a cache and more of its settings, and what the error says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "django.core.cache.backends.filebased.FileBasedCache": (
        {},
        "a read and then a write.*Use Redis",
    ),
    "django.core.cache.backends.db.DatabaseCache": ({}, "taken again in between.*Use Redis"),
    "django.core.cache.backends.dummy.DummyCache": ({}, "every add.*Use Redis"),
    "django.core.cache.backends.memcached.PyMemcacheCache": (
        {"LOCATION": ["127.0.0.1:1", "unix:/no/such.sock"]},
        r"one of its several servers.*alias with one",
    ),
    "django_redis.cache.RedisCache": (
        {
            "LOCATION": ["redis://127.0.0.1:1/0", "redis://127.0.0.1:1/1"],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
        "several servers",
    ),
}


@pytest.mark.parametrize("backend", REFUSED)
def test_an_unsuitable_cache_is_refused(backend: str, settings: Settings, tmp_path: Path) -> None:
    """A cache on which two could hold one lock says so before it is used, and what to do."""
    more, sentence = REFUSED[backend]
    settings.CACHES = cache_at(str(tmp_path), backend, **more)
    with pytest.raises(ConfigurationError, match=sentence):
        cache_lock("x").acquire()


def test_keys_of_the_current_tenant_are_refused(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the KEY_FUNCTION of django-tenants, a thread without a tenant would renew other keys."""
    folder = tmp_path / "django_tenants"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "cache.py").write_text("def make_key(key, prefix, version): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = "django_tenants.cache.make_key"
    settings.CACHES = cache_at("redis://127.0.0.1:1/0", "django", KEY_FUNCTION=function)
    with pytest.raises(ConfigurationError, match=r"for each tenant.*without that KEY_FUNCTION"):
        cache_lock("x").acquire()
    monkeypatch.delitem(sys.modules, "django_tenants.cache")
    monkeypatch.delitem(sys.modules, "django_tenants")


def test_an_unknown_lock_database_is_named(settings: Settings) -> None:
    """LOCK_DATABASE with an alias that does not exist is an error that lists those that do."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "lock"}
    with pytest.raises(ConfigurationError, match="'lock', which DATABASES does not have"):
        cache_lock("x").acquire()


def test_a_missing_table_says_what_to_run(settings: Settings, make_database: MakeDatabase) -> None:
    """A lock database that was not migrated says which command to run."""
    alias = make_database("sqlite")
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE django_celery_safe_databaselock")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with pytest.raises(ConfigurationError, match=f"migrate .*--database={alias}"):
        cache_lock("x").acquire()


def test_a_lock_inside_atomic_on_its_own_database_is_refused(
    settings: Settings, sqlite_alias: str
) -> None:
    """A lock inside atomic() on the lock database would be invisible, and is refused."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": sqlite_alias}
    with transaction.atomic(using=sqlite_alias), pytest.raises(WrongTransaction, match="atomic"):
        cache_lock("x").acquire()
    with without_autocommit(sqlite_alias), pytest.raises(WrongTransaction):
        cache_lock("x").acquire()
    lock = acquired("x")
    # A release that is refused keeps the lock, which can be released after the transaction.
    with transaction.atomic(using=sqlite_alias), pytest.raises(WrongTransaction):
        lock.release()
    assert lock.held
    assert lock.release() is True
    assert find_lock("x") is None


def test_leases_and_fences_in_redis_are_rounded_up(
    in_redis: None, redis_server: RedisServer
) -> None:
    """A lease ends no earlier than its holder thinks; a fence grows, though a clock is set back."""
    assert redis._milliseconds(20.0004) == "20001"
    last = 9_000_000_000_000_000
    with redis_server.client() as client:
        client.set(":1:celery_safe:fence", last)
    with cache_lock("x") as lock:
        assert lock.fence == last + 1


class InPlainTestCase(TestCase):
    """TestCase's own transaction is no transaction, and its rows are seen by no other thread."""

    def test_locks_in_the_tests_own_database(self) -> None:
        """Locks work in the default database of a TestCase, and their lease is not renewed."""
        with self.settings(DJANGO_CELERY_SAFE={"LOCK_DATABASE": "default"}):
            with cache_lock("x", timeout=30) as lock:
                assert lock
                assert not cache_lock("x").acquire()
                assert get_lock("x").holder.renewed is False
            assert find_lock("x") is None


@pytest.mark.parametrize("kind", ["django-redis", "django"])
def test_two_round_trips(
    kind: str, settings: Settings, redis_cache_settings: MakeCaches, redis_server: RedisServer
) -> None:
    """Acquire and release cost one command each on the server."""
    settings.CACHES = redis_cache_settings(kind)  # type: ignore[arg-type]
    with cache_lock("warm up"):
        pass
    with redis_server.counting() as count, cache_lock("counted"):
        pass
    assert count.round_trips == 2


def test_django_redis_and_rediscache_share_a_lock(
    settings: Settings, redis_cache_settings: MakeCaches
) -> None:
    """The two Redis backends with one database and prefix see the same locks."""
    settings.CACHES = {
        **redis_cache_settings("django-redis", "default"),
        **redis_cache_settings("django", "other"),
    }
    with cache_lock("x") as lock:
        assert lock
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "other"}
        assert not cache_lock("x").acquire()


def test_a_gone_postgres_is_not_a_held_lock(
    settings: Settings, django_db_blocker: DjangoDbBlocker
) -> None:
    """With the lock database gone a request is a LockBackendError, and a body keeps its error."""
    with PostgresServer() as server, django_db_blocker.unblock():
        database = postgres_settings(server, "postgres")
        migrate(database)
        with registered("fragile", database):
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "fragile"}
            with pytest.raises(ZeroDivisionError), cache_lock("body"):
                server.stop()
                connections["fragile"].close()
                raise ZeroDivisionError
            with pytest.raises(LockBackendError, match="acquire"):
                cache_lock("x").acquire()
            server.start()
            with cache_lock("x") as lock:
                assert lock


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_strict_isolation_level_fails_no_free_lock(
    level: str, settings: Settings, make_database: MakeDatabase
) -> None:
    """On a database with stricter isolation, threads take locks of their own all the same."""
    from psycopg import IsolationLevel

    alias = make_database("postgres")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    options = connections.settings[alias]["OPTIONS"]
    options["isolation_level"] = IsolationLevel[level]
    connections[alias].close()
    del connections[alias]

    def take(number: int) -> int:
        try:
            for _ in range(15):
                with cache_lock(f"own:{number}") as lock:
                    assert lock
            return number
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(take, range(4))) == [0, 1, 2, 3]


@pytest.mark.sql
def test_two_statements(in_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acquire and release are a statement each; MySQL needs one more, for the answer."""
    monkeypatch.setattr(database, "PRUNES", 0)
    with cache_lock("warm up"):
        pass
    with CaptureQueriesContext(connections[in_database]) as asked, cache_lock("counted") as lock:
        assert lock
    assert len(asked) == (3 if connections[in_database].vendor == "mysql" else 2)


@pytest.mark.sql
def test_a_fence_outlives_its_lock_for_an_hour(
    in_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    After a release a lock is free, and its fence grows, whatever the server's clock says.

    Rows with a fence from long ago are deleted.
    """
    last = 9_000_000_000_000_000
    monkeypatch.setattr(database, "PRUNES", 0)
    rows = DatabaseLock.objects.using(in_database)
    with cache_lock("x") as lock, cache_lock("long-ago"), cache_lock("y"):
        rows.update(fence=last)
        found = get_lock("x")
    assert (found.fence, found.holder.pid) == (last, os.getpid())
    assert set(rows.values_list("token", "holder", "ends_at_us")) == {("", "", 0)}
    assert not list(iter_locks())
    rows.exclude(key="x").update(fence=1)
    monkeypatch.setattr(database, "PRUNES", 1)
    monkeypatch.setattr(database, "LOOKED_AT", 2)  # the first two, and then the last
    with lock:
        assert lock.fence == last + 1
    with lock:
        assert set(rows.values_list("key", flat=True)) == {"", "x"}


@pytest.mark.sql
def test_a_release_that_connects_is_no_repetition(in_database: str) -> None:
    """The work closed the connection, and the lock was lost: that is told."""
    lock = cache_lock("x")
    assert lock.acquire()
    DatabaseLock.objects.using(in_database).update(token="another's")
    connections[in_database].close()
    assert not lock.release()


@pytest.mark.sql
def test_a_message_that_is_delivered_twice_at_once_takes_one_place(
    in_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two deliveries, which saw both places free, gives its own back."""
    holder = Holder(task="t", task_id="twice")
    take_lock("x", "1" * 32, 30, holder, limit=2)
    look, looks = DatabaseStore._held, iter([[HeldLock("other"), None]])
    monkeypatch.setattr(
        DatabaseStore, "_held", lambda own, names: next(looks, None) or look(own, names)
    )
    met = get_store().take(LockRequest("x", "2" * 32, 30, holder, limit=2))
    assert isinstance(met, HeldLock)
    assert met.token == "1" * 32
    assert [lock.token for lock in iter_locks()] == ["1" * 32]


def test_waiters_back_off(
    locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody wakes it, a waiter of 3 s asks about seventeen times, and then gives up."""
    take, asked = LocalStore.take, list[float]()

    def count(store: LocalStore, request: LockRequest) -> object:
        asked.append(clock.now())
        return take(store, request)

    with cache_lock("awaited"):
        monkeypatch.setattr(LocalStore, "take", count)
        assert cache_lock("awaited", blocking_timeout=3).acquire() is False
    assert 12 <= len(asked) <= 22
    assert 3 <= asked[-1] - asked[0] < 3.01


def test_a_read_only_database_is_not_called_silent(settings: Settings, postgres_alias: str) -> None:
    """A replica's refusal says what it is and what to do, and not that nobody answered."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}
    read_only = {"options": "-c default_transaction_read_only=on"}
    connections[postgres_alias].settings_dict["OPTIONS"] = read_only
    with pytest.raises(LockBackendError, match=r"refused to acquire.*replica.*on the primary"):
        cache_lock("x").acquire()


# psycopg's pool


@pytest.fixture
def pooled(postgres_alias: str, settings: Settings) -> Iterator[str]:
    """The locks' database gives this process one connection at a time, and errors soon."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}
    connection: Any = connections[postgres_alias]
    pool = {"min_size": 0, "max_size": 1, "timeout": 3}
    connection.settings_dict["OPTIONS"] = {"pool": pool}
    yield postgres_alias
    connection.close_pool()


def test_renewal_does_not_wait_for_the_pool(pooled: str, clock: HeldClock) -> None:
    """A lease is renewed while its holder, or anyone else, has all connections of the pool."""
    with cache_lock("pooled", timeout=30) as lock:
        connections[pooled].ensure_connection()
        clock.advance(11)
        assert lock.remaining > 25
        connections[pooled].close()


def test_holders_leave_the_pool_to_others(pooled: str) -> None:
    """More threads hold locks at once than the pool has connections."""
    together = threading.Barrier(3)

    def hold(number: int) -> bool:
        with cache_lock(f"lock {number}") as lock:
            together.wait(20)
            return lock.held

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(hold, range(3)))
