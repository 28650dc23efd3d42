"""The system checks: each fault gives its id and a hint, and a worker logs it."""

from typing import Any

import pytest
from celery import signals
from django.core import checks
from pytest_django import Settings

from django_celery_safe import BackendNotSupported
from django_celery_safe.locks.stores.local import set_pool_processes
from tests.app.tasks import lock_something
from tests.conftest import UseBroker
from tests.processes import CeleryWorker

SQLITE = "django.db.backends.sqlite3"
IMMEDIATE = {"transaction_mode": "IMMEDIATE"}
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"


pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture(autouse=True)
def _no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://127.0.0.1:1/0",
        }
    }
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}


def found() -> dict[str, checks.CheckMessage]:
    """Return what our checks say, by id."""
    messages = checks.run_checks(tags=["django_celery_safe"])
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


@pytest.mark.parametrize("debug", [True, False])
def test_a_cache_that_processes_do_not_share_is_a_warning(settings: Settings, debug: bool) -> None:
    """W002 warns of LocMemCache, under DEBUG as well."""
    settings.DEBUG = debug
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    assert "every process has for itself" in found()["W002"].msg


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
        assert "HINT: Use Redis" in worker.log


def test_a_worker_with_locks_in_local_memory_refuses_to_lock(
    use_broker: UseBroker, settings: Settings
) -> None:
    """In a pool of several processes on LocMemCache the first lock raises BackendNotSupported."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    use_broker()
    refused = pytest.raises(BackendNotSupported, match="2 processes")
    with CeleryWorker("tests.app", concurrency=2), refused:
        lock_something.delay().get(timeout=20)
