"""The system checks: each fault gives its id and a hint, and a worker logs it."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from celery import signals
from django.core import checks
from pytest_django import Settings

from django_celery_safe import BackendNotSupported, cache_lock
from django_celery_safe.locks.stores.local import set_pool_processes
from tests.app.tasks import lock_something
from tests.conftest import UseBroker, require
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer, ServerPool

SQLITE = "django.db.backends.sqlite3"
IMMEDIATE = {"transaction_mode": "IMMEDIATE"}
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
MEMCACHED = "django.core.cache.backends.memcached.PyMemcacheCache"
#: django-redis, and where there is no server.
REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}

#: Caches by a name that says where they are; no server is there.
PLACES: dict[str, dict[str, Any]] = {
    **{
        f"redis {number}": {**REDIS, "LOCATION": f"redis://127.0.0.1:1/{number}"}
        for number in range(3)
    },
    "django 1": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": "redis://127.0.0.1:1?db=1",
    },
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
def _no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}


def found(*, deploy: bool = False) -> dict[str, checks.CheckMessage]:
    """Return what our checks say, those for ``check --deploy`` too if asked, by id."""
    messages = checks.run_checks(tags=["django_celery_safe"], include_deployment_checks=deploy)
    return {str(message.id).removeprefix("django_celery_safe."): message for message in messages}


def test_good_settings_are_silent() -> None:
    """Redis for the locks and PostgreSQL for the data give no message."""
    assert found() == {}


def test_an_unknown_setting_is_guessed(settings: Settings) -> None:
    """W001 names a setting that does not exist and what was probably meant."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMOUT": 60, "COLOUR": "blue"}
    message = found()["W001"]
    messages = checks.run_checks(tags=["django_celery_safe"])
    texts = {one.msg: one.hint for one in messages}
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
        ({"LOCK_CACHE": "nope"}, "E003"),
        ({"LOCK_CACHE": None}, "E003"),
        ({"LOCK_DATABASE": ["x"]}, "E003"),
    ],
)
def test_a_setting_that_means_nothing_is_an_error(
    settings: Settings, value: Any, number: str
) -> None:
    """A value that can't be used is an error, once, with a hint."""
    settings.DJANGO_CELERY_SAFE = value
    messages = found()
    assert number in messages
    assert messages[number].level == checks.ERROR
    assert messages[number].hint


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


@pytest.mark.parametrize("debug", [True, False])
def test_a_cache_that_processes_do_not_share_is_a_warning(settings: Settings, debug: bool) -> None:
    """W002 warns of LocMemCache, under DEBUG as well."""
    settings.DEBUG = debug
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    assert "every process has for itself" in found()["W002"].msg


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
    # Neither can number its acquisitions.
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
    """W006 says, soon, that a server which is gone or refuses could not be asked."""
    began_at = time.monotonic()
    assert "could not be asked" in found(deploy=True)["W006"].msg
    assert time.monotonic() - began_at < 5
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        settings.CACHES = {"default": {**REDIS, "LOCATION": server.url}}
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-info")
            assert "could not be asked" in found(deploy=True)["W006"].msg
            assert cache_lock("x").acquire()


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
    """What the signal celeryd_after_setup gives: the pool's class and size."""

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
        for receiver in _our_receivers():
            receiver(instance=worker)
        assert local._pool_processes == processes
    finally:
        set_pool_processes(1)


def _our_receivers() -> list[Any]:
    receivers = [receiver() for _, receiver in signals.celeryd_after_setup.receivers]
    return [one for one in receivers if getattr(one, "__module__", "").startswith("django_celery")]


def test_a_worker_logs_what_it_would_not_show(use_broker: UseBroker, settings: Settings) -> None:
    """A worker with unsuitable settings starts, as Celery lets it, and logs our messages."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    settings.DATABASES = {"default": {"ENGINE": SQLITE, "NAME": ":memory:"}}
    use_broker()
    with CeleryWorker("tests.app", concurrency=2) as worker:
        assert "django_celery_safe.W002" in worker.log
        assert "django_celery_safe.W006" not in worker.log
        assert "HINT: Use Redis" in worker.log


def test_a_worker_logs_what_deployment_checks_say(
    use_broker: UseBroker, settings: Settings
) -> None:
    """A worker starts though the locks' server is gone, and logs W005 and W006."""
    use_broker()
    with CeleryWorker("tests.app", pool="solo", concurrency=1) as worker:
        wait_for(lambda: "django_celery_safe.W006" in worker.log, 10)
        assert re.search(r"WARNING.*emptied along with everything else", worker.log)
        assert "django_celery_safe.W005" in worker.log
        assert re.search(r"WARNING.*whether it evicts locks could not be asked", worker.log)
        assert "django_celery_safe.W006" in worker.log


def test_a_worker_logs_no_silenced_check(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """What SILENCED_SYSTEM_CHECKS names is not logged; the rest is."""
    settings.SILENCED_SYSTEM_CHECKS = ["django_celery_safe.W005"]
    for receiver in _our_receivers():
        receiver(instance=Worker("solo", 1, None))
    # Whoever asks a server does so in a thread of its own.
    wait_for(lambda: "W006" in caplog.text, 10)
    assert "W005" not in caplog.text


def test_a_worker_with_locks_in_local_memory_refuses_to_lock(
    use_broker: UseBroker, settings: Settings
) -> None:
    """In a pool of several processes on LocMemCache the first lock raises BackendNotSupported."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    use_broker()
    refused = pytest.raises(BackendNotSupported, match="2 processes")
    with CeleryWorker("tests.app", concurrency=2), refused:
        lock_something.delay().get(timeout=20)
