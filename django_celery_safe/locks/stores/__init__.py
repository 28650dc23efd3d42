"""
Which store a lock lives in.

:func:`locate` finds the place that the settings or a cache alias name, :meth:`Location.store`
returns its store. A cache on which two can hold one lock is refused, with what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache, InvalidCacheBackendError
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string

from ... import conf
from ...databases import refuse_untested
from ...events import LOCK_FREED
from ...exceptions import BackendNotSupported, ConfigurationError
from ...leases.holder import HeldLock
from .base import Store

USE_INSTEAD: Final = (
    "Use Redis (django-redis or Django's RedisCache), or set LOCK_DATABASE to a database alias."
)

#: Caches on which two can hold one lock, and why. Measured: docs/explanation/stores.md.
REFUSED: Final = {
    "django.core.cache.backends.filebased.FileBasedCache": (
        "its add() is a read and then a write, so several processes get the same lock, and it "
        "drops entries when it is full"
    ),
    "django.core.cache.backends.db.DatabaseCache": (
        "its get() deletes an expired row that may have been taken anew in between, and it drops "
        "entries when it is full"
    ),
    "django.core.cache.backends.dummy.DummyCache": "it stores nothing, so every add() succeeds",
    "django_redis.client.sharded.ShardClient": (
        "it spreads keys over several servers, and a lost server moves them"
    ),
}

#: Every memcached backend of Django.
MEMCACHED: Final = "django.core.cache.backends.memcached.BaseMemcachedCache"


class Location(NamedTuple):
    """
    Where locks live: a cache alias or a database alias.

    Unlike a store, which belongs to one process and one state of the settings, a
    location can be kept.
    """

    kind: str
    alias: str

    def store(self) -> Store:
        """Return this process's store for the location; threads may share it."""
        return _cache_store(self.alias) if self.kind == "cache" else _database_store(self.alias)


def locate(cache: str | conf.Unset = conf.UNSET) -> Location:
    """Return where locks live: in ``cache``; unset: where the settings say."""
    if not isinstance(cache, conf.Unset):
        return Location("cache", cache)
    settings = conf.current()
    database = settings["LOCK_DATABASE"]
    if database is not None:
        return Location("database", database)
    return Location("cache", settings["LOCK_CACHE"])


def get_store(cache: str | conf.Unset = conf.UNSET) -> Store:
    """Return this process's store of the locks in ``cache``; unset: where the settings say."""
    return locate(cache).store()


def iter_locks(
    prefix: str | None = None, task: str | None = None, *, cache: str | conf.Unset = conf.UNSET
) -> Iterator[HeldLock]:
    """
    Yield every lock that is held, in no order, read a page at a time.

    Args:
        prefix: Only locks whose name begins with this text; None: all.
        task: Only locks held by a run, or a message, of the Celery task of this name;
            None: all.
        cache: Alias of the cache to look into; unset: where the settings say.

    Raises:
        BackendNotSupported: The cache can't list what it holds.
        LockBackendError: The store did not answer.
    """
    for lock in get_store(cache).iter_locks():
        if prefix is not None and not lock.name.startswith(prefix):
            continue
        if task is None or lock.holder.task == task:
            yield lock


def find_lock(name: str, cache: str | conf.Unset = conf.UNSET) -> HeldLock | None:
    """Return the lock called ``name``; None if nobody holds it."""
    return get_store(cache).peek(name)


def locks_are_shared(cache: str | conf.Unset = conf.UNSET) -> bool:
    """Return whether other processes see the locks that this one sees."""
    return get_store(cache).shared


def release_lock(lock: HeldLock, cache: str | conf.Unset = conf.UNSET) -> bool:
    """
    Free somebody else's lock, as an operator.

    Only the acquisition that ``lock`` shows is freed: if it ended meanwhile and
    someone else holds the lock now, that one is left alone.

    Returns:
        True if it was freed, which is also logged and sent as ``lock_freed``; False if that
        acquisition had ended already.
    """
    # Without a token nobody is known to hold it, and any holder would match.
    store = get_store(cache)
    if not lock.token or not store.release(lock.name, lock.token, lock.remaining):
        return False
    LOCK_FREED.emit(release_lock, name=lock.name, holder=str(lock.holder))
    return True


def emptied_with_locks(location: Location) -> list[str]:
    """Return what one ``clear()`` empties along with the locks, as messages name it."""
    emptied = location.store().emptied_with()
    if emptied is None:
        return []
    if location.alias == "default":
        return ["everything else in the project's default cache"]
    return [
        f'CACHES["{alias}"]'
        for alias in django_settings.CACHES
        if alias != location.alias and _emptied_with(alias) == emptied
    ]


def _emptied_with(alias: str) -> object:
    try:
        return Location("cache", alias).store().emptied_with()
    except Exception:  # noqa: BLE001 - a fault of another alias is not for this question
        return None


class _StoreCache:
    """The stores that this process has used, and the caches that they were made for."""

    stores: dict[str, Store] = {}
    caches: object = None


# The parent's connections are not the child's.
os.register_at_fork(after_in_child=lambda: _StoreCache.stores.clear())


def _cache_store(alias: str) -> Store:
    # Looking up the cache costs more than all else that happens before a request.
    # Django puts a new object there when the setting CACHES changes.
    current: object = caches._connections  # type: ignore[attr-defined]
    if _StoreCache.caches is not current:
        _StoreCache.stores, _StoreCache.caches = {}, current
    store = _StoreCache.stores.get(alias)
    if store is None:
        # Threads that come first at once make several, and all use the first: each store
        # has threads of its own that renew its leases.
        try:
            store = _make_cache_store(alias, _find_cache(alias))
        except ImportError as error:
            raise ConfigurationError(
                f"Locks were asked for in the cache {alias!r}, which can't be imported "
                f"({error}). If its client is not installed: for Redis, pip install "
                f"'django-celery-safe[redis]'; for memcached, pip install "
                f"'django-celery-safe[memcached]'."
            ) from error
        store = _StoreCache.stores.setdefault(alias, store)
    return store


def _find_cache(alias: str) -> Any:
    try:
        return caches[alias]
    except (InvalidCacheBackendError, TypeError) as error:
        raise ConfigurationError(
            f"Locks were asked for in the cache {alias!r}, which CACHES does not have or can't "
            f"load ({error}). {_name_known(alias, django_settings.CACHES)}"
        ) from error


def _make_cache_store(alias: str, cache: Any) -> Store:
    classes = [_path(cls) for cls in type(cache).__mro__]
    client: Any = cache.client if "django_redis.cache.RedisCache" in classes else None
    classes += [_path(cls) for cls in type(client).__mro__] if client is not None else []
    where = f'CACHES["{alias}"] ({type(cache).__name__})'
    for path, reason in REFUSED.items():
        if path in classes:
            raise BackendNotSupported(where, reason, USE_INSTEAD)
    if len(getattr(cache, "_servers", ())) > 1 and MEMCACHED in classes:
        raise BackendNotSupported(
            where,
            "a lock is on one of its several servers, and moves to another when that one fails",
            "Give the locks an alias with one server, or keep them in Redis or a database.",
        )
    make = next((_MAKERS[path] for path in classes if path in _MAKERS), _PORTABLE)
    return make(alias, cache)


def _database_store(alias: str) -> Store:
    try:
        refuse_untested(alias, "hold locks")
    except (ConnectionDoesNotExist, TypeError) as error:
        raise ConfigurationError(
            f"LOCK_DATABASE is {alias!r}, which DATABASES does not have. "
            f"{_name_known(alias, django_settings.DATABASES)}"
        ) from error
    return _kept_database_store(alias)


def _name_known(alias: str, setting: Mapping[str, Any]) -> str:
    meant = conf.closest(alias, setting)
    guess = f" Did you mean {meant!r}?" if meant else ""
    return f"It has: {', '.join(sorted(setting))}.{guess}"


@lru_cache
def _kept_database_store(alias: str) -> Store:
    from .database import DatabaseStore

    return DatabaseStore(alias)


def _lazily(path: str) -> Callable[[str, BaseCache], Store]:
    """Return a maker of stores that imports the store, and its client, at the first use."""
    return lambda alias, cache: import_string(f"{__name__}.{path}")(alias, cache)


_MAKERS: Final[dict[str, Callable[[str, BaseCache], Store]]] = {
    "django_redis.cache.RedisCache": _lazily("redis.RedisStore"),
    "django.core.cache.backends.redis.RedisCache": _lazily("redis.RedisStore"),
    "django.core.cache.backends.memcached.PyMemcacheCache": _lazily("memcached.MemcachedStore"),
    "django.core.cache.backends.locmem.LocMemCache": _lazily("local.LocalStore"),
}
_PORTABLE: Final = _lazily("portable.PortableStore")


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
