"""The setting CACHES, for locks in each kind of cache."""

from typing import Any, Literal

from tests.servers import RedisClusterServer

CacheSettings = dict[str, dict[str, Any]]
RedisCacheKind = Literal["django-redis", "django"]

CACHE_BACKENDS = {
    "django-redis": "django_redis.cache.RedisCache",
    "django": "django.core.cache.backends.redis.RedisCache",
    "memcached": "django.core.cache.backends.memcached.PyMemcacheCache",
    "memory": "django.core.cache.backends.locmem.LocMemCache",
    "diskcache": "diskcache.DjangoCache",
}


def cache_at(
    location: str, kind: str = "django-redis", alias: str = "default", **options: Any
) -> CacheSettings:
    """Return CACHES with one cache: of a kind of ``CACHE_BACKENDS``, or of a backend's path."""
    backend = CACHE_BACKENDS.get(kind, kind)
    return {alias: {"BACKEND": backend, "LOCATION": location, **options}}


def caches_of_cluster(server: RedisClusterServer, **options: Any) -> CacheSettings:
    """Return CACHES with django-redis and redis-py's client for clusters, as the docs show it."""
    client = {
        "CONNECTION_FACTORY": "tests.cluster_caches.ClusterConnectionFactory",
        "REDIS_CLIENT_KWARGS": {"socket_timeout": 5, **options},
    }
    return cache_at(server.url, OPTIONS=client)
