"""
System checks: settings that would let a lock, a task or an e-mail go wrong.

``manage.py check`` shows them. A Celery worker shows no check's result, so when
one starts, ours are written to its log. Each module here finds faults of one kind;
``inspection.findings`` has their texts, and docs/reference/checks.md lists them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from celery import signals
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from .. import conf
from ..exceptions import ConfigurationError
from ..inspection.findings import Finding, fault
from ..locks.stores.local import set_pool_processes
from ..texts import get_logger, printable
from .databases import find_database_faults, find_sqlite_faults
from .flags import find_flag_faults
from .project import load_project
from .redelivery import find_redelivery_faults
from .relays import find_relay_faults
from .sending import find_sending_faults
from .settings import find_setting_faults, find_store_faults, find_store_trouble
from .tasks import find_task_faults

logger = get_logger(__name__)

PREFIX: Final = "django_celery_safe"


def connect() -> None:
    """Register the checks, and their log record at the start of a worker."""
    checks.register(check_all, PREFIX)
    checks.register(check_deployment, PREFIX, deploy=True)
    # Not worker_init: logging is not set up there yet, and a record would be lost.
    signals.celeryd_after_setup.connect(_on_worker_setup, dispatch_uid=PREFIX)
    signals.worker_ready.connect(_on_worker_ready, dispatch_uid=PREFIX)


def check_all(**kwargs: Any) -> list[CheckMessage]:
    """Return the findings of all checks that ask no server; E001 alone for a wrong setting."""
    try:
        conf.given()
    except ConfigurationError as error:
        return _as_messages([fault("E001", str(error), f"Write {conf.NAME} = {{...}}.")])
    return _as_messages(_find_faults())


def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Return what the checks say that ask a cache or a database."""
    try:
        conf.given()
    except ConfigurationError:
        return []  # check_all says so
    return _as_messages([*find_store_trouble(), *find_relay_faults(load_project())])


def _find_faults() -> Iterator[Finding]:
    project = load_project()
    yield from find_setting_faults()
    yield from find_store_faults()
    yield from find_sqlite_faults()
    yield from project.faults
    for find in (
        find_database_faults,
        find_task_faults,
        find_sending_faults,
        find_redelivery_faults,
        find_flag_faults,
    ):
        yield from find(project)


def _as_messages(found: Iterable[Finding]) -> list[CheckMessage]:
    return [_as_message(finding) for finding in found if finding.id]


def _as_message(finding: Finding) -> CheckMessage:
    kind = checks.Error if finding.id.startswith("E") else checks.Warning
    return kind(printable(finding.text), hint=finding.hint, id=f"{PREFIX}.{finding.id}")


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
