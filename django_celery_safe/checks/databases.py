"""Check of what is to be kept in databases that are not there, or on which nothing was tested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import current_app
from django.apps import apps
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS, connections, router

from ..concurrency.call import layers
from ..databases import NO_DATABASE, is_tested
from ..idempotency import Idempotent, IdempotentMixin
from ..sending.outbox import task_wants_outbox
from ..stages.plan import find_step_layer
from .messages import error
from .tasks import load_tasks


def check_databases() -> list[CheckMessage]:
    """E008: something is to be kept in a database that is not there, or was never tried."""
    users: dict[str, list[str]] = {}
    for alias, user in _find_users():
        users.setdefault(alias, []).append(user)
    return [
        error(8, f"{fault}, and {_name(names)} would keep rows there: {outcome}.", hint)
        for alias, names in users.items()
        for fault, outcome, hint in _find_faults(alias)
    ]


def _find_faults(alias: str) -> list[tuple[str, str, str]]:
    """Return what is wrong with a database, what comes of it, and what to do. Asks none."""
    if alias not in connections.databases:
        there = ", ".join(repr(name) for name in connections.databases)
        return [
            (
                f"DATABASES has no {alias!r}",
                "each use is a ConnectionDoesNotExist",
                f"Name one that is there: {there}.",
            )
        ]
    vendor = connections[alias].vendor
    if vendor == NO_DATABASE or is_tested(alias):
        return []
    return [
        (
            f'DATABASES["{alias}"] is {vendor}, on which this app was never tested',
            "that is refused with BackendNotSupported",
            "Let an alias on PostgreSQL or SQLite hold them, by a database router, or do without.",
        )
    ]


def _find_users() -> Iterator[tuple[str, str]]:
    """Yield the alias of each database in which something is to be kept, and what that is."""
    from ..models import IdempotencyRecord, StageRun  # needs the app registry

    for model in apps.get_models():
        if issubclass(model, IdempotentMixin):
            yield router.db_for_write(model), f"do_once of {model._meta.label}"
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception:  # noqa: BLE001 - W007 says so
        return
    for task in tasks:
        if task_wants_outbox(task):
            # The other databases are those of the calls' using=.
            yield DEFAULT_DB_ALIAS, f"the outbox of {task.name}"
        if find_step_layer(task) is not None:
            yield router.db_for_write(StageRun), f"the stages of {task.name}"
        for layer in layers(task.run):
            own = getattr(layer, "idempotent", None)
            if isinstance(own, Idempotent):
                alias = own.using or router.db_for_write(IdempotencyRecord)
                yield alias, f"idempotent {task.name}"


def _name(users: list[str]) -> str:
    if len(users) == 1:
        return users[0]
    return f"{users[0]} and {len(users) - 1} more"
