"""Faults of a backend for Django tasks, which ``manage.py check`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.apps import apps
from django.core.checks import CheckMessage
from django.db import router
from django.tasks import DEFAULT_TASK_QUEUE_NAME

from .. import conf
from ..exceptions import ConfigurationError
from ..inspection.findings import fault
from ..sending.outbox import UNTIL_DONE

if TYPE_CHECKING:
    from .backend import SafeCeleryBackend


def find_backend_faults(backend: SafeCeleryBackend) -> Iterator[CheckMessage]:
    """E012: a backend can't send tasks. W027: their results are not kept."""
    where = f'TASKS["{backend.alias}"]'
    if not apps.is_installed("django_celery_safe"):
        yield fault(
            "E012",
            f'{where} sends nothing, since "django_celery_safe" is not in INSTALLED_APPS.',
            "Add it, and run manage.py migrate.",
        )
        return
    yield from _find_send_faults(backend, where)
    yield from _find_result_faults(backend, where)


def _find_send_faults(backend: SafeCeleryBackend, where: str) -> Iterator[CheckMessage]:
    from ..models.outbox import OutboxMessage  # needs the app registry

    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    queues = app.amqp.queues
    missing = sorted(backend.queues - {DEFAULT_TASK_QUEUE_NAME, *queues})
    if missing and not queues.create_missing:
        yield fault(
            "E012",
            f"{where} has queues that Celery does not know, {', '.join(map(repr, missing))}, and "
            f"CELERY_TASK_CREATE_MISSING_QUEUES is False: no task can be sent there.",
            "Add them to CELERY_TASK_QUEUES, or take them out of QUEUES.",
        )
    if backend.outbox and not router.allow_migrate_model(backend.using, OutboxMessage):
        yield fault(
            "E012",
            f"{where} keeps messages in the database {backend.using!r}, where DATABASE_ROUTERS "
            f"allow no outbox.",
            'Name the database that has the outbox: "OPTIONS": {"using": ...}.',
        )
    if backend.outbox == UNTIL_DONE and app.conf.task_protocol == 1:
        yield fault(
            "E012",
            f"{where} carries tasks until they are done, but CELERY_TASK_PROTOCOL is 1, whose "
            f"messages have no headers: no worker would find their rows.",
            "Leave it at 2, Celery's default.",
        )


def _find_result_faults(backend: SafeCeleryBackend, where: str) -> Iterator[CheckMessage]:
    try:
        forgets = backend.outbox == UNTIL_DONE and not conf.keeps_sent()
    except ConfigurationError:
        return  # E001 reports it
    if forgets:
        yield fault(
            "W027",
            f"{where} forgets a task when it is done, since OUTBOX_RETENTION is 0: get_result() "
            f"raises NotImplementedError.",
            'Set DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": timedelta(days=1)}, or silence this if '
            "nothing asks for results.",
        )
