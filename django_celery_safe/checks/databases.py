"""Databases that can't hold rows of this app, lack its tables, or have no relay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.utils.connection import ConnectionDoesNotExist

from .. import conf
from ..databases import find_unfit, refuse_untested
from ..exceptions import ConfigurationError
from ..idempotency import IdempotentMixin
from ..inspection.lock_store import fault
from ..sending.outbox import outbox_aliases
from ..texts import duration
from .project import RELAY_TASK, Project, count, find_idempotent

#: How long a relay may be unseen without a warning, s.
GONE: Final = 3600.0


def check_databases(project: Project) -> Iterator[CheckMessage]:
    """E002: a database can't hold this app's rows. W003: SQLite without IMMEDIATE."""
    databases: dict[str, dict[str, Any]] = settings.DATABASES
    for alias, database in databases.items():
        is_sqlite = database.get("ENGINE", "").endswith(".sqlite3")
        if is_sqlite and database.get("OPTIONS", {}).get("transaction_mode") != "IMMEDIATE":
            yield fault(
                "W003",
                f'DATABASES["{alias}"] is SQLite in its default transaction mode: two transactions '
                f"that read and then write end in 'database is locked'.",
                'Set "OPTIONS": {"transaction_mode": "IMMEDIATE"}, and WAL mode by "init_command": '
                '"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;".',
            )
    for alias, user in _find_users(project).items():
        try:
            refuse_untested(alias, f"keep the rows of {user}")
        except (ConfigurationError, ConnectionDoesNotExist) as error:
            hint = f"Name another alias for the rows of {user}: {', '.join(connections)}."
            yield fault("E002", str(error), hint)


def check_database_servers(project: Project) -> Iterator[CheckMessage]:
    """E002: no transactions. E003: tables are missing. W009: no relay."""
    from ..inspection.overview import find_relay  # needs the app registry
    from ..models.stages import StageRun

    used = [*_find_users(project), conf.get("LOCK_DATABASE")]
    for alias in connections.settings:
        if alias in used:
            with suppress(Error):  # other checks report that it does not answer
                yield from _find_unfit(alias)
    users = list(dict.fromkeys([*project.senders, *project.steps]))
    outboxes, runs = outbox_aliases() if users else [], router.db_for_write(StageRun)
    if users and not outboxes:
        text = f"{count(users, 'needs', 'need')} the outbox, and no database has its table."
        yield fault("E003", text, "Run manage.py migrate.")
    elif project.steps and runs not in outboxes:
        text = f"{count(project.steps, 'is a step', 'are steps')} of stages, and {runs!r}, the "
        hint = f"Run manage.py migrate --database={runs}."
        yield fault("E003", f"{text}database of their runs, lacks its tables.", hint)
    # The database for locks also has the table, but it stays empty.
    aliases = [alias for alias in outboxes if alias != conf.get("LOCK_DATABASE")] or outboxes
    for alias in () if project.beat_relays() else aliases:
        with suppress(Error):  # as above
            relay = find_relay(alias)
            if relay is None or relay.ago_s > GONE:
                seen = "yet" if relay is None else f"for {duration(relay.ago_s)} ({relay})"
                yield fault(
                    "W009",
                    f"{count(users, 'needs', 'need')} a relay, but none has been seen in {alias!r} "
                    f"{seen}, and beat runs none: a message that can't be sent at its commit, or "
                    f"gets lost, waits for ever, and stages may stall.",
                    f"Run manage.py celery_outbox relay beside the workers, or add "
                    f'{{"task": "{RELAY_TASK}", "schedule": 10}} to beat\'s schedule.',
                )


def _find_unfit(alias: str) -> Iterator[CheckMessage]:
    """Yield E002 for tables of ours, or of flags, that have no transactions."""
    flagged = [model for model in _flagged_models() if router.db_for_write(model) == alias]
    for table in ["", *(model._meta.db_table for model in flagged)]:
        if unfit := find_unfit(alias, table):
            yield fault("E002", f'DATABASES["{alias}"] can\'t be used: {unfit[0]}.', unfit[1])
            return


def _find_users(project: Project) -> dict[str, str]:
    """Return the aliases of the databases that will hold our rows, each with a purpose."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry
    from ..models.stages import StageRun

    users: dict[str, str] = {}
    for task in project.senders[:1]:
        # Other databases are known only from a call's using=.
        users.setdefault(DEFAULT_DB_ALIAS, f"the outbox of {task.name}")
    for task in project.steps[:1]:
        users.setdefault(router.db_for_write(StageRun), f"the stages of {task.name}")
    for model in _flagged_models():
        users.setdefault(router.db_for_write(model), f"do_once of {model._meta.label}")
    for task in project.tasks:
        if (own := find_idempotent(task)) is not None:
            alias = own.using or router.db_for_write(IdempotencyRecord)
            users.setdefault(alias, f"idempotent {task.name}")
    return users


def _flagged_models() -> list[Any]:
    return [model for model in apps.get_models() if issubclass(model, IdempotentMixin)]
