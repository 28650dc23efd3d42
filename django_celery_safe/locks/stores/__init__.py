"""
The stores of locks; :func:`get_store` returns the one that the settings name.

A cache in which two processes could hold one lock is refused; the error says what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.cache import DEFAULT_CACHE_ALIAS, caches
from django.core.cache.backends.base import InvalidCacheBackendError
from django.core.signals import setting_changed
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string

from ... import conf
from ...databases import refuse_untested
from ...events import LOCK_FREED
from ...exceptions import ConfigurationError
from ...leases.holder import HeldLock
from .base import Store

USE_INSTEAD: Final = (
    "Use Redis or Valkey, by django-redis or Django's RedisCache, or set LOCK_DATABASE to a "
    "database alias."
)

INSTALL: Final = (
    "Its client: pip install 'django-celery-safe[redis]', or with [memcached]; for "
    "Django's RedisCache redis."
)

#: Caches in which two processes could hold one lock, and why (the measurements are in
#: docs/how-to/choose-where-locks-live.md).
REFUSED: Final = {
    "django.core.cache.backends.filebased.FileBasedCache": (
        "its add() is a read and then a write, so several processes get the same lock, and it "
        "drops entries when it is full"
    ),
    "django.core.cache.backends.db.DatabaseCache": (
        "its get() deletes an expired row that may have been taken again in between, and it drops "
        "entries when it is full"
    ),
    "django.core.cache.backends.dummy.DummyCache": "it stores nothing, so every add() succeeds",
    "django_redis.client.sharded.ShardClient": (
        "it spreads keys over several servers, and a lost server moves them"
    ),
}

#: Key functions that depend on the current tenant, and why they are refused.
OF_TENANT: Final = {"django_tenants.cache.make_key", "tenant_schemas.cache.make_key"}
FOR_EACH_TENANT: Final = (
    "its KEY_FUNCTION makes other keys for each tenant, and the thread that renews a lock has no "
    "tenant. Give the locks an alias without that KEY_FUNCTION, and name the tenant in their keys."
)

#: The base class of all memcached backends of Django.
MEMCACHED: Final = "django.core.cache.backends.memcached.BaseMemcachedCache"
#: Why one with several servers is refused.
SEVERAL: Final = (
    "a lock is on one of its several servers, and moves to another when that one fails. Give the "
    "locks an alias with one server, or keep them in Redis or a database."
)


@cache
def get_store() -> Store:
    """Return this process's store at the place that the settings name; threads may share it."""
    project = conf.given()  # any alias is valid
    if (database := project.get("LOCK_DATABASE")) is not None:
        return _database_store(database)
    return _cache_store(project.get("LOCK_CACHE", DEFAULT_CACHE_ALIAS))


def iter_locks(prefix: str | None = None, task: str | None = None) -> Iterator[HeldLock]:
    """
    Yield every lock that is held, in no particular order, reading a page at a time.

    Args:
        prefix: Only locks whose name starts with this text; None: all.
        task: Only locks held by a run, or a message, of the Celery task with this name;
            None: all.

    Raises:
        ConfigurationError: The cache can't list what it holds.
        LockBackendError: The store did not answer.
    """
    for lock in get_store().iter_locks():
        if prefix is not None and not lock.name.startswith(prefix):
            continue
        if task is None or lock.holder.task == task:
            yield lock


def find_lock(name: str) -> HeldLock | None:
    """Return the lock called ``name``, with its holder; None: it is free."""
    return get_store().peek(name)


def release_lock(lock: HeldLock) -> bool:
    """
    Free a lock that someone else holds, as an operator.

    Only the acquisition that ``lock`` shows is freed: if it has ended since then and
    someone else holds the lock now, the lock is left alone.

    Returns:
        True if it was freed, which is also logged as ``lock_freed``; False if that
        acquisition had ended already.
    """
    # Without a token the holder is not known, and any holder would match.
    if not lock.token or not get_store().release(lock.name, lock.token, lock.remaining):
        return False
    LOCK_FREED.emit(release_lock, name=lock.name, holder=str(lock.holder))
    return True


# Of threads that ask at the same time, each may get a store of its own: each store has its own
# connections, and its own threads that renew its leases.
@lru_cache
def _cache_store(alias: str) -> Store:
    try:
        return _make_cache_store(alias, caches[alias])
    except (ImportError, InvalidCacheBackendError, TypeError) as error:
        missing = error if isinstance(error, ImportError) else error.__cause__
        if isinstance(missing, ImportError):  # CACHES has the alias
            raise ConfigurationError(
                f"The cache {alias!r} for locks can't be imported ({missing}). {INSTALL}"
            ) from error
        raise ConfigurationError(
            f"Locks were asked for in the cache {alias!r}, which CACHES does not have or can't "
            f"load ({error}). {_name_known(alias, django_settings.CACHES)}"
        ) from error


def _forget(setting: str = "CACHES", **kwargs: Any) -> None:
    get_store.cache_clear()
    if setting == "CACHES":
        _cache_store.cache_clear()


# A forked child must not use its parent's connections.
os.register_at_fork(after_in_child=_forget)
# By override_settings.
setting_changed.connect(_forget, dispatch_uid=__name__)


def _make_cache_store(alias: str, cache: Any) -> Store:
    # The client of django-redis is of a class that its settings name; other caches have none.
    parts = (cache, getattr(cache, "client", None))
    classes = [_path(cls) for part in parts for cls in type(part).__mro__]
    flaw = next((f"{REFUSED[path]}. {USE_INSTEAD}" for path in classes if path in REFUSED), "")
    if _path(getattr(cache, "key_func", None)) in OF_TENANT:
        flaw = FOR_EACH_TENANT
    if len(getattr(cache, "_servers", ())) > 1 and MEMCACHED in classes:
        flaw = SEVERAL
    if flaw:
        where = f'CACHES["{alias}"] ({type(cache).__name__})'
        raise ConfigurationError(f"{where} can't hold locks: {flaw}")
    found = next((_STORES[path] for path in classes if path in _STORES), _PORTABLE)
    store: Store = import_string(found)(alias, cache)
    return store


def _database_store(alias: str) -> Store:
    from .database import DatabaseStore

    try:
        refuse_untested(alias, "hold locks")
    except (ConnectionDoesNotExist, TypeError) as error:
        raise ConfigurationError(
            f"LOCK_DATABASE is {alias!r}, which DATABASES does not have. "
            f"{_name_known(alias, django_settings.DATABASES)}"
        ) from error
    return DatabaseStore(alias)


def _name_known(alias: str, setting: Mapping[str, Any]) -> str:
    return f"It has: {', '.join(sorted(setting))}.{conf.did_you_mean(alias, setting)}"


#: The stores of caches; all others are portable. As texts: each imports a client, on first use.
_STORES: Final = {
    "django_redis.cache.RedisCache": f"{__name__}.redis.RedisStore",
    "django.core.cache.backends.redis.RedisCache": f"{__name__}.redis.RedisStore",
    "django.core.cache.backends.memcached.PyMemcacheCache": f"{__name__}.memcached.MemcachedStore",
    "django.core.cache.backends.locmem.LocMemCache": f"{__name__}.local.LocalStore",
}
_PORTABLE: Final = f"{__name__}.portable.PortableStore"


def _path(named: Any) -> str:
    """Return the import path of a class or function."""
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
