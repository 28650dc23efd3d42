"""Lets caches of the tests connect to a Redis Cluster, in all their processes."""

from typing import Any

from django_redis.pool import ConnectionFactory
from redis.cluster import RedisCluster


class ClusterConnectionFactory(ConnectionFactory):
    """Connects as docs/how-to/choose-where-locks-live.md has it."""

    def connect(self, url: str) -> Any:
        """Return a client of the whole cluster."""
        return RedisCluster.from_url(url, **self.options["REDIS_CLIENT_KWARGS"])
