"""
Locks by valkey-py and django-valkey: by what the client is, and without redis-py.

No Valkey server is at hand, so the client speaks to a private Redis.
"""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe import BackendNotSupported, LockBackendError, cache_lock, find_lock
from django_celery_safe.inspection import lock_store
from django_celery_safe.locks.stores import locate
from django_celery_safe.locks.stores.redis import RedisStore
from tests.conftest import CacheSettings
from tests.locks.test_redis_clients import USES, Run, run_without
from tests.processes import dead_port
from tests.servers import RedisServer

__all__ = ["run_without"]

MakeCache = Callable[..., CacheSettings]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"CLIENT_CLASS": "django_valkey.client.HerdClient"},
        {"CONNECTION_POOL_KWARGS": {"decode_responses": True}},
        {"PARSER_CLASS": "valkey._parsers.resp2._RESP2Parser"},
    ],
    ids=["plain", "herd", "decoded", "python parser"],
)
def test_it_is_a_redis_store(
    options: dict[str, Any], valkey_cache_settings: MakeCache, settings: Settings
) -> None:
    """Whatever its options are, locks exclude and are found; what they say names Valkey."""
    settings.CACHES = valkey_cache_settings(OPTIONS=options)
    # Pools are kept by URL.
    settings.CACHES["default"]["LOCATION"] += f"?client_name=v{abs(hash(str(options)))}"
    store = locate().store()
    assert type(store) is RedisStore
    assert store.where == 'CACHES["default"] (valkey)'
    with cache_lock("x") as lock:
        found = find_lock("x")
        assert found is not None
        assert found.token == lock.token
        assert not cache_lock("x").acquire()
        lock.ensure()


def test_its_errors_are_ours(valkey_cache_settings: MakeCache, settings: Settings) -> None:
    """A server that is gone, or refuses, is a LockBackendError as with redis-py."""
    with RedisServer() as server:
        url = server.url.replace("redis", "valkey")
        settings.CACHES = valkey_cache_settings(LOCATION=url)
        assert cache_lock("x", renew=False).acquire()
        with server.client() as admin:
            admin.replicaof("127.0.0.1", dead_port())
        with pytest.raises(LockBackendError, match="is a replica"):
            cache_lock("y").acquire()
        server.stop()
        with pytest.raises(LockBackendError, match="did not answer"):
            cache_lock("x").acquire()


def test_without_redis_py(
    run_without: Run, valkey_cache_settings: MakeCache, settings: Settings
) -> None:
    """With valkey-py alone every module can be imported, and locks do all that they can."""
    settings.CACHES = valkey_cache_settings()
    done = run_without(["redis", "django_redis", "libvalkey"], "-W", "error", "-c", USES)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Django closes each cache at the end of a test, and awaits nothing.
@pytest.mark.filterwarnings("ignore:.*AsyncBackendCommands.close")
@pytest.mark.filterwarnings("ignore:coroutine 'AsyncBackendCommands.close'")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"OPTIONS": {"CLIENT_CLASS": "django_valkey.client.ShardClient"}}, "several servers"),
        ({"BACKEND": "django_valkey.async_cache.cache.AsyncValkeyCache"}, "coroutine"),
    ],
    ids=["sharded", "asynchronous"],
)
def test_what_is_refused(
    change: dict[str, Any],
    said: str,
    valkey_cache_settings: MakeCache,
    settings: Settings,
) -> None:
    """Clients of several servers, and asynchronous ones, are refused, by the check too."""
    settings.CACHES = valkey_cache_settings(**change)
    with pytest.raises(BackendNotSupported, match=said):
        cache_lock("x").acquire()
    finding = lock_store.find_place()
    assert said in finding.said
    assert "Redis" in finding.hint
