"""Faults of sending: brokers that block or lose messages, and pickle in the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..inspection.findings import Finding, fault
from ..sending.outbox import task_wants_outbox
from .project import Project, count

#: Options of kombu's Redis transport that bound the wait for a silent server.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")


def find_sending_faults(project: Project) -> Iterator[Finding]:
    """W014: the broker may block for ever. W015: it does not confirm. W017: pickle."""
    tasks = project.safe_tasks
    if not tasks:
        return
    yield from _find_broker_faults(project)
    pickled = [task for task in tasks if task_wants_outbox(task) and task.serializer == "pickle"]
    if pickled:
        yield fault(
            "W017",
            f"{count(pickled)} sent through the outbox with pickle: whoever can write that table "
            f"can run code in every worker.",
            'Set serializer="json" and send plain data.',
        )


def _find_broker_faults(project: Project) -> Iterator[Finding]:
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
            'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 10, '
            '"socket_connect_timeout": 5}.',
        )
    if kind == "amqp" and not options.get("confirm_publish"):
        yield fault(
            "W015",
            "The broker is AMQP without confirm_publish: a message that it never got, or could not "
            "keep, counts as sent. (Messages from the outbox are confirmed.)",
            'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}.',
        )
