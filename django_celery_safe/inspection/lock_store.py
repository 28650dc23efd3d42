"""
Findings about the store that holds the locks, for the system checks and for the doctor.

``doctor`` checks the rest: it measures how a store behaves.
"""

from __future__ import annotations

import os
import uuid
from typing import Any, Final

from .. import conf
from ..exceptions import BackendNotSupported, CelerySafeError, LockBackendError
from ..foreign_errors import describe_error
from ..leases.holder import describe_holder
from ..locks.stores import USE_INSTEAD, Location, emptied_with_locks, locate
from ..locks.stores.base import Store
from .findings import OK, UNKNOWN, UNSAFE, WARNING, Finding

#: Lease of the test lock, s: if the process is killed, the lock stays held for this time.
TRIED_LEASE: Final = 10.0


def find_place(cache: str | conf.Unset = conf.UNSET) -> Finding:
    """E002, E003: it can't hold locks. W002: processes don't share them. Queries no server."""
    values: dict[str, Any] = {}
    try:
        location = locate(cache)
        values |= location._asdict()
        store = location.store()
    except Exception as error:  # noqa: BLE001 - it must be said, whatever it is
        if isinstance(error, BackendNotSupported):
            values["where"] = error.where
        return explain(error)._replace(values=values)
    values["where"] = store.where
    text = f"Locks live in {store.where}"
    if store.shared:
        return Finding(OK, f"{text}.", values=values)
    text += (
        ", which every process has for itself: two worker processes, or a worker and a web "
        "server, get the same lock."
    )
    return Finding(WARNING, text, USE_INSTEAD, "W002", values)


def try_lock(store: Store) -> None:
    """Acquire a lock and release it; raise the store's error if that fails."""
    name, token = f"check:{uuid.uuid4().hex}", os.urandom(16).hex()
    holder = describe_holder(None, None, renewed=False)
    store.acquire(name, token, store.nearest_lease(TRIED_LEASE), holder)
    store.release(name, token)


def find_permissions(store: Store) -> Finding | None:
    """Find out whether the server allows this user all commands that locks need; doctor only."""
    refused = store.ask_refused()
    if not refused:
        text = "The server lets this user run every command that locks need."
        return None if refused is None else Finding(OK, text, values={"refused": []})
    text = (
        f"The server refuses to this user what locks need: {'; '.join(refused)}. Locks fail with "
        f"LockBackendError, at once or now and then."
    )
    hint = "Allow it in the user's ACL."
    return Finding(WARNING, text, hint, values={"refused": refused})


def find_weakness(store: Store) -> Finding | None:
    """W004: the store has a weakness that can lose locks."""
    if not store.weakness:
        return None
    text = f"Locks live in {store.where}: {store.weakness}."
    return Finding(WARNING, text, USE_INSTEAD, "W004")


def find_clearing(location: Location) -> Finding:
    """W005: ``cache.clear()`` frees the locks along with other things."""
    shared = emptied_with_locks(location)
    values = {"emptied_with": shared}
    if not shared:
        text = "Nothing else that the project clears takes the locks along."
        return Finding(OK, text, values=values)
    text = (
        f"Locks live in {location.store().where}, which is emptied along with "
        f"{', '.join(shared)}: one cache.clear() frees every lock while its holder works."
    )
    hint = (
        "Name in LOCK_CACHE an alias with a database number (memcached: a server; Redis "
        "Cluster: a cluster) of its own: "
        'DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}. If other projects share that, give it a '
        "KEY_PREFIX too: locks of the same name would exclude each other."
    )
    return Finding(WARNING, text, hint, "W005", values)


def find_eviction(store: Store) -> Finding | None:
    """W006: the server deletes locks when it runs short of memory."""
    eviction = store.ask_eviction()
    if eviction is None:
        return None
    values = {"policy": eviction.policy, "max_memory_bytes": eviction.max_memory}
    text = f"Locks live in {store.where}: its maxmemory-policy is {eviction.policy}, which deletes "
    if eviction.spares_locks:
        text += "no lock when its memory is short."
        return Finding(OK, text, values=values)
    text += "locks when its memory is short, and then two processes hold one lock."
    if not eviction.max_memory:
        text += " (maxmemory is 0: the server deletes nothing before somebody sets it.)"
    hint = (
        "Set maxmemory-policy to noeviction, give the locks a server of their own, set "
        "LOCK_DATABASE, or protect what the locks guard by their fence."
    )
    # Without a memory limit, the system checks do not report it.
    return Finding(UNSAFE, text, hint, "W006" if eviction.max_memory else "", values)


def explain(error: Exception) -> Finding:
    """E002, E003, E009, W006: the finding for an error that the store raised."""
    if isinstance(error, BackendNotSupported):
        text = f"{error.where} can't {error.what}: {error.reason}."
        return Finding(UNSAFE, text, error.hint, "E002")
    if isinstance(error, LockBackendError) and error.hint:
        text = f"Locks live in {error.where}, which refused to {error.action}: {error.reason}."
        return Finding(UNKNOWN, text, error.hint, "E009")
    if isinstance(error, LockBackendError):
        asked = f"could not be asked to {error.action} ({error.reason})"
        text = f"Locks live in {error.where}, which {asked}."
        hint = "Check that the server is up and reachable, and lets this user ask it."
        return Finding(UNKNOWN, text, hint, "W006")
    hint = "See LOCK_CACHE and LOCK_DATABASE"
    if isinstance(error, CelerySafeError):
        return Finding(UNKNOWN, str(error), f"{hint}.", "E003")
    text = f"The store of the locks failed: {describe_error(error)}."
    return Finding(UNKNOWN, text, f"{hint}, and that alias in CACHES.", "E003")
