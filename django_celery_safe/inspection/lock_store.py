"""
Faults of the place where the locks live, as Django's messages, for the checks and the doctor.

:func:`check_place` reads the settings alone; :func:`check_server` takes a lock, and asks the
server what can delete it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any, Final

from django.conf import settings
from django.core import checks
from django.core.cache import DEFAULT_CACHE_ALIAS
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS

from .. import conf
from ..exceptions import CelerySafeError, LockBackendError
from ..leases.holder import describe_holder
from ..locks.stores import USE_INSTEAD, get_store
from ..locks.stores.base import SPARES_LOCKS, LockRequest, Store
from ..texts import describe_error, printable

#: Stands before the id of a message, and is the tag of the checks.
PREFIX: Final = "django_celery_safe"
#: Lease of the test lock, s: if the process is killed, the lock stays held for this time.
TRIED_LEASE: Final = 10.0


def fault(id_: str, text: str, hint: str) -> CheckMessage:
    """Return the message of a system check: an error or, if the id begins with W, a warning."""
    kind = checks.Error if id_.startswith("E") else checks.Warning
    return kind(printable(text), hint=hint, id=f"{PREFIX}.{id_}")


def check_place() -> list[CheckMessage]:
    """Return E002 if locks can't live there, W002 if the store may lose them; query no server."""
    if found := list(_find_sqlite(conf.get("LOCK_DATABASE"))):
        return found
    try:
        store = get_store()
    except Exception as error:  # noqa: BLE001 - a check must say what it is, whatever it is
        return [explain(error)]
    why = store.weakness
    if not store.shared:
        why = "every process has for itself what is there, so two of them get the same lock"
    text = f"Locks live in {store.where}: {why}."
    return [fault("W002", text, USE_INSTEAD)] if why else []


def check_server() -> list[CheckMessage]:
    """
    Return E002 if the server refuses locks, W002 if it may lose them, W010 if it is silent.

    It queries the server, and is of use only where :func:`check_place` returns no error.
    """
    store = get_store()
    found = list(_find_clearing(store))
    for ask in (try_lock, _find_refused, _find_eviction):
        try:
            found += ask(store)
        except Exception as error:  # noqa: BLE001 - as above
            found.append(explain(error))
            if not _is_refusal(error):
                break  # it would not answer the other questions either
    return found


def explain(error: Exception) -> CheckMessage:
    """Return W010 for a store that did not answer, E002 for any other error that it raised."""
    if isinstance(error, LockBackendError) and not _is_refusal(error):
        text = f"{error.where} could not be asked to {error.action} ({error.reason})."
        hint = "Check that the server is up and reachable, and lets this user ask it."
        return fault("W010", text, hint)
    hint = f"Correct LOCK_CACHE or LOCK_DATABASE in {conf.NAME}, or what they name."
    is_ours = isinstance(error, CelerySafeError)
    text = str(error) if is_ours else f"The store of the locks failed: {describe_error(error)}."
    return fault("E002", text, hint)


def _is_refusal(error: Exception) -> bool:
    """Return whether the server answered, and said no."""
    return isinstance(error, LockBackendError) and bool(error.hint)


def _find_sqlite(alias: object) -> Iterator[CheckMessage]:
    """Yield E002 for locks in a SQLite file that also holds data, or in memory."""
    files = {
        name: os.path.realpath(str(database.get("NAME")))
        for name, database in settings.DATABASES.items()
        if database.get("ENGINE", "").endswith(".sqlite3")
    }
    file = files.get(alias) if isinstance(alias, str) else None
    if file is None:
        return
    why = "that also holds data: while a task writes there, its lock can't be renewed"
    if file.endswith(":memory:") or "mode=memory" in file:
        why = "in memory: each thread has one of its own, so two get the same lock"
    elif alias != DEFAULT_DB_ALIAS and [*files.values()].count(file) == 1:
        return
    text = f"LOCK_DATABASE is {alias!r}, a SQLite database {why}."
    migrate = "manage.py migrate django_celery_safe --database=<alias>"
    yield fault("E002", text, f"Name an alias with a SQLite file of its own, and run {migrate}.")


def _find_clearing(store: Store) -> Iterator[CheckMessage]:
    """Yield W002 if ``cache.clear()`` frees the locks along with other things."""
    own = conf.get("LOCK_CACHE")
    if conf.get("LOCK_DATABASE") is not None or not store.shared:
        return  # LocMemCache does not hold them itself
    others = [alias for alias in settings.CACHES if alias != own and _place(alias) == _place(own)]
    along = ", ".join(f'CACHES["{alias}"]' for alias in others)
    if own == DEFAULT_CACHE_ALIAS:
        along = "everything else in the project's default cache"
    if along:
        text = f"Locks live in {store.where}: a cache.clear() frees all of them along with {along}."
        hint = "Name in LOCK_CACHE an alias with a database number (memcached: a server; Redis "
        hint += "Cluster: a cluster) of its own, and a KEY_PREFIX if other projects share that."
        yield fault("W002", text, hint)


def _place(alias: str) -> tuple[object, object]:
    """Return the server and database of a cache, as far as its settings tell."""
    given: dict[str, Any] = settings.CACHES[alias]
    return given.get("LOCATION", alias), given.get("OPTIONS", {}).get("db")


def try_lock(store: Store) -> list[CheckMessage]:
    """Acquire a lock and release it; raise the store's error if that fails."""
    token, holder = uuid.uuid4().hex, describe_holder(None, None, renewed=False)
    store.take(LockRequest(f"check:{token}", token, store.nearest_lease(TRIED_LEASE), holder))
    store.release(f"check:{token}", token)
    return []


def _find_refused(store: Store) -> Iterator[CheckMessage]:
    """Yield E002 for commands that locks need, if only now and then, and the server refuses."""
    if refused := store.ask_refused():
        text = f"{store.where} refuses to this user what locks need: {'; '.join(refused)}."
        hint = "Allow it in the user's ACL, if the server gives no other reason."
        yield fault("E002", text, hint)


def _find_eviction(store: Store) -> Iterator[CheckMessage]:
    """Yield W002 if the server deletes locks when it runs short of memory."""
    try:
        eviction = store.ask_eviction()
    except LockBackendError as error:
        yield fault("W010", str(error), "Let this user run INFO, and check that the server is up.")
        return
    policy, max_memory = eviction or (SPARES_LOCKS, 0)
    if max_memory and policy != SPARES_LOCKS:
        text = f"Locks live in {store.where}: its maxmemory-policy is {policy}, which deletes "
        text += "locks when its memory is short."
        hint = "Set it to noeviction, or give the locks a server or a LOCK_DATABASE of their own."
        yield fault("W002", text, hint)
