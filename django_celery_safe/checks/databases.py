"""Faults of databases: SQLite's transactions and files, and databases unfit for our tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS, Error, connections, router

from .. import conf
from ..databases import NO_DATABASE, find_unfit, is_tested
from ..delivery.call import layers
from ..idempotency import Idempotent, IdempotentMixin
from ..inspection.findings import fault
from ..sending.outbox import task_wants_outbox
from .project import Project


def find_sqlite_faults() -> Iterator[CheckMessage]:
    """W003: SQLite without IMMEDIATE. E004: locks in the file of the data, or in memory."""
    files = {}
    databases: dict[str, dict[str, Any]] = settings.DATABASES
    for alias, database in databases.items():
        if not database.get("ENGINE", "").endswith(".sqlite3"):
            continue
        files[alias] = os.path.realpath(str(database.get("NAME")))
        if database.get("OPTIONS", {}).get("transaction_mode") != "IMMEDIATE":
            yield fault(
                "W003",
                f'DATABASES["{alias}"] is SQLite in its default transaction mode: two transactions '
                f"that read and then write end in 'database is locked'.",
                'Set "OPTIONS": {"transaction_mode": "IMMEDIATE"}, and WAL mode by "init_command": '
                '"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;".',
            )
    locks = conf.get("LOCK_DATABASE")
    if not isinstance(locks, str) or locks not in files:
        return
    if "memory" in str(databases[locks].get("NAME")):
        yield fault(
            "E004",
            f"LOCK_DATABASE is {locks!r}, a SQLite database in memory: each thread has one of its "
            f"own, so two get the same lock.",
            "Give LOCK_DATABASE an alias with a SQLite file of its own.",
        )
    elif locks == DEFAULT_DB_ALIAS or list(files.values()).count(files[locks]) > 1:
        yield fault(
            "E004",
            f"LOCK_DATABASE is {locks!r}, a SQLite file that also holds the project's data: while "
            f"a task writes there, its lock can't be renewed and is lost.",
            "Give LOCK_DATABASE an alias with a SQLite file of its own, and run "
            "manage.py migrate django_celery_safe --database=<alias>.",
        )


def find_database_faults(project: Project) -> Iterator[CheckMessage]:
    """E008: a database for our rows does not exist, or is of an untested kind."""
    users: dict[str, list[str]] = {}
    for alias, user in _find_users(project):
        users.setdefault(alias, []).append(user)
    for alias, names in users.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        keep = f"{names[0]}{more} would keep rows there"
        if alias not in connections.databases:
            known = ", ".join(repr(name) for name in connections.databases)
            text = f"DATABASES has no {alias!r}, but {keep}: any use raises ConnectionDoesNotExist."
            yield fault("E008", text, f"Use an alias that exists: {known}.")
        elif (vendor := connections[alias].vendor) != NO_DATABASE and not is_tested(alias):
            yield fault(
                "E008",
                f'DATABASES["{alias}"] is {vendor}, on which this app was never tested, and '
                f"{keep}: each use is refused with BackendNotSupported.",
                "Let an alias on PostgreSQL, MariaDB, MySQL or SQLite hold them, by a database "
                "router, or do without.",
            )


def find_unfit_databases(project: Project) -> Iterator[CheckMessage]:
    """E011: a MySQL or MariaDB is too old, or tables lack transactions. Queries the servers."""
    aliases = dict.fromkeys(alias for alias, _ in _find_users(project))
    if isinstance(locks := conf.get("LOCK_DATABASE"), str):
        aliases[locks] = None
    for alias in aliases:
        if alias not in connections.databases:
            continue  # E008 reports it
        with suppress(Error):  # other checks report that it does not answer
            for table in ["", *_flag_tables(alias)]:
                if unfit := find_unfit(alias, table):
                    yield fault(
                        "E011", f'DATABASES["{alias}"] can\'t be used: {unfit[0]}.', unfit[1]
                    )
                    break


def _flag_tables(alias: str) -> list[str]:
    """Return the tables of a database whose models have ``do_once``."""
    models = [one for one in apps.get_models() if issubclass(one, IdempotentMixin)]
    return [one._meta.db_table for one in models if router.db_for_write(one) == alias]


def _find_users(project: Project) -> Iterator[tuple[str, str]]:
    """Yield the alias of each database that will hold our rows, and their purpose."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry
    from ..models.stages import StageRun

    for model in apps.get_models():
        if issubclass(model, IdempotentMixin):
            yield router.db_for_write(model), f"do_once of {model._meta.label}"
    for task in project.steps:
        yield router.db_for_write(StageRun), f"the stages of {task.name}"
    for task in project.tasks:
        if task_wants_outbox(task):
            # Other databases are known only from a call's using=.
            yield DEFAULT_DB_ALIAS, f"the outbox of {task.name}"
        for layer in layers(task.run):
            own: Any = getattr(layer, "idempotent", None)
            if isinstance(own, Idempotent):
                alias = own.using or router.db_for_write(IdempotencyRecord)
                yield alias, f"idempotent {task.name}"
