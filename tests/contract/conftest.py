"""Fixtures that put the locks into one store after another."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe.locks.stores import local
from tests.caches import cache_at
from tests.contract import cases

#: Each store that processes share, by the name that its tests carry; "database" is of ``--db``.
SHARED_STORES = [
    "django-redis", "memcached", "database", "cluster", "portable", "redis-cache", "pgbouncer",
]  # fmt: skip

#: Stores whose cases are nightly: they have the code of another.
NIGHTLY_STORES = ["redis-cache", "pgbouncer"]


def params(*stores: str) -> list[Any]:
    """Return stores as parameters; ``<name>-of-3`` has three holders for each lock."""
    marks = {"database": pytest.mark.sql}
    marks |= dict.fromkeys(NIGHTLY_STORES, pytest.mark.nightly)
    return [pytest.param(name, marks=marks.get(name.partition("-of-")[0], ())) for name in stores]


@pytest.fixture
def use_store(
    request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Put the locks of this test into the store of that name."""
    cases.hold_other_places.cache_clear()
    settings.DJANGO_CELERY_SAFE = {}

    def use(name: str) -> None:
        name, is_limited, limit = name.partition("-of-")
        if is_limited:
            monkeypatch.setenv(cases.LIMIT, limit)
        if name == "local":
            settings.CACHES = cache_at(request.node.nodeid, "memory")
            local.clear()
        elif name in {"database", "pgbouncer"}:
            fixture = "db_alias" if name == "database" else "pgbouncer_alias"
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": request.getfixturevalue(fixture)}
        elif name in {"memcached", "cluster"}:
            settings.CACHES = request.getfixturevalue(f"{name}_cache_settings")()
        elif name == "portable":
            folder = str(request.getfixturevalue("tmp_path") / "diskcache")
            settings.CACHES = cache_at(folder, "diskcache", TIMEOUT=None)
        else:
            kind = "django-redis" if name == "django-redis" else "django"
            settings.CACHES = request.getfixturevalue("redis_cache_settings")(kind)

    return use
