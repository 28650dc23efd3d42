"""
System checks: settings that would let a lock, a task or an e-mail go wrong.

``manage.py check`` shows the findings. A Celery worker shows no checks, so ours are logged
when a worker starts. Each module here finds faults of one kind; ``inspection.findings`` has
their form, and docs/reference/checks.md lists them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from celery import signals
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from .. import conf
from ..exceptions import ConfigurationError
from ..inspection.findings import PREFIX, fault
from ..locks.stores.local import set_pool_processes
from ..texts import get_logger
from .databases import find_database_faults, find_sqlite_faults, find_unfit_databases
from .flags import find_flag_faults
from .plain_sends import find_plain_sends
from .project import Project, load_project
from .redelivery import find_redelivery_faults, find_stop_faults
from .relays import find_relay_faults
from .sending import find_broker_faults, find_pickle
from .settings import find_setting_faults, find_store_faults, find_store_trouble
from .tasks import find_task_faults

logger = get_logger(__name__)


def connect() -> None:
    """Register the checks, and log their findings when a worker starts."""
    checks.register(check_all, PREFIX)
    checks.register(check_workers, PREFIX, deploy=True)
    checks.register(check_deployment, PREFIX, deploy=True)
    # Not worker_init: logging is not set up there yet, and a record would be lost.
    signals.celeryd_after_setup.connect(_on_worker_setup, dispatch_uid=PREFIX)
    signals.worker_ready.connect(_on_worker_ready, dispatch_uid=PREFIX)


def check_all(**kwargs: Any) -> list[CheckMessage]:
    """Return the findings of checks that query no server; only E001 if settings are unreadable."""
    try:
        conf.given()
    except ConfigurationError as error:
        return [fault("E001", str(error), f"Write {conf.NAME} = {{...}}.")]
    return _find(
        lambda project: find_setting_faults(),
        find_store_faults,
        lambda project: find_sqlite_faults(),
        lambda project: project.faults,
        find_database_faults,
        find_task_faults,
        find_plain_sends,
        find_pickle,
        find_redelivery_faults,
        find_flag_faults,
    )


def check_workers(**kwargs: Any) -> list[CheckMessage]:
    """Return the findings about the broker and workers of a deployment (no use on a laptop)."""
    return _find(find_broker_faults, find_stop_faults)


def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Return the findings of the checks that query a cache or a database."""
    return _find(lambda project: find_store_trouble(), find_unfit_databases, find_relay_faults)


def _find(*ways: Callable[[Project], Iterable[CheckMessage]]) -> list[CheckMessage]:
    """Return the findings in the project; none if the settings can't be read at all."""
    try:
        conf.given()
    except ConfigurationError:
        return []  # check_all reports it
    project = load_project()
    return [each for find in ways for each in find(project)]


def _on_worker_setup(instance: Any, **kwargs: Any) -> None:
    set_pool_processes(_count_processes(instance))
    _log(check_all)
    _log(check_workers)


def _on_worker_ready(**kwargs: Any) -> None:
    # The checks query servers, which may be slow or silent, but the worker must still start.
    # They wait for the forks: children would inherit SQLite's state of an open file.
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
    """Return the maximum number of processes that run this worker's tasks."""
    pool = worker.pool_cls
    if "prefork" not in (pool if isinstance(pool, str) else pool.__module__):
        return 1
    # max_concurrency is the maximum of --autoscale.
    return max(int(worker.concurrency or 1), int(getattr(worker, "max_concurrency", None) or 1))
