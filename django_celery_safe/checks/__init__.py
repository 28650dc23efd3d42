"""
System checks: mistakes that would let a lock, a task or an e-mail go wrong, one id for one cause.

``manage.py check`` shows the messages, those that query a server or matter only where workers are
deployed with ``--deploy``. A Celery worker shows no checks, so ours are logged when it starts.
docs/reference/settings.md lists the ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from celery import signals
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from ..exceptions import ConfigurationError
from ..inspection.lock_store import PREFIX
from ..texts import get_logger
from .databases import check_database_servers, check_databases
from .project import Project, load_project
from .settings import check_lock_place, check_lock_server, check_settings
from .tasks import check_broker, check_lost_tasks, check_options, check_redelivery

logger = get_logger(__name__)


def connect() -> None:
    """Register the checks, and log their messages when a worker starts."""
    checks.register(check_all, PREFIX)
    checks.register(check_deployment, PREFIX, deploy=True)
    signals.worker_ready.connect(_on_worker_ready, dispatch_uid=PREFIX)


def check_all(**kwargs: Any) -> list[CheckMessage]:
    """Return the messages of the checks that read settings and tasks, and query no server."""
    project = load_project()
    ways = (check_settings, check_lock_place, check_databases, check_options, check_lost_tasks)
    return [*project.faults, *_run(project, *ways)]


def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Return the messages that are of no use on a laptop, or query a server."""
    ways = (check_broker, check_redelivery, check_lock_server, check_database_servers)
    return _run(load_project(), *ways)


def _run(project: Project, *ways: Callable[[Project], Iterable[CheckMessage]]) -> list[Any]:
    found: list[CheckMessage] = []
    for check in ways:
        with suppress(ConfigurationError):  # a setting is not valid, which E001 reports
            found.extend(check(project))
    return found


def _on_worker_ready(**kwargs: Any) -> None:
    # Servers may be slow or silent, but the worker must still start. Not before the forks:
    # children would inherit SQLite's state of an open file.
    threading.Thread(target=_log_messages, daemon=True).start()


def _log_messages() -> None:
    try:
        for message in (*check_all(), *check_deployment()):
            if not message.is_silenced():
                logger.log(
                    message.level, "?: (%s) %s\n\tHINT: %s", message.id, message.msg, message.hint
                )
    finally:
        connections.close_all()  # this thread's
