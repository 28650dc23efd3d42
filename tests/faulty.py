"""How a cache backend of the tests chooses a store of its own, one with a fault."""

from collections.abc import Mapping

from django.core.cache.backends.base import BaseCache

from django_celery_safe.locks import stores
from django_celery_safe.locks.stores.base import Store
from django_celery_safe.locks.stores.redis import RedisStore


def let_choose(chosen: Mapping[type[BaseCache], type[RedisStore]]) -> None:
    """Let each of these caches have its locks in its store, in this process."""

    def make(alias: str, cache: BaseCache) -> Store:
        return chosen[type(cache)](alias, cache)

    for cache in chosen:
        stores._MAKERS[stores._path(cache)] = make
