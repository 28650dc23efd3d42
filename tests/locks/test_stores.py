"""The store that a lock lives in, and places that are refused."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.memcached import PyMemcacheCache
from django.core.cache.backends.redis import RedisCache
from django.db import connections, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker, Settings

from django_celery_safe import (
    BackendNotSupported,
    CacheLock,
    ConfigurationError,
    LockBackendError,
    WrongTransaction,
    cache_lock,
    find_lock,
    iter_locks,
)
from django_celery_safe.conf import UNSET
from django_celery_safe.leases.holder import Holder
from django_celery_safe.locks.stores import base, locate
from django_celery_safe.locks.stores.base import Acquired, Store
from django_celery_safe.locks.stores.database import DatabaseStore
from django_celery_safe.locks.stores.local import LocalStore, set_pool_processes
from django_celery_safe.locks.stores.memcached import MemcachedStore
from django_celery_safe.locks.stores.portable import PortableStore
from django_celery_safe.locks.stores.redis import RedisStore
from tests.conftest import CacheSettings, MakeDatabase, MakeRedisCache, require
from tests.locks.test_portable import DictCache
from tests.processes import run_in_processes, start_in_process, tell, wait_for
from tests.servers import MemcachedServer, PostgresServer, RedisServer, ServerPool
from tests.servers.databases import migrate, postgres_settings, registered, without_autocommit

REFUSED = {
    "django.core.cache.backends.filebased.FileBasedCache": "a read and then a write",
    "django.core.cache.backends.db.DatabaseCache": "taken again in between",
    "django.core.cache.backends.dummy.DummyCache": "every add",
}


@pytest.mark.parametrize("backend", REFUSED)
def test_an_unsuitable_cache_is_refused(backend: str, settings: Settings, tmp_path: object) -> None:
    """A cache on which two could hold one lock says so, and what to use instead."""
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": str(tmp_path)}}
    with pytest.raises(BackendNotSupported, match=f"{REFUSED[backend]}.*Use Redis"):
        cache_lock("x").acquire()


def test_a_sharding_client_is_refused(settings: Settings) -> None:
    """django-redis with a client that shards is refused, though it is a Redis."""
    settings.CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": ["redis://127.0.0.1:1/0", "redis://127.0.0.1:1/1"],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        }
    }
    with pytest.raises(BackendNotSupported, match="several servers"):
        cache_lock("x").acquire()


@pytest.mark.parametrize(
    "backend",
    [
        "django.core.cache.backends.redis.RedisCache",
        "django.core.cache.backends.memcached.PyMemcacheCache",
        "diskcache.DjangoCache",
    ],
)
def test_keys_of_the_current_tenant_are_refused(
    backend: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the KEY_FUNCTION of django-tenants, a thread without a tenant would renew other keys."""
    folder = tmp_path / "django_tenants"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "cache.py").write_text("def make_key(key, prefix, version): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"BACKEND": backend, "LOCATION": str(tmp_path / "cache")}
    settings.CACHES = {"default": {**entry, "KEY_FUNCTION": "django_tenants.cache.make_key"}}
    with pytest.raises(BackendNotSupported, match=r"for each tenant.*without that KEY_FUNCTION"):
        cache_lock("x").acquire()
    monkeypatch.delitem(sys.modules, "django_tenants.cache")
    monkeypatch.delitem(sys.modules, "django_tenants")


SEVERAL_SERVERS: list[Any] = [
    "127.0.0.1:1,127.0.0.1:2",
    "127.0.0.1:1;127.0.0.1:2",
    ["127.0.0.1:1", "unix:/no/such.sock"],
]


@pytest.mark.parametrize("location", SEVERAL_SERVERS, ids=str)
@pytest.mark.parametrize("name", ["PyMemcacheCache", "PyLibMCCache"])
def test_several_memcached_servers_are_refused(
    name: str, location: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client of several memcached servers is refused before it is used, since locks move."""
    # The library that PyLibMCCache imports can't be had without a compiler.
    pylibmc = SimpleNamespace(Client=None, NotFound=KeyError)
    monkeypatch.setitem(sys.modules, "pylibmc", pylibmc)
    backend = f"django.core.cache.backends.memcached.{name}"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}
    with pytest.raises(BackendNotSupported, match=r"one of its several servers.*alias with one"):
        cache_lock("x").acquire()


@pytest.mark.parametrize(
    ("backend", "store"),
    [
        ("django_redis.cache.RedisCache", RedisStore),
        ("django.core.cache.backends.redis.RedisCache", RedisStore),
        ("django_valkey.cache.ValkeyCache", RedisStore),
        ("django.core.cache.backends.memcached.PyMemcacheCache", MemcachedStore),
        ("django.core.cache.backends.locmem.LocMemCache", LocalStore),
        ("diskcache.DjangoCache", PortableStore),
        ("tests.locks.test_stores.OwnRedisCache", RedisStore),
        ("tests.locks.test_stores.OwnMemcachedCache", MemcachedStore),
        ("tests.locks.test_stores.OwnCache", PortableStore),
    ],
)
def test_each_cache_has_its_store(
    backend: str, store: type[Store], settings: Settings, tmp_path: Path
) -> None:
    """A known cache, or a subclass of one, has a store of its own; any other the portable one."""
    locations = {RedisStore: "redis://127.0.0.1:1/0", MemcachedStore: "127.0.0.1:1"}
    location = locations.get(store, str(tmp_path))
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}
    assert type(locate().store()) is store


class OwnRedisCache(RedisCache):
    """A project's own subclass of a backend of Django."""


class OwnMemcachedCache(PyMemcacheCache):
    """Another."""


class OwnCache(BaseCache):
    """A backend that nobody knows."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)


def test_local_memory_is_refused_in_a_pool_of_processes(locks_in_memory: None) -> None:
    """A worker pool of several processes can't share locks in LocMemCache."""
    set_pool_processes(4)
    try:
        with pytest.raises(BackendNotSupported, match=r"4 processes.*--pool=threads"):
            cache_lock("x").acquire()
    finally:
        set_pool_processes(1)


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
    with cache_lock("x") as lock:
        assert lock


class InPlainTestCase(TestCase):
    """TestCase's own transaction is no transaction, and its rows are seen by no other thread."""

    def test_locks_in_the_tests_own_database(self) -> None:
        """Locks work in the default database of a TestCase, and their lease is not renewed."""
        with self.settings(DJANGO_CELERY_SAFE={"LOCK_DATABASE": "default"}):
            with cache_lock("x", timeout=30) as lock:
                assert lock
                assert not cache_lock("x").acquire()
                found = find_lock("x")
                assert found is not None
                assert found.holder.renewed is False
            assert find_lock("x") is None


def test_a_gone_redis_is_not_a_held_lock(fragile_redis: RedisServer) -> None:
    """With Redis gone each request is a LockBackendError; once it is back, locks work again."""
    held = cache_lock("held", timeout=30)
    assert held.acquire()
    fragile_redis.stop()
    try:
        with pytest.raises(LockBackendError, match=r"redis.*did not answer to acquire"):
            cache_lock("x").acquire()
        with pytest.raises(LockBackendError, match="extend"):
            held.ensure()
        with pytest.raises(LockBackendError, match="release"):
            held.release()
    finally:
        fragile_redis.start()
    # The server came back with an empty memory: the lock is lost, and that is known.
    with cache_lock("held") as lock:
        assert lock


def test_a_body_keeps_its_own_error_when_redis_is_gone(
    fragile_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A release that fails hides neither the body's error nor its result; it is logged."""
    try:
        with pytest.raises(ZeroDivisionError), cache_lock("body"):
            fragile_redis.stop()
            raise ZeroDivisionError
    finally:
        if not fragile_redis.running:
            fragile_redis.start()
    assert "could not be released and ends by its lease" in caplog.text
    try:
        with cache_lock("body 2"):
            fragile_redis.stop()
    finally:
        if not fragile_redis.running:
            fragile_redis.start()


def test_scripts_survive_a_flush(
    settings: Settings, redis_cache_settings: MakeRedisCache, redis_server: RedisServer
) -> None:
    """Locks work on when the server has forgotten its scripts."""
    settings.CACHES = redis_cache_settings("django-redis")
    with cache_lock("scripts") as lock, redis_server.client() as client:
        client.script_flush()
        lock.ensure()
        client.script_flush()
    with cache_lock("scripts") as lock:
        assert lock


@pytest.mark.parametrize("kind", ["django-redis", "django"])
def test_two_round_trips(
    kind: str,
    settings: Settings,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
) -> None:
    """Acquire and release, renewed or not, cost one command each on the server."""
    settings.CACHES = redis_cache_settings(kind)  # type: ignore[arg-type]
    with cache_lock("warm up"):
        pass
    with redis_server.counting() as count:
        for renew in (True, False):
            with cache_lock("counted", renew=renew):
                pass
    assert count.round_trips == 4


def test_caches_with_different_prefixes_do_not_meet(
    settings: Settings, redis_cache_settings: MakeRedisCache
) -> None:
    """KEY_PREFIX and VERSION keep the locks of two projects in one Redis apart."""
    settings.CACHES = {
        **redis_cache_settings("django-redis", "default", KEY_PREFIX="one"),
        **redis_cache_settings("django", "other", KEY_PREFIX="two"),
        **redis_cache_settings("django", "newer", KEY_PREFIX="two", VERSION=2),
    }
    locks = [cache_lock("x", cache=alias) for alias in ("default", "other", "newer")]
    assert all(lock.acquire() for lock in locks)
    assert all(lock.release() for lock in locks)


def test_django_redis_and_rediscache_share_a_lock(
    settings: Settings, redis_cache_settings: MakeRedisCache
) -> None:
    """The two Redis backends with one database and prefix see the same locks."""
    settings.CACHES = {
        **redis_cache_settings("django-redis", "default"),
        **redis_cache_settings("django", "other"),
    }
    with cache_lock("x") as lock:
        assert lock
        assert not cache_lock("x", cache="other").acquire()


def test_a_garbled_value_is_someone_unknown(
    settings: Settings, redis_cache_settings: MakeRedisCache, redis_server: RedisServer
) -> None:
    """Something foreign under a lock's key is a held lock of an unknown holder, no crash."""
    settings.CACHES = redis_cache_settings("django-redis")
    with redis_server.client() as client:
        client.set(":1:celery_safe:lock:garbled", b"\xff\x00not ours")
    lock = cache_lock("garbled")
    assert lock.acquire() is False
    found = find_lock("garbled")
    assert found is not None
    assert str(found.holder) == ""


@pytest.mark.quarantine("2026-11-26", "3 s lease, child sleeps 3.5 s")
def test_a_fork_does_not_take_its_parents_locks_along(
    settings: Settings, redis_cache_settings: MakeRedisCache
) -> None:
    """A forked child holds nothing, can't release what the parent holds, and renews its own."""
    settings.CACHES = redis_cache_settings("django-redis")
    assert run_in_processes(fork_while_holding, 1) == [("not held", "LockError", "renewed")]


def fork_while_holding() -> tuple[str, ...]:
    """Fork with a lock held, and return what the child saw."""
    import json
    import os
    import time

    from django_celery_safe import LockError

    parents = cache_lock("parent", timeout=15)
    assert parents.acquire()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        seen = ["held" if parents.held else "not held"]
        try:
            parents.release()
        except LockError as error:
            seen.append(type(error).__name__)
        own = cache_lock("child", timeout=3)
        own.acquire()
        time.sleep(3.5)
        seen.append("renewed" if own.held and find_lock("child") else "not renewed")
        os.write(writer, json.dumps(seen).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert parents.held
    return tuple(json.loads(os.read(reader, 1000)))


def test_a_restarted_redis_costs_no_error(fragile_redis: RedisServer) -> None:
    """A connection that broke since the last command is replaced without anybody noticing."""
    for _ in range(2):
        with cache_lock("restart") as lock:
            assert lock
        fragile_redis.restart()
    with cache_lock("restart") as lock:
        assert lock


@pytest.mark.long
def test_an_interrupted_request_does_not_answer_the_next(fragile_redis: RedisServer) -> None:
    """A signal's error in mid-request (a soft time limit) leaves no stale answer behind."""

    class TimeIsUp(Exception):
        pass

    def on_alarm(*_: object) -> None:
        raise TimeIsUp

    with cache_lock("other") as other:
        before = signal.signal(signal.SIGALRM, on_alarm)
        fragile_redis.pause()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeIsUp):
                cache_lock("interrupted", timeout=0.5).acquire()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            fragile_redis.resume()
        found = find_lock("other")
        assert found is not None
        assert found.token == other.token
        # The server may have taken the request: then the lease ends by itself.
        assert cache_lock("interrupted").acquire(blocking_timeout=5)


@pytest.mark.parametrize("kind", ["django-redis", "django"])
def test_a_client_that_decodes_is_fine(
    kind: str,
    settings: Settings,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
) -> None:
    """Locks work on a connection with decode_responses, over which bytes may be no text."""
    options = {"CONNECTION_POOL_KWARGS": {"decode_responses": True}}
    if kind == "django":
        options = {"decode_responses": True}  # type: ignore[dict-item]
    settings.CACHES = redis_cache_settings(kind, OPTIONS=options)  # type: ignore[arg-type]
    # django-redis keeps its pools by URL: let this one be its own.
    settings.CACHES["default"]["LOCATION"] = redis_server.database_url(3)
    with cache_lock("decoded") as lock:
        lock.ensure()
        found = find_lock("decoded")
        assert found is not None
        assert (found.token, found.fence) == (lock.token, lock.fence)
        with redis_server.client(db=3) as client:
            client.set(":1:celery_safe:lock:garbled", b"\xff\x00not ours")
        assert not cache_lock("garbled").acquire()
        assert [one.name for one in iter_locks()] == ["decoded"]


def test_threads_share_one_store(settings: Settings, redis_cache_settings: MakeRedisCache) -> None:
    """Threads that use one store's connection at once get each their own answers."""
    settings.CACHES = redis_cache_settings("django-redis")
    store = locate().store()

    def peek(number: int) -> bool:
        name, token = f"thread:{number}", f"{number:032}"
        for _ in range(50):
            assert isinstance(store.acquire(name, token, 10, Holder("here", number)), Acquired)
            found = store.peek(name)
            assert found is not None
            assert found.token == token
            assert store.release(name, token)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(peek, range(8)))


@pytest.mark.parametrize("spread", [True, False])
def test_a_long_list_is_complete(
    spread: bool,
    settings: Settings,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
) -> None:
    """Locks of several pages are listed once each, those whose leases end together too."""
    settings.CACHES = redis_cache_settings("django-redis")
    store = locate().store()
    names = [f"many:{number}" for number in range(2500)]
    for number, name in enumerate(names):
        token = f"{number:032}"
        assert isinstance(store.acquire(name, token, 60, Holder("here", 1)), Acquired)
    if not spread:
        with redis_server.client() as client:
            index = ":1:celery_safe:locks"
            end = client.zrange(index, -1, -1, withscores=True)[0][1]
            client.zadd(index, dict.fromkeys(client.zrange(index, 0, -1), end))
    assert sorted(lock.name for lock in iter_locks()) == sorted(names)


def test_a_gone_postgres_is_not_a_held_lock(
    settings: Settings, django_db_blocker: DjangoDbBlocker
) -> None:
    """With the lock database gone a request is a LockBackendError, and a body keeps its error."""
    with ServerPool() as servers, django_db_blocker.unblock():
        server: PostgresServer = require(servers, PostgresServer)
        database = {**postgres_settings(server, "postgres")}
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
                with cache_lock(f"own:{number}", renew=False) as lock:
                    assert lock
            return number
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(take, range(4))) == [0, 1, 2, 3]


def test_a_release_inside_atomic_can_be_made_good(settings: Settings, sqlite_alias: str) -> None:
    """A release that was refused inside atomic() keeps the lock, which can be released after."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": sqlite_alias}
    lock = cache_lock("x")
    assert lock.acquire()
    with transaction.atomic(using=sqlite_alias), pytest.raises(WrongTransaction):
        lock.release()
    assert lock.held
    assert lock.release() is True
    assert find_lock("x") is None


@pytest.mark.long
def test_a_process_that_stands_still_does_not_keep_others_out(
    settings: Settings, make_database: MakeDatabase
) -> None:
    """PostgreSQL ends the session of a process that stops in the middle of an acquisition."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": make_database("postgres")}
    with start_in_process(stop_while_acquiring) as stopped:
        stopped.receive()
        wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, 20)
        lock = cache_lock("other")
        assert lock.acquire()
        assert lock.release()


def stop_while_acquiring() -> None:
    """Stop this process, by SIGSTOP, when it has the row of the fence locked."""
    take_number = DatabaseStore._next_fence

    def take_number_and_stop(self: DatabaseStore) -> int:
        number = take_number(self)
        tell("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        return number

    DatabaseStore._next_fence = take_number_and_stop  # type: ignore[method-assign]
    cache_lock("stopped").acquire()


class AskedCache(DictCache):
    """A cache that counts how often it is asked."""

    asked: ClassVar[int] = 0

    def add(self, *args: Any, **kwargs: Any) -> bool:
        """Count, and add."""
        AskedCache.asked += 1
        return super().add(*args, **kwargs)


@pytest.mark.quarantine("2026-11-26", "10 to 24 polls in 3 s")
def test_waiters_back_off(
    settings: Settings,
    postgres_alias: str,
    memcached_cache_settings: Callable[..., CacheSettings],
    memcached_server: MemcachedServer,
) -> None:
    """Where nobody wakes it, a waiter of 3 s asks about twenty times, and in time gives up."""
    settings.CACHES = {
        **memcached_cache_settings("memcached"),
        "portable": {"BACKEND": f"{__name__}.AskedCache"},
    }
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}
    DictCache.values.clear()
    caches: list[Any] = ["memcached", "portable", UNSET]
    locks = [cache_lock("awaited", cache=cache, timeout=60, renew=False) for cache in caches]
    assert all(lock.acquire() for lock in locks)
    waiters = [cache_lock("awaited", cache=cache, blocking_timeout=3) for cache in caches]
    # Connected, so that only what they ask is counted.
    assert not any(waiter.acquire(blocking_timeout=0) for waiter in waiters)
    before = memcached_server.count("cmd_set"), AskedCache.asked
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait_counting, waiter, postgres_alias) for waiter in waiters]
    asked = [
        memcached_server.count("cmd_set") - before[0],
        AskedCache.asked - before[1],
        waiting[2].result(),
    ]
    assert all(10 <= number <= 24 for number in asked), asked
    assert all(lock.release() for lock in locks)


def wait_counting(waiter: CacheLock, alias: str) -> int:
    """Wait in vain; return how often this thread asked the database for a lock."""
    try:
        with CaptureQueriesContext(connections[alias]) as queries:
            assert waiter.acquire() is False
        return sum("databaselock" in query["sql"] for query in queries.captured_queries)
    finally:
        connections.close_all()


def test_waiters_do_not_oversleep_the_end_of_a_lease(
    settings: Settings, make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter tries again when the lease ends, however long its pauses have become."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": make_database("postgres")}
    monkeypatch.setattr(base, "FIRST_PAUSE", 60)
    monkeypatch.setattr(base, "LONGEST_PAUSE", 60)
    assert cache_lock("ending", timeout=1.5, renew=False).acquire()
    began_at = time.monotonic()
    assert cache_lock("ending").acquire(blocking_timeout=100)
    assert time.monotonic() - began_at < 25


def test_a_read_only_database_is_not_called_silent(settings: Settings, postgres_alias: str) -> None:
    """A replica's refusal says what it is and what to do, and not that nobody answered."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}
    read_only = {"options": "-c default_transaction_read_only=on"}
    connections[postgres_alias].settings_dict["OPTIONS"] = read_only
    with pytest.raises(LockBackendError, match=r"refused to acquire.*replica.*on the primary"):
        cache_lock("x").acquire()
