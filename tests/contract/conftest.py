"""Fixtures that put the locks into one store after another."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe.locks.stores import local
from tests.conftest import MakeDatabase, MakeRedisCache

#: Stores whose cases are long: two have the code of another, the last has leases of seconds.
LONG_STORES = ["redis-cache", "redis-plain", "portable"]

#: Each store that processes share, by the name that its tests carry.
SHARED_STORES = [
    "django-redis",
    "redis-cache",
    "redis-plain",
    "memcached",
    "postgres",
    "sqlite",
    "portable",
]

#: Those whose leases are of seconds.
COARSE_STORES = ["memcached", "portable"]

#: Those whose leases can be as short as a test likes.
FINE_STORES = [name for name in SHARED_STORES if name not in COARSE_STORES]


def _params(stores: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG_STORES else [])
        for name in stores
    ]


@pytest.fixture
def use_store(request: pytest.FixtureRequest, settings: Settings) -> Callable[[str], None]:
    """Put the locks of this test into the store of that name."""

    def use(name: str) -> None:
        if name == "local":
            settings.CACHES = {
                "default": {
                    "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
                    "LOCATION": request.node.nodeid,
                }
            }
            local.clear()
        elif name in {"postgres", "sqlite"}:
            make_database: MakeDatabase = request.getfixturevalue("make_database")
            kind = "postgres" if name == "postgres" else "sqlite-immediate"
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": make_database(kind)}  # type: ignore[arg-type]
        elif name == "memcached":
            settings.CACHES = request.getfixturevalue("memcached_cache_settings")()
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
