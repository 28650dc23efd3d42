"""Faults of sending: brokers that block or lose messages, and pickle in the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from django.core.checks import CheckMessage

from ..inspection.findings import fault
from ..sending.first_send import is_fallback
from ..sending.outbox import task_wants_outbox
from .project import Project, count

#: Options of kombu's Redis transport that limit the wait for a silent server.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")


def find_pickle(project: Project) -> Iterator[CheckMessage]:
    """W017: messages in the outbox are pickled."""
    pickled = [
        task
        for task in project.safe_tasks
        if task_wants_outbox(task) and task.serializer == "pickle"
    ]
    if pickled:
        yield fault(
            "W017",
            f"{count(pickled)} sent through the outbox with pickle: anyone who can write to that "
            f"table can run code in every worker.",
            'Set serializer="json" and send plain data. For a task of another package, set '
            f'CELERY_TASK_ANNOTATIONS = {{"{pickled[0].name}": {{"serializer": "json"}}}}, or '
            f'{{"outbox": False}}.',
        )


def find_broker_faults(project: Project) -> Iterator[CheckMessage]:
    """W014: the broker may block for ever. W015: it does not confirm."""
    if not project.safe_tasks or is_fallback(project.app):
        return  # E010 reports the fallback app
    try:
        connection = project.app.connection_for_write()
        kind, options = connection.transport.driver_type, connection.transport_options
    except Exception:  # noqa: BLE001 - a broker that can't be used is not for this check
        return
    missing = [name for name in TIMEOUTS if not options.get(name)]
    if kind == "redis" and missing:
        yield fault(
            "W014",
            f"The broker is Redis without {' and '.join(missing)}: a server that accepts and stays "
            f"silent blocks every .delay() for ever, and every commit that sends without outbox.",
            'Add {"socket_timeout": 10, "socket_connect_timeout": 5} to '
            "CELERY_BROKER_TRANSPORT_OPTIONS.",
        )
    if kind == "amqp" and not options.get("confirm_publish"):
        yield fault(
            "W015",
            "The broker is AMQP without confirm_publish: a message that it never got, or could not "
            "keep, counts as sent. (Messages from the outbox are confirmed.)",
            'Add {"confirm_publish": True} to CELERY_BROKER_TRANSPORT_OPTIONS.',
        )
