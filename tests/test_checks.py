"""The system checks: each fault gives its id and a hint, and a worker logs it."""

import os
import re
import threading
from collections.abc import Iterator
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
from tests.checking import REDIS, app_without_tasks, find_messages, found, no_faults
from tests.conftest import MakeDatabase, UseBroker, require
from tests.processes import CeleryWorker, Journal, wait_for
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import registered

SQLITE = "django.db.backends.sqlite3"
IMMEDIATE = {"transaction_mode": "IMMEDIATE"}
#: For workers, which run the checks of Django: since 6.0 one of a model asks the database.
IN_MEMORY = {"default": {"ENGINE": SQLITE, "NAME": ":memory:"}}
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
MEMCACHED = "django.core.cache.backends.memcached.PyMemcacheCache"
DJANGO_REDIS = "django.core.cache.backends.redis.RedisCache"
#: Environment variable with the path of the journal in which a worker notes its forks.
FORKS = "SAFE_TEST_FORKS"

UNKNOWN = "tests.locks.test_portable.DictCache"
#: The library that it imports is not there.
MISSING = {
    "BACKEND": "django.core.cache.backends.memcached.PyLibMCCache",
    "LOCATION": "127.0.0.1:1",
}


__all__ = ["REDIS", "app_without_tasks", "no_faults"]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture(autouse=True)
def _an_app(no_faults: None) -> Iterator[None]:
    """Have an app without tasks, and wait for what a worker asks while it starts."""
    with app_without_tasks("redis://127.0.0.1:1/0"):
        yield
        for thread in threading.enumerate():
            if "(_log_and_disconnect)" in thread.name:
                thread.join(30)


# Settings.


def test_an_unknown_setting_is_guessed(settings: Settings) -> None:
    """W001 names a setting that does not exist and what was probably meant."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMOUT": 60, "COLOUR": "blue"}
    messages = find_messages()
    assert {message.id for message in messages} == {"django_celery_safe.W001"}
    hints = {message.msg.split("'")[1]: str(message.hint) for message in messages}
    assert "LOCK_TIMEOUT" in hints["LOCK_TIMOUT"]
    assert "It knows" in hints["COLOUR"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("not a dict", "E001"),
        ({"LOCK_TIMEOUT": None}, "E001"),
        ({"OUTBOX": "forever"}, "E001"),
        ({"MAX_DEATHS": 0}, "E001"),
        ({"OUTBOX_SEND_TIMEOUT": timedelta(seconds=31)}, "E001"),
        ({"IDEMPOTENCY_RETENTION": "7d"}, "E001"),
        ({"LOCK_DATABASE": ["x"]}, "E003"),
        # Numbers and timedeltas are times; 0 keeps what was sent not at all, None for ever.
        ({"OUTBOX_SEND_TIMEOUT": 2, "OUTBOX_RETENTION": 0, "OUTBOX": False}, None),
        ({"OUTBOX_RETENTION": None, "STAGES_RETENTION": timedelta(days=7)}, None),
    ],
)
def test_a_setting_that_means_nothing_is_an_error(
    settings: Settings, value: Any, number: str | None
) -> None:
    """A value that can't be used is an error, once, with a hint, and names its setting."""
    settings.DJANGO_CELERY_SAFE = value
    messages = [(str(m.id).rpartition(".")[2], m.level) for m in find_messages()]
    assert messages == ([(number, checks.ERROR)] if number else [])
    for message in find_messages():
        assert value == "not a dict" or next(iter(value)) in f"{message.msg} {message.hint}"


# Caches.


def test_an_unsuitable_cache_is_an_error(settings: Settings) -> None:
    """E002 says why a cache can't hold locks; E003 which library it lacks, ``--deploy`` no more."""
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    message = found()["E002"]
    assert "stores nothing" in message.msg
    assert "Redis" in str(message.hint)
    settings.CACHES = {"default": MISSING}
    assert set(found(deploy=True)) == {"E003"}
    assert "pylibmc" in found()["E003"].msg


ODD: dict[str, Any] = {
    "no BACKEND": {},
    "no module": {"BACKEND": "no_such_module.Cache"},
    "OPTIONS a list": {**REDIS, "OPTIONS": ["x"]},
    "no KEY_FUNCTION": {**REDIS, "KEY_FUNCTION": "no_such_module.key"},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_cache_is_an_error_only_where_locks_live(odd: Any, settings: Settings) -> None:
    """No check fails with any CACHES: E003 if locks are to live there, otherwise nothing."""
    settings.CACHES = {"default": redis(2), "odd": odd, "locks": redis(1)}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    assert found() == {}
    assert set(found(deploy=True)) == {"W006"}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "odd"}
    assert set(found()) == set(found(deploy=True)) == {"E003"}


def redis(number: int, backend: str = REDIS["BACKEND"]) -> dict[str, str]:
    """Return a cache in a database of a Redis that is not there."""
    return {"BACKEND": backend, "LOCATION": f"redis://127.0.0.1:1/{number}"}


def test_a_cache_that_processes_do_not_share_is_a_warning(settings: Settings) -> None:
    """W002 warns of LocMemCache, also under DEBUG, unless tasks run eagerly."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    for debug in (True, False):
        settings.DEBUG = debug
        assert "every process has for itself" in found()["W002"].msg
    with app_without_tasks("memory://") as app:
        app.conf.task_always_eager = True
        assert found() == {}


def test_a_cache_that_loses_locks_is_a_warning(settings: Settings) -> None:
    """W004 says how memcached, or a cache that is not known, loses locks, and what helps."""
    for backend, loses in (
        (MEMCACHED, "memcached forgets items when it is full and .* restarts"),
        (UNKNOWN, "nothing is known of this cache"),
    ):
        locks = {"BACKEND": backend, "LOCATION": "127.0.0.1:1"}
        settings.CACHES = {"default": REDIS, "locks": locks}
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
        message = found()["W004"]
        assert re.search(rf'CACHES\["locks"\] \(.*\): {loses}', message.msg)
        assert "LOCK_DATABASE" in str(message.hint)
        # Neither cache can number its acquisitions.
        assert "fence" not in str(message.hint)
        # It is cleared as a whole.
        assert "W005" not in found(deploy=True)
        settings.CACHES = {"default": locks, "locks": locks}
        assert 'CACHES["default"]' in found(deploy=True)["W005"].msg
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "default"}
        assert "W004" not in found()


def test_locks_that_are_cleared_with_a_cache_are_a_warning(settings: Settings) -> None:
    """W005 names the caches whose clear() frees the locks; a database of their own is silent."""
    for caches, shared in (
        ({"default": redis(0)}, "the project's default cache"),
        ({"default": redis(1), "locks": redis(1, DJANGO_REDIS)}, 'CACHES["default"]'),
        ({"a": redis(1), "default": redis(2), "locks": redis(1)}, 'CACHES["a"]'),
        ({"default": redis(0), "other": MISSING, "locks": redis(1)}, None),
    ):
        settings.CACHES = caches
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": list(caches)[-1]}
        message = found(deploy=True).get("W005")
        assert (message is None) is (shared is None)
        assert message is None or str(shared) in message.msg


def test_a_server_in_trouble_is_a_warning(settings: Settings) -> None:
    """W006 tells, with --deploy only, of a Redis that evicts locks, says nothing, or is gone."""
    assert found() == {}
    assert "could not be asked" in found(deploy=True)["W006"].msg
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        settings.CACHES = {**settings.CACHES, "locks": {**REDIS, "LOCATION": server.url}}
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
        for memory, policy, evicts in (
            ("0", "volatile-lru", False),
            ("50mb", "noeviction", False),
            ("50mb", "allkeys-lfu", True),
        ):
            with server.client() as admin:
                admin.config_set("maxmemory", memory)
                admin.config_set("maxmemory-policy", policy)
            messages = found(deploy=True)
            assert set(messages) == ({"W006"} if evicts else set())
            if evicts:
                assert f"policy is {policy}, which deletes locks" in messages["W006"].msg
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-info")
            assert "refused to tell how it evicts keys" in found(deploy=True)["W006"].msg
            assert cache_lock("x").acquire()


# Databases.


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
        assert not {"E009", "W005", "W006"} & set(found(deploy=True))


def test_sqlite_without_immediate_is_a_warning(settings: Settings) -> None:
    """W003 names each SQLite alias in the default transaction mode."""
    good = {"ENGINE": SQLITE, "NAME": "b.sqlite3", "OPTIONS": IMMEDIATE}
    settings.DATABASES = {"default": {"ENGINE": SQLITE, "NAME": "a.sqlite3"}, "good": good}
    assert 'DATABASES["default"]' in found()["W003"].msg
    settings.DATABASES = {"default": good}
    assert "W003" not in found()


def test_locks_in_the_file_of_the_data_are_an_error(settings: Settings) -> None:
    """E004: on SQLite the locks need a file of their own."""
    for data, locks, wrong in (("data", "./data", True), ("data", "locks", False)):
        settings.DATABASES = {
            alias: {"ENGINE": SQLITE, "NAME": name, "OPTIONS": IMMEDIATE}
            for alias, name in (("default", data), ("locks", locks))
        }
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "locks"}
        assert ("E004" in found()) is wrong
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "default"}
    assert "E004" in found()


# Workers.


class Worker:
    """The argument of celeryd_after_setup: the pool's class and size."""

    def __init__(self, pool: str, concurrency: int, most: int | None) -> None:
        self.pool_cls = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
        self.concurrency, self.max_concurrency = concurrency, most


def _set_up(worker: Worker) -> None:
    starting = (signals.celeryd_after_setup, signals.worker_ready)
    for receiver in [receiver() for signal in starting for _, receiver in signal.receivers]:
        if getattr(receiver, "__module__", "").startswith("django_celery"):
            receiver(instance=worker)


def test_the_size_of_the_pool_is_noted(settings: Settings) -> None:
    """When a worker of several processes is set up, locks in local memory are refused."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    try:
        for concurrency, most, processes in ((4, None, 4), (2, 8, 8)):
            _set_up(Worker("prefork", concurrency, most))
            with pytest.raises(BackendNotSupported, match=f"{processes} processes"):
                cache_lock("x").acquire()
        _set_up(Worker("thread", 16, None))
        assert cache_lock("x").acquire()
    finally:
        set_pool_processes(1)


def test_a_worker_logs_no_silenced_check(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks in SILENCED_SYSTEM_CHECKS are not logged; the others are."""
    settings.SILENCED_SYSTEM_CHECKS = ["django_celery_safe.W005"]
    _set_up(Worker("solo", 1, None))
    # A thread of its own asks a server.
    wait_for(lambda: "W006" in caplog.text, 10)
    assert "W005" not in caplog.text


@signals.worker_before_create_process.connect
def note_what_a_child_inherits(**_: Any) -> None:
    """In a worker of these tests: write down what else goes on when the pool forks."""
    if path := os.environ.get(FORKS):
        threads = [thread.name for thread in threading.enumerate()]
        Journal(Path(path)).write("forks", threads=threads)


@pytest.mark.long
def test_deployment_checks_wait_until_the_pool_has_forked(
    use_broker: UseBroker, settings: Settings, tmp_path: Path
) -> None:
    """No thread of theirs runs when a child is forked; a silent server does not hold up a start."""
    settings.DATABASES = IN_MEMORY
    use_broker()
    journal = Journal(tmp_path / "forks")
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
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
