"""Fixtures that put the locks into one store after another."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe.locks.stores import local
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.contract import cases

#: Stores whose cases are nightly: five have the code of another, the last has leases of seconds.
NIGHTLY_STORES = [
    "redis-cache",
    "redis-plain",
    "cluster",
    "valkey",
    "pgbouncer",
    "portable",
]

#: Each store that processes share, by the name that its tests carry.
SHARED_STORES = [
    "django-redis",
    "redis-cache",
    "redis-plain",
    "cluster",
    "valkey",
    "memcached",
    "postgres",
    "pgbouncer",
    "mariadb",
    "sqlite",
    "portable",
]

#: Stores whose leases are whole seconds.
COARSE_STORES = ["memcached", "portable"]

#: Stores whose leases can be as short as a test likes.
FINE_STORES = [name for name in SHARED_STORES if name not in COARSE_STORES]


#: Stores in which several may hold a lock.
LIMITING_STORES = [
    name for name in FINE_STORES if name not in {"redis-cache", "redis-plain", "valkey"}
]


def _params(stores: list[str]) -> list[Any]:
    """Return each store, and those that can once more with three holders for each lock."""
    limited = [f"{name}-of-3" for name in [*LIMITING_STORES, "local"] if name in stores]
    return [
        pytest.param(name, marks=_marks(name.partition("-of-")[0])) for name in stores + limited
    ]


def _marks(store: str) -> list[pytest.MarkDecorator]:
    """Return the tier of a store's cases."""
    if store == "mariadb":
        return [pytest.mark.mariadb]
    return [pytest.mark.nightly] if store in NIGHTLY_STORES else []


@pytest.fixture
def use_store(
    request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Put the locks of this test into the store of that name."""
    cases.hold_other_places.cache_clear()

    def use(name: str) -> None:
        name, is_limited, limit = name.partition("-of-")
        if is_limited:
            monkeypatch.setenv(cases.LIMIT, limit)
        if name == "local":
            settings.CACHES = {
                "default": {
                    "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
                    "LOCATION": request.node.nodeid,
                }
            }
            local.clear()
        elif name in {"postgres", "mariadb", "sqlite"}:
            make_database: MakeDatabase = request.getfixturevalue("make_database")
            kind = "sqlite-immediate" if name == "sqlite" else name
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": make_database(kind)}  # type: ignore[arg-type]
        elif name == "pgbouncer":
            alias = request.getfixturevalue("pgbouncer_alias")
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        elif name == "memcached":
            settings.CACHES = request.getfixturevalue("memcached_cache_settings")()
        elif name == "cluster":
            settings.CACHES = request.getfixturevalue("cluster_cache_settings")()
        elif name == "valkey":
            settings.CACHES = request.getfixturevalue("valkey_cache_settings")()
        elif name == "portable":
            folder = str(request.getfixturevalue("tmp_path") / "diskcache")
            settings.CACHES = {
                "default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": folder, "TIMEOUT": None}
            }
        else:
            make_cache: MakeRedisCache = request.getfixturevalue("redis_cache_settings")
            settings.CACHES = make_cache("django-redis" if name == "django-redis" else "django")
            if name == "redis-plain":
                settings.CACHES["default"]["BACKEND"] = "tests.contract.plain.PlainCache"

    return use


@pytest.fixture(params=_params([*SHARED_STORES, "local"]))
def any_store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store in turn."""
    use_store(request.param)
    return str(request.param)


@pytest.fixture(params=_params([*FINE_STORES, "local"]))
def fine_store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store in turn with short leases."""
    use_store(request.param)
    return str(request.param)


@pytest.fixture(params=_params(FINE_STORES))
def fine_shared_store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store in turn with short leases that processes share."""
    use_store(request.param)
    return str(request.param)


@pytest.fixture(params=_params(COARSE_STORES))
def coarse_store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store in turn whose leases are of seconds."""
    use_store(request.param)
    return str(request.param)


@pytest.fixture(params=_params(SHARED_STORES))
def shared_store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store in turn that processes share."""
    use_store(request.param)
    return str(request.param)
