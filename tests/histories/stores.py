"""The stores that a run can use, each on a server of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.test import override_settings

from tests.servers import Server, ServerPool
from tests.servers.databases import Databases

#: Stores that lose their memory with a restart.
FORGETFUL = {"django-redis", "redis-cache", "memcached"}

#: All of them, with the shortest and the longest lease that suits their speed, s.
LEASES = {
    "django-redis": (0.05, 0.3),
    "redis-cache": (0.05, 0.3),
    "postgres": (0.1, 0.5),
    "sqlite": (0.1, 0.5),
    "memcached": (2, 4),
    "portable": (6, 9),
}

#: Stores whose leases are whole seconds.
WHOLE = {"memcached", "portable"}

BACKENDS = {
    "django-redis": "django_redis.cache.RedisCache",
    "redis-cache": "django.core.cache.backends.redis.RedisCache",
    "memcached": "django.core.cache.backends.memcached.PyMemcacheCache",
    "portable": "diskcache.DjangoCache",
}


@contextmanager
def use_store(name: str, servers: ServerPool, folder: Path) -> Iterator[Server | None]:
    """
    Put locks into this store during the block; gives its server, or None if it has none.

    Args:
        folder: For the files of a store that lives in files.
    """
    if name in {"postgres", "sqlite"}:
        kind: Any = "postgres" if name == "postgres" else "sqlite-immediate"
        with (
            Databases(servers, folder).alias(kind, folder) as alias,
            override_settings(DJANGO_CELERY_SAFE={"LOCK_DATABASE": alias}),
        ):
            yield servers.postgres if name == "postgres" else None
        return
    server: Any = None
    if name != "portable":
        server = servers.memcached if name == "memcached" else servers.redis
    location = str(folder / "cache") if server is None else server.url
    entry = {"BACKEND": BACKENDS[name], "LOCATION": location}
    with override_settings(CACHES={"default": entry}):
        yield server
