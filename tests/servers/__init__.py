"""
Real servers for tests and benchmarks: private, on free ports, in temporary folders.

``programs`` finds the programs, ``server`` is what all servers share, one module
each for redis, memcached, postgres, mariadb, pgbouncer and rabbitmq; ``databases`` makes databases
that Django knows while a test runs. ``ServerPool`` starts each on first use.
"""

from tests.servers.mariadb import MariaDBServer as MariaDBServer
from tests.servers.memcached import MemcachedServer as MemcachedServer
from tests.servers.pgbouncer import PgBouncerServer as PgBouncerServer
from tests.servers.pool import ServerPool as ServerPool
from tests.servers.postgres import PostgresServer as PostgresServer
from tests.servers.programs import ProgramNotFound as ProgramNotFound
from tests.servers.rabbitmq import RabbitMQServer as RabbitMQServer
from tests.servers.redis import RedisServer as RedisServer
from tests.servers.redis import SentinelServer as SentinelServer
from tests.servers.redis_cluster import RedisClusterServer as RedisClusterServer
from tests.servers.server import Server as Server
