"""Lets caches of the tests connect to a Redis Cluster, in all their processes."""

from typing import Any

from django.core.cache.backends.redis import RedisCache, RedisCacheClient
from django_redis.pool import ConnectionFactory
from redis.cluster import RedisCluster


class ClusterConnectionFactory(ConnectionFactory):
    """Connects django-redis as docs/how-to/choose-where-locks-live.md has it."""

    def connect(self, url: str) -> Any:
        """Return a client of the whole cluster."""
        return RedisCluster.from_url(url, **self.options["REDIS_CLIENT_KWARGS"])


class ClusterCacheClient(RedisCacheClient):
    """The client of ClusterCache."""

    def __init__(self, servers: list[str], **options: Any) -> None:
        super().__init__(servers, **options)
        self.cluster = RedisCluster.from_url(servers[0], **options)

    def get_client(self, key: Any = None, *, write: bool = False) -> Any:
        """Return a client of the whole cluster."""
        return self.cluster


class ClusterCache(RedisCache):
    """Django's cache, with a client for clusters."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        super().__init__(server, params)
        self._class = ClusterCacheClient
