"""
System checks: what in the settings would let a lock, a task or an e-mail go wrong.

``manage.py check`` shows them. A Celery worker shows no check's result, so when
one starts, ours are written to its log. docs/reference/checks.md lists them.
``tasks`` has those of single-instance tasks, ``sending`` those of brokers and the outbox,
``redelivery`` those of tasks that are done once, ``flags`` that of flags which forms take
back, ``stages`` those of runs of stages, ``databases`` that of databases on which nothing
was tested.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

from celery import signals
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from .. import conf
from ..exceptions import (
    BackendNotSupported,
    CelerySafeError,
    ConfigurationError,
    LockBackendError,
    describe_error,
)
from ..locks.lock import describe_holder
from ..locks.stores import USE_INSTEAD, find_emptied_with, locate
from ..locks.stores.base import Store
from ..locks.stores.local import set_pool_processes
from ..texts import get_logger
from .databases import check_databases
from .flags import check_flags
from .messages import PREFIX, error, warning
from .redelivery import check_redelivery
from .sending import check_relays, check_sending
from .stages import check_stages
from .tasks import check_tasks

logger = get_logger(__name__)

#: Lease of the lock that a check takes, s: as long it stays if the check is killed.
TRIED_LEASE: Final = 10.0
LOSES: Final = (
    "A lock that is lost lets two run at once. Set maxmemory-policy to noeviction, give the locks "
    "a server of their own or set LOCK_DATABASE, or protect what they guard by the lock's fence."
)


def connect() -> None:
    """Register the checks, and their log record at the start of a worker."""
    checks.register(check_all, PREFIX)
    checks.register(check_deployment, PREFIX, deploy=True)
    # Not worker_init: logging is not set up there yet, and a record would be lost.
    signals.celeryd_after_setup.connect(_on_worker_setup, dispatch_uid=PREFIX)
    signals.worker_ready.connect(_on_worker_ready, dispatch_uid=PREFIX)


def check_all(**kwargs: Any) -> list[CheckMessage]:
    """Return what all checks say; if the setting is no dict, only that."""
    try:
        conf.given()
    except ConfigurationError as fault:
        return [error(1, str(fault), f"Write {conf.NAME} = {{...}}.")]
    return [
        *check_settings(),
        *check_lock_store(),
        *check_sqlite(),
        *check_databases(),
        *check_tasks(),
        *check_sending(),
        *check_redelivery(),
        *check_flags(),
    ]


def check_settings() -> list[CheckMessage]:
    """W001: a setting that does not exist. E001: a setting whose value means nothing."""
    messages: list[CheckMessage] = []
    for name, meant in conf.unknown().items():
        known = f"It knows: {', '.join(conf.DEFAULTS)}."
        hint = f"Did you mean {meant!r}?" if meant else known
        messages.append(warning(1, f"{conf.NAME} has no setting {name!r}; it does nothing.", hint))
    for read, name in _DURATIONS:
        try:
            read(name)
        except ConfigurationError as fault:
            default = conf.DEFAULTS[name]
            what = (
                f"{default.days} days" if isinstance(default, timedelta) else f"{default} seconds"
            )
            messages.append(error(1, str(fault), f"The default is {what}."))
    for name in ("SEND_ON_COMMIT", "OUTBOX", "WARN_IN_ATOMIC", "SHOW_ARGUMENTS"):
        if not isinstance(wanted := conf.get(name), bool):
            what = f"{name}={wanted!r} is neither True nor False."
            messages.append(error(1, what, f"The default is {conf.DEFAULTS[name]}."))
    return messages


_DURATIONS: Final[tuple[tuple[Callable[[str], object], str], ...]] = (
    (lambda name: conf.lease_seconds(conf.get(name), name), "LOCK_TIMEOUT"),
    (lambda name: conf.lease_seconds(conf.get(name), name), "SENT_TIMEOUT"),
    (conf.send_timeout, "OUTBOX_SEND_TIMEOUT"),
    (conf.retention, "OUTBOX_RETENTION"),
    (conf.retention, "STAGES_RETENTION"),
    (lambda name: conf.ttl(conf.get(name), name), "IDEMPOTENCY_RETENTION"),
)


def check_lock_store() -> list[CheckMessage]:
    """E002, E003: locks can't live there. W002: processes don't share them. W004: it loses some."""
    try:
        store = locate().store()
    except BackendNotSupported as fault:
        return [error(2, f"{fault.where} can't hold locks: {fault.reason}.", fault.hint)]
    except ConfigurationError as fault:
        return [error(3, str(fault), "See LOCK_CACHE and LOCK_DATABASE.")]
    except Exception as fault:  # noqa: BLE001 - a check must say what it is, whatever it is
        what = f"Locks can't live where the settings say: {describe_error(fault)}."
        return [error(3, what, "See LOCK_CACHE and LOCK_DATABASE, and that alias in CACHES.")]
    if store.weakness:
        return [warning(4, f"Locks live in {store.where}: {store.weakness}.", USE_INSTEAD)]
    if store.shared:
        return []
    return [
        warning(
            2,
            f"Locks live in {store.where}, which every process has for itself: two worker "
            f"processes, or a worker and a web server, get the same lock.",
            USE_INSTEAD,
        )
    ]


def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Return what the checks say that ask a cache or a database."""
    try:
        conf.given()
    except ConfigurationError:
        return []  # check_all tells
    return [*check_memory(), *check_relays(), *check_stages()]


def check_memory() -> list[CheckMessage]:
    """
    Ask the server that holds the locks.

    W005: ``cache.clear()`` frees them. W006: it evicts them, or does not answer. E009: it
    refuses them.
    """
    try:
        location = locate()
        store = location.store()
    except Exception:  # noqa: BLE001 - check_all tells
        return []
    messages = []
    if shared := ", ".join(find_emptied_with(location)):
        freed = f"Locks live in {store.where}, which is emptied along with {shared}"
        messages.append(
            warning(
                5,
                f"{freed}: one cache.clear() frees every lock while its holder works.",
                "Name in LOCK_CACHE an alias with a database number (memcached: a server) of its "
                'own: DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}.',
            )
        )
    refusal, silence = _try_lock(store)
    if refusal is not None:
        return [*messages, refusal]
    if silence:
        advice = "See that the server is up, and reachable from here."
        return [*messages, warning(6, f"Locks live in {store.where}: {silence}.", advice)]
    try:
        weaknesses = store.ask_weaknesses()
    except Exception as fault:  # noqa: BLE001 - a check must not fail
        weaknesses = [f"whether it evicts locks could not be asked ({describe_error(fault)})"]
    return messages + [warning(6, f"Locks live in {store.where}: {w}.", LOSES) for w in weaknesses]


def _try_lock(store: Store) -> tuple[CheckMessage | None, str]:
    """Take a lock and give it back; return what refuses that, or why it can't be known."""
    if not store.shared:
        return None, ""  # W002 tells
    name, token = f"check:{uuid.uuid4().hex}", os.urandom(16).hex()
    holder = describe_holder(None, None, renewed=False)
    try:
        store.acquire(name, token, store.nearest_lease(TRIED_LEASE), holder)
        store.release(name, token)
    except LockBackendError as fault:
        if not fault.hint:
            return None, f"whether it takes locks could not be asked ({fault.reason})"
        what = f"Locks can't be taken: {fault.where} refused to {fault.action}: {fault.reason}."
        return error(9, what, fault.hint), ""
    except BackendNotSupported as fault:
        what = f"Locks can't be taken: {fault.where} can't {fault.what}: {fault.reason}."
        return error(9, what, fault.hint), ""
    except Exception as fault:  # noqa: BLE001 - a check must say what it is, whatever it is
        what = str(fault) if isinstance(fault, CelerySafeError) else describe_error(fault)
        return error(9, f"Locks can't be taken: {what}", "See LOCK_CACHE and LOCK_DATABASE."), ""
    return None, ""


def check_sqlite() -> list[CheckMessage]:
    """W003: SQLite without IMMEDIATE. E004: locks in the file of the data."""
    messages = [
        warning(
            3,
            f'DATABASES["{alias}"] is SQLite in its default transaction mode: two transactions '
            f"that read and then write end in 'database is locked'.",
            'Set "OPTIONS": {"transaction_mode": "IMMEDIATE"}, and WAL mode by "init_command": '
            '"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;".',
        )
        for alias, database in _sqlite_databases()
        if database.get("OPTIONS", {}).get("transaction_mode") != "IMMEDIATE"
    ]
    return messages + _check_lock_file()


def _check_lock_file() -> list[CheckMessage]:
    ours = conf.get("LOCK_DATABASE")
    files = {
        alias: os.path.realpath(str(database.get("NAME")))
        for alias, database in _sqlite_databases()
    }
    if not isinstance(ours, str) or ours not in files:
        return []
    if "memory" in str(settings.DATABASES[ours].get("NAME")):
        return [
            error(
                4,
                f"LOCK_DATABASE is {ours!r}, a SQLite database in memory: each thread has one of "
                f"its own, so two get the same lock.",
                "Give LOCK_DATABASE an alias with a SQLite file of its own.",
            )
        ]
    others = [alias for alias, file in files.items() if alias != ours and file == files[ours]]
    if ours != "default" and not others:
        return []
    return [
        error(
            4,
            f"LOCK_DATABASE is {ours!r}, a SQLite file that also holds the project's data: while "
            f"a task writes there, its lock can't be renewed and is lost.",
            "Give LOCK_DATABASE an alias with a SQLite file of its own, and run "
            "manage.py migrate django_celery_safe --database=<alias>.",
        )
    ]


def _sqlite_databases() -> Iterator[tuple[str, dict[str, Any]]]:
    for alias, database in settings.DATABASES.items():
        if database.get("ENGINE", "").endswith(".sqlite3"):
            yield alias, database


def _on_worker_setup(instance: Any, **kwargs: Any) -> None:
    set_pool_processes(_count_processes(instance))
    _log(check_all)


def _on_worker_ready(**kwargs: Any) -> None:
    # It asks servers, which may be slow or silent; the worker must start nevertheless. Not
    # before its children are forked: they would inherit what SQLite knows of an open file.
    threading.Thread(target=_log_and_disconnect, args=(check_deployment,), daemon=True).start()


def _log_and_disconnect(check: Callable[[], list[CheckMessage]]) -> None:
    try:
        _log(check)
    finally:
        connections.close_all()  # this thread's


def _log(check: Callable[[], list[CheckMessage]]) -> None:
    for message in check():
        if not message.is_silenced():
            logger.log(
                message.level, "?: (%s) %s\n\tHINT: %s", message.id, message.msg, message.hint
            )


def _count_processes(worker: Any) -> int:
    """Return how many processes run this worker's tasks, at the most."""
    pool = worker.pool_cls
    if "prefork" not in (pool if isinstance(pool, str) else pool.__module__):
        return 1
    # max_concurrency is what --autoscale allows.
    return max(int(worker.concurrency or 1), int(getattr(worker, "max_concurrency", None) or 1))
