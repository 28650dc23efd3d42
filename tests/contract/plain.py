"""A cache whose locks are in Redis without the kept connections; naming it registers its store."""

from django.core.cache.backends.redis import RedisCache

from django_celery_safe.locks.stores.redis import RedisStore
from django_celery_safe.locks.stores.wire import PlainWire
from tests.faulty import let_choose


class PlainStore(RedisStore):
    """Sends all commands through redis-py's client."""

    wire_class = PlainWire


class PlainCache(RedisCache):
    """Chooses PlainStore."""


let_choose({PlainCache: PlainStore})
