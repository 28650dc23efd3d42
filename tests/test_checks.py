"""The system checks: each fault gives its id and a hint, and a worker logs it."""

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import signals
from django.core import checks
from django.db import connections
from pytest_django import Settings

from django_celery_safe import BackendNotSupported, cache_lock
from django_celery_safe.locks.stores.local import set_pool_processes
from tests.app.tasks import lock_something
from tests.checking import app_without_tasks, find_messages, found
from tests.conftest import MakeDatabase, UseBroker, require
from tests.processes import CeleryWorker, Journal, wait_for
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import registered
from tests.versions import IS_DJANGO_REDIS_7

SQLITE = "django.db.backends.sqlite3"
IMMEDIATE = {"transaction_mode": "IMMEDIATE"}
#: For workers, which run the checks of Django: since 6.0 one of a model asks the database.
IN_MEMORY = {"default": {"ENGINE": SQLITE, "NAME": ":memory:"}}
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
MEMCACHED = "django.core.cache.backends.memcached.PyMemcacheCache"
DJANGO_REDIS = "django.core.cache.backends.redis.RedisCache"
#: Environment variable with the path of the journal in which a worker notes its forks.
FORKS = "SAFE_TEST_FORKS"
#: django-redis, and where there is no server.
REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}

#: Caches by a name that says where they are; no server is there.
PLACES: dict[str, dict[str, Any]] = {
    **{
        f"redis {number}": {**REDIS, "LOCATION": f"redis://127.0.0.1:1/{number}"}
        for number in range(3)
    },
    "django 1": {"BACKEND": DJANGO_REDIS, "LOCATION": "redis://127.0.0.1:1?db=1"},
    "memcached 1": {"BACKEND": MEMCACHED, "LOCATION": "127.0.0.1:1"},
    "memcached 2": {"BACKEND": MEMCACHED, "LOCATION": "127.0.0.1:2"},
    "unknown 1": {"BACKEND": "tests.locks.test_portable.DictCache", "LOCATION": "1"},
    "unknown 2": {"BACKEND": "tests.locks.test_portable.DictCache", "LOCATION": "2"},
    "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
    # The library that it imports is not there.
    "missing": {
        "BACKEND": "django.core.cache.backends.memcached.PyLibMCCache",
        "LOCATION": "127.0.0.1:1",
    },
}


pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture(autouse=True)
def _no_faults(settings: Settings) -> Iterator[None]:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}
    with app_without_tasks("redis://127.0.0.1:1/0"):
        yield
        # A worker asks servers with the settings of its test while it starts.
        for thread in threading.enumerate():
            if "(_log_and_disconnect)" in thread.name:
                thread.join(30)


def test_good_settings_are_silent() -> None:
    """Redis for the locks and PostgreSQL for the data give no message."""
    assert found() == {}


def test_each_way_through_the_outbox_is_valid(settings: Settings) -> None:
    """The setting OUTBOX may say how long rows stay."""
    for value in (True, False, "until_done"):
        settings.DJANGO_CELERY_SAFE = {"OUTBOX": value}
        assert "E001" not in found()
    for wrong in ({"OUTBOX": "forever"}, {"MAX_DEATHS": 0}, {"OUTBOX_RESEND_AFTER": 0}):
        settings.DJANGO_CELERY_SAFE = wrong
        assert f"{next(iter(wrong))}=" in found()["E001"].msg


def test_an_unknown_setting_is_guessed(settings: Settings) -> None:
    """W001 names a setting that does not exist and what was probably meant."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMOUT": 60, "COLOUR": "blue"}
    message = found()["W001"]
    messages = find_messages()
    texts = {one.msg: one.hint for one in messages if str(one.id).endswith("W001")}
    assert len(texts) == 2
    assert any("'LOCK_TIMOUT'" in text and "LOCK_TIMEOUT" in str(texts[text]) for text in texts)
    assert any("'COLOUR'" in text and "It knows" in str(texts[text]) for text in texts)
    assert message.level == checks.WARNING


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("not a dict", "E001"),
        ({"LOCK_TIMEOUT": None}, "E001"),
        ({"SEND_ON_COMMIT": "no"}, "E001"),
        ({"OUTBOX": "yes"}, "E001"),
        ({"OUTBOX": None}, "E001"),
        ({"WARN_IN_ATOMIC": 1}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": 0}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": None}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": -1}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": 30.001}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": timedelta(seconds=31)}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": math.inf}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": True}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": "2"}, "E001"),
        ({"OUTBOX_RETENTION": -1}, "E001"),
        ({"OUTBOX_RETENTION": "a week"}, "E001"),
        ({"OUTBOX_RETENTION": math.nan}, "E001"),
        ({"OUTBOX_RETENTION": timedelta(days=99_999)}, "E001"),
        ({"LOCK_CACHE": "nope"}, "E003"),
        ({"LOCK_CACHE": None}, "E003"),
        ({"LOCK_CACHE": ["default"]}, "E003"),
        ({"LOCK_CACHE": {}}, "E003"),
        ({"LOCK_DATABASE": ["x"]}, "E003"),
    ],
)
def test_a_setting_that_means_nothing_is_an_error(
    settings: Settings, value: Any, number: str
) -> None:
    """A value that can't be used is an error, once, with a hint, and names its setting."""
    settings.DJANGO_CELERY_SAFE = value
    (message,) = find_messages()
    assert message.id == f"django_celery_safe.{number}"
    assert message.level == checks.ERROR
    assert message.hint
    if isinstance(value, dict):
        assert next(iter(value)) in f"{message.msg} {message.hint}"


def test_settings_of_the_outbox_that_mean_something(settings: Settings) -> None:
    """Numbers and timedeltas are times; 0 keeps what was sent not at all, None for ever."""
    for timeout, retention in [
        (2, 0),
        (0.5, 0.0),
        (30, 1),
        (timedelta(seconds=30), timedelta(days=7)),
        (2, None),
    ]:
        settings.DJANGO_CELERY_SAFE = {
            "OUTBOX": True,
            "WARN_IN_ATOMIC": True,
            "OUTBOX_SEND_TIMEOUT": timeout,
            "OUTBOX_RETENTION": retention,
        }
        assert found() == {}


def test_an_unsuitable_cache_is_an_error(settings: Settings) -> None:
    """E002 says why a cache can't hold locks and what to use instead."""
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    message = found()["E002"]
    assert "stores nothing" in message.msg
    assert "Redis" in str(message.hint)


def test_a_client_that_is_not_installed_is_an_error(settings: Settings) -> None:
    """E003 names the library that a cache needs and does not find; ``--deploy`` adds nothing."""
    settings.CACHES = {"default": PLACES["missing"]}
    assert set(found(deploy=True)) == {"E003"}
    assert "pylibmc" in found()["E003"].msg


ODD: dict[str, Any] = {
    "None": None,
    "a text": "redis://127.0.0.1:1/1",
    "a list": [REDIS],
    "no BACKEND": {},
    "no BACKEND, None": {"BACKEND": None},
    "no module": {"BACKEND": "no_such_module.Cache"},
    "no cache": {"BACKEND": "collections.Counter"},
    "no LOCATION": {"BACKEND": DJANGO_REDIS},
    "LOCATION None": {**REDIS, "LOCATION": None},
    "LOCATION a number": {**REDIS, "LOCATION": 6379},
    "LOCATION no URL": {**REDIS, "LOCATION": "localhost"},
    "LOCATION with a bad port": {"BACKEND": DJANGO_REDIS, "LOCATION": "redis://127.0.0.1:x/1"},
    "LOCATION a list": {"BACKEND": LOCMEM, "LOCATION": ["x"]},
    "OPTIONS None": {**REDIS, "OPTIONS": None},
    "OPTIONS a list": {**REDIS, "OPTIONS": ["x"]},
    "no KEY_FUNCTION": {**REDIS, "KEY_FUNCTION": "no_such_module.key"},
}


if not IS_DJANGO_REDIS_7:
    del ODD["LOCATION None"], ODD["LOCATION a number"]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_cache_is_an_error_only_where_locks_live(odd: Any, settings: Settings) -> None:
    """No check fails with any CACHES: E003 if locks are to live there, otherwise nothing."""
    settings.CACHES = {"default": PLACES["redis 2"], "odd": odd, "locks": PLACES["redis 1"]}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    assert found() == {}
    assert set(found(deploy=True)) == {"W006"}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "odd"}
    assert set(found()) == set(found(deploy=True)) == {"E003"}
    assert found()["E003"].hint


@pytest.mark.parametrize("debug", [True, False])
def test_a_cache_that_processes_do_not_share_is_a_warning(settings: Settings, debug: bool) -> None:
    """W002 warns of LocMemCache, under DEBUG as well."""
    settings.DEBUG = debug
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    assert "every process has for itself" in found()["W002"].msg


def test_a_cache_of_each_process_is_enough_for_eager_tasks(settings: Settings) -> None:
    """W002 is silent with task_always_eager, as on a laptop and in tests: there are no workers."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    with app_without_tasks("memory://") as app:
        app.conf.task_always_eager = True
        assert found() == {}


@pytest.mark.parametrize(
    ("backend", "location", "loses"),
    [
        (MEMCACHED, "127.0.0.1:1", "memcached forgets items when it is full and .* restarts"),
        ("diskcache.DjangoCache", None, "nothing is known of this cache"),
    ],
)
def test_a_cache_that_loses_locks_is_a_warning(
    backend: str, location: str | None, loses: str, settings: Settings, tmp_path: Path
) -> None:
    """W004 says how memcached, or a cache that is not known, loses locks, and what helps."""
    settings.CACHES = {
        "default": settings.CACHES["default"],
        "locks": {"BACKEND": backend, "LOCATION": location or str(tmp_path)},
    }
    assert "W004" not in found()
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    message = found()["W004"]
    assert re.search(rf'CACHES\["locks"\] \(.*\): {loses}', message.msg)
    assert "LOCK_DATABASE" in str(message.hint)
    # Neither cache can number its acquisitions.
    assert "fence" not in str(message.hint)
    assert message.level == checks.WARNING


def test_a_server_in_trouble_is_not_asked_by_check(settings: Settings) -> None:
    """W005 and W006 are of ``check --deploy`` alone: a plain check asks no server."""
    assert found() == {}
    assert set(found(deploy=True)) == {"W005", "W006"}


@pytest.mark.parametrize(
    ("caches", "shared"),
    [
        ({"default": "redis 0"}, "the project's default cache"),
        ({"default": "redis 1", "locks": "redis 1"}, 'CACHES["default"]'),
        ({"default": "redis 1", "locks": "django 1"}, 'CACHES["default"]'),
        (
            {"default": "redis 2", "a": "redis 1", "b": "django 1", "locks": "redis 1"},
            'CACHES["a"], CACHES["b"]',
        ),
        ({"default": "redis 0", "locks": "redis 1"}, None),
        ({"default": "memcached 1", "locks": "redis 1"}, None),
        ({"default": "memcached 1"}, "the project's default cache"),
        ({"default": "memcached 1", "locks": "memcached 1"}, 'CACHES["default"]'),
        ({"default": "memcached 2", "locks": "memcached 1"}, None),
        ({"default": "unknown 1"}, "the project's default cache"),
        ({"default": "unknown 1", "locks": "unknown 1"}, 'CACHES["default"]'),
        ({"default": "unknown 2", "locks": "unknown 1"}, None),
        ({"default": "missing", "none": "dummy", "locks": "redis 1"}, None),
    ],
    ids=str,
)
def test_locks_that_are_cleared_with_a_cache_are_a_warning(
    caches: dict[str, str], shared: str | None, settings: Settings
) -> None:
    """W005 names the caches whose clear() frees the locks; a database of their own is silent."""
    settings.CACHES = {alias: PLACES[place] for alias, place in caches.items()}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": list(caches)[-1]}
    message = found(deploy=True).get("W005")
    if shared is None:
        assert message is None
        return
    assert message is not None
    assert shared in message.msg
    assert "cache.clear()" in message.msg
    assert "LOCK_CACHE" in str(message.hint)


def test_locks_in_a_database_are_cleared_with_no_cache(
    settings: Settings, sqlite_immediate_alias: str
) -> None:
    """W005 and W006 are silent where locks live in a database."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": sqlite_immediate_alias}
    assert not {"W005", "W006"} & set(found(deploy=True))


def test_a_redis_that_evicts_is_a_warning(settings: Settings) -> None:
    """W006 tells of an eviction policy that can delete locks, and is silent of others."""
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        settings.CACHES = {**settings.CACHES, "locks": {**REDIS, "LOCATION": server.url}}
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
        silent = [("0", "noeviction"), ("0", "volatile-lru"), ("50mb", "noeviction")]
        for memory, policy in [*silent, ("50mb", "volatile-lru"), ("50mb", "allkeys-lfu")]:
            with server.client() as admin:
                admin.config_set("maxmemory", memory)
                admin.config_set("maxmemory-policy", policy)
            messages = found(deploy=True)
            if (memory, policy) in silent:
                assert messages == {}
                continue
            assert f"its maxmemory-policy is {policy}, which deletes locks" in messages["W006"].msg
            assert "noeviction" in str(messages["W006"].hint)
            assert messages["W006"].level == checks.WARNING


def test_a_server_that_can_not_be_asked_is_a_warning(settings: Settings) -> None:
    """W006 says, soon, that a server is gone, or refuses to say how it evicts."""
    began_at = time.monotonic()
    assert "could not be asked" in found(deploy=True)["W006"].msg
    assert time.monotonic() - began_at < 30
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        settings.CACHES = {"default": {**REDIS, "LOCATION": server.url}}
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-info")
            assert "refused to tell how it evicts keys" in found(deploy=True)["W006"].msg
            assert cache_lock("x").acquire()


def test_a_server_that_refuses_locks_is_an_error(
    settings: Settings, redis_server: RedisServer
) -> None:
    """E009 says of a replica, and of a node of a cluster, that no lock can be taken there."""
    replica = ("--replicaof", redis_server.host, str(redis_server.port))
    for server, said, advice in (
        (RedisServer(options=replica), "is a replica", "name the primary"),
        (RedisServer(cluster=True), "is a node of Redis Cluster", "a client for Redis"),
    ):
        with server:
            settings.CACHES = {"default": {**REDIS, "LOCATION": server.url}}
            message = found(deploy=True)["E009"]
        assert said in message.msg
        assert advice in str(message.hint)


def test_a_database_that_can_not_hold_locks_is_an_error(
    settings: Settings, make_database: MakeDatabase
) -> None:
    """E009 says of LOCK_DATABASE that its autocommit is off, or that it has no tables."""
    manual, bare = make_database("sqlite-immediate"), "bare"
    given = connections.settings[manual]
    with (
        registered("manual", {**given, "AUTOCOMMIT": False}),
        registered(bare, {**given, "NAME": f"{given['NAME']}.bare"}),
    ):
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "manual"}
        assert "autocommit off is one" in found(deploy=True)["E009"].msg
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": bare}
        assert "migrate django_celery_safe --database=bare" in found(deploy=True)["E009"].msg
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": manual}
        assert "E009" not in found(deploy=True)


def test_sqlite_without_immediate_is_a_warning(settings: Settings) -> None:
    """W003 names each SQLite alias in the default transaction mode."""
    settings.DATABASES = {
        "default": {"ENGINE": SQLITE, "NAME": "a.sqlite3"},
        "good": {"ENGINE": SQLITE, "NAME": "b.sqlite3", "OPTIONS": IMMEDIATE},
    }
    assert 'DATABASES["default"]' in found()["W003"].msg
    settings.DATABASES = {"default": {"ENGINE": SQLITE, "NAME": "a", "OPTIONS": IMMEDIATE}}
    assert "W003" not in found()


@pytest.mark.parametrize(
    ("alias", "names", "wrong"),
    [
        ("default", {"default": "data"}, True),
        ("locks", {"default": "data", "locks": "data"}, True),
        ("locks", {"default": "data", "locks": "./data"}, True),
        ("locks", {"default": "data", "locks": ":memory:"}, True),
        ("locks", {"default": "data", "locks": "locks"}, False),
    ],
)
def test_locks_in_the_file_of_the_data_are_an_error(
    alias: str, names: dict[str, str], wrong: bool, settings: Settings
) -> None:
    """E004: on SQLite the locks need a file of their own."""
    settings.DATABASES = {
        name: {"ENGINE": SQLITE, "NAME": file, "OPTIONS": IMMEDIATE} for name, file in names.items()
    }
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    assert ("E004" in found()) is wrong


class Worker:
    """The argument of celeryd_after_setup: the pool's class and size."""

    def __init__(self, pool: str, concurrency: int, most: int | None) -> None:
        self.pool_cls = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
        self.concurrency, self.max_concurrency = concurrency, most


@pytest.mark.parametrize(
    ("worker", "processes"),
    [
        (Worker("prefork", 4, None), 4),
        (Worker("prefork", 2, 8), 8),
        (Worker("prefork", 1, None), 1),
        (Worker("thread", 16, None), 1),
        (Worker("solo", 1, None), 1),
    ],
)
def test_the_size_of_the_pool_is_noted(worker: Worker, processes: int) -> None:
    """When a worker is set up, the number of processes that run tasks is known."""
    from django_celery_safe.locks.stores import local

    try:
        _set_up(worker)
        assert local._pool_processes == processes
    finally:
        set_pool_processes(1)


def _our_receivers() -> list[Any]:
    starting = (signals.celeryd_after_setup, signals.worker_ready)
    receivers = [receiver() for signal in starting for _, receiver in signal.receivers]
    return [one for one in receivers if getattr(one, "__module__", "").startswith("django_celery")]


def test_a_worker_logs_what_it_would_not_show(use_broker: UseBroker, settings: Settings) -> None:
    """A worker with unsuitable settings starts, as Celery lets it, and logs our messages."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    settings.DATABASES = IN_MEMORY
    use_broker()
    with CeleryWorker("tests.app", concurrency=2) as worker:
        assert "django_celery_safe.W002" in worker.log
        assert "django_celery_safe.W006" not in worker.log
        assert "HINT: Use Redis" in worker.log


def test_a_worker_logs_what_deployment_checks_say(
    use_broker: UseBroker, settings: Settings
) -> None:
    """A worker starts though the locks' server is gone, and logs W005 and W006."""
    settings.DATABASES = IN_MEMORY
    use_broker()
    with CeleryWorker("tests.app", pool="solo", concurrency=1) as worker:
        wait_for(lambda: "django_celery_safe.W006" in worker.log, 10)
        assert re.search(r"WARNING.*emptied along with everything else", worker.log)
        assert "django_celery_safe.W005" in worker.log
        assert re.search(r"WARNING.*which could not be asked to acquire", worker.log)
        assert "django_celery_safe.W006" in worker.log


@signals.worker_before_create_process.connect
def note_what_a_child_inherits(**_: Any) -> None:
    """In a worker of these tests: write down what else goes on when the pool forks."""
    if path := os.environ.get(FORKS):
        threads = [thread.name for thread in threading.enumerate()]
        Journal(Path(path)).write("forks", threads=threads)


def test_deployment_checks_wait_until_the_pool_has_forked(
    use_broker: UseBroker, settings: Settings, tmp_path: Path
) -> None:
    """No thread of theirs runs when a child is forked, so none inherits what it has open."""
    settings.DATABASES = IN_MEMORY
    use_broker()
    journal = Journal(tmp_path / "forks")
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        # A server that says nothing holds up what asks it.
        settings.CACHES = {"default": {**REDIS, "LOCATION": server.url}}
        server.pause()
        try:
            with CeleryWorker(
                "tests.app", arguments=("--include", __name__), env={FORKS: str(journal.path)}
            ) as worker:
                # Later ones would replace a child that a busy machine kept from starting.
                forks = [entry["threads"] for entry in journal.entries()[:2]]
                assert forks == [["MainThread"]] * 2
                assert "W005" not in worker.log
                server.resume()
                wait_for(lambda: "django_celery_safe.W005" in worker.log, 20)
        finally:
            server.resume()


def test_a_worker_does_not_wait_for_a_silent_server(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker is set up while the locks' server says nothing, which it logs as soon as it does."""
    with ServerPool() as servers, ThreadPoolExecutor(1) as pool:
        server: RedisServer = require(servers, RedisServer)
        options = {"socket_timeout": None, "socket_connect_timeout": None}
        settings.CACHES = {
            "default": {
                "BACKEND": DJANGO_REDIS,
                "LOCATION": server.database_url(1),
                "OPTIONS": options,
            }
        }
        with server.client() as admin:
            admin.config_set("maxmemory", "50mb")
            admin.config_set("maxmemory-policy", "volatile-lru")
        server.pause()
        try:
            set_up = pool.submit(_set_up, Worker("solo", 1, None))
            wait_for(set_up.done, 10, "the worker waits for the server")
            assert set_up.exception() is None
            assert "W006" not in caplog.text
        finally:
            server.resume()
        wait_for(lambda: "its maxmemory-policy is volatile-lru" in caplog.text, 10)


def _set_up(worker: Worker) -> None:
    for receiver in _our_receivers():
        receiver(instance=worker)


def test_a_worker_logs_no_silenced_check(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks in SILENCED_SYSTEM_CHECKS are not logged; the others are."""
    settings.SILENCED_SYSTEM_CHECKS = ["django_celery_safe.W005"]
    _set_up(Worker("solo", 1, None))
    # A thread of its own asks a server.
    wait_for(lambda: "W006" in caplog.text, 10)
    assert "W005" not in caplog.text


def test_a_worker_with_locks_in_local_memory_refuses_to_lock(
    use_broker: UseBroker, settings: Settings
) -> None:
    """In a pool of several processes on LocMemCache the first lock raises BackendNotSupported."""
    settings.DATABASES = IN_MEMORY
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    use_broker().set_current()
    refused = pytest.raises(BackendNotSupported, match="2 processes")
    with CeleryWorker("tests.app", concurrency=2), refused:
        lock_something.delay().get(timeout=20)
