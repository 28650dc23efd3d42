"""
Real servers for tests and benchmarks: private, on free ports, in temporary folders.

``programs`` finds the programs, ``server`` is what all servers share, one module
each for redis, memcached, postgres, mariadb, pgbouncer and rabbitmq; ``databases`` makes databases
that Django knows while a test runs. ``ServerPool`` starts each on first use.
"""

from tests.servers.mariadb import MariaDBServer
from tests.servers.memcached import MemcachedServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.pool import ServerPool
from tests.servers.postgres import PostgresServer
from tests.servers.programs import ProgramNotFound
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer, SentinelServer
from tests.servers.redis_cluster import RedisClusterServer
from tests.servers.server import Server

__all__ = [
    "MariaDBServer",
    "MemcachedServer",
    "PgBouncerServer",
    "PostgresServer",
    "ProgramNotFound",
    "RabbitMQServer",
    "RedisClusterServer",
    "RedisServer",
    "SentinelServer",
    "Server",
    "ServerPool",
]
