"""Checks of the broker: sends that block or get lost, lost tasks, early redelivery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from django.core.checks import CheckMessage

from ..concurrency.guard import find_guarded
from ..inspection.lock_store import fault
from ..sending import SafeTaskMixin
from .project import Project, count, is_carried, is_done_once, is_fallback

#: Options of kombu's Redis transport that limit the wait for a silent server.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")


def check_broker(project: Project) -> Iterator[CheckMessage]:
    """W006: a send may block for ever, or get lost without an error."""
    if not project.safe_tasks or is_fallback(project.app):
        return  # E004 reports the fallback app
    try:
        connection = project.app.connection_for_write()
        kind, options = connection.transport.driver_type, connection.transport_options
    except Exception:  # noqa: BLE001 - a broker that can't be used is not for this check
        return
    missing = [name for name in TIMEOUTS if not options.get(name)]
    if kind == "redis" and missing:
        yield fault(
            "W006",
            f"The broker is Redis without {' and '.join(missing)}: a server that accepts and stays "
            f"silent blocks every .delay() for ever, and every commit that sends without outbox.",
            'Add {"socket_timeout": 10, "socket_connect_timeout": 5} to '
            "CELERY_BROKER_TRANSPORT_OPTIONS.",
        )
    if kind == "amqp" and not options.get("confirm_publish"):
        yield fault(
            "W006",
            "The broker is AMQP without confirm_publish: a message that it never got, or could not "
            "keep, counts as sent. (Messages from the outbox are confirmed.)",
            'Add {"confirm_publish": True} to CELERY_BROKER_TRANSPORT_OPTIONS.',
        )


def check_lost_tasks(project: Project) -> Iterator[CheckMessage]:
    """W007: if its process dies, a task that has to be done once is not done at all."""
    lost = [
        task
        for task in project.tasks
        if not (task.acks_late and task.reject_on_worker_lost)
        and is_done_once(task)
        and not is_carried(task)
    ]
    if lost:
        yield fault(
            "W007",
            f"{count(lost, 'does its work', 'do their work')} once, but without acks_late and "
            f"reject_on_worker_lost: if the process is killed, the message is gone, and the work "
            f"is never done.",
            'Set outbox="until_done": a relay sends the task again, and counts its deaths. Or set '
            "acks_late=True and reject_on_worker_lost=True (for all: CELERY_TASK_ACKS_LATE and "
            "CELERY_TASK_REJECT_ON_WORKER_LOST), and for the workers "
            "CELERY_WORKER_PREFETCH_MULTIPLIER = 1, with Redis also "
            "CELERY_WORKER_DISABLE_PREFETCH = True. Nothing counts deaths then.",
        )


def check_redelivery(project: Project) -> Iterator[CheckMessage]:
    """W008: the broker redelivers a message while its task runs, or late after a worker's end."""
    timeout = project.visibility_timeout
    late = [task for task in project.tasks if task.acks_late and not is_carried(task)]
    if timeout is None or not late:
        return
    spans = []
    for task in late:
        guarded = find_guarded(task)
        if guarded or isinstance(task, SafeTaskMixin) or is_done_once(task):
            waits = guarded.options.blocking_timeout if guarded else 0.0
            limit = task.time_limit or project.app.conf.task_time_limit or 0.0
            spans.append((max(limit, waits), task.name))
    longest, name = max(spans, default=(0.0, ""))
    if longest > timeout:
        yield fault(
            "W008",
            f"Task {name} may run for {longest:.10g} s and acknowledges late, but after a "
            f"visibility_timeout of {timeout:.10g} s the broker delivers its message again: it "
            f"runs twice, or meets its own lock.",
            'Set outbox="until_done", with which a second delivery does nothing, or add '
            f'{{"visibility_timeout": {longest * 1.5:.0f}}} to CELERY_BROKER_TRANSPORT_OPTIONS, '
            "set a shorter limit, or use RabbitMQ with a consumer_timeout above that.",
        )
    once = [task for task in late if is_done_once(task)]
    if once and not project.app.conf.get("worker_soft_shutdown_timeout", 0):
        yield fault(
            "W008",
            f"worker_soft_shutdown_timeout is not set: if a worker is killed while it stops, its "
            f"unfinished tasks, such as {once[0].name}, are redelivered only after a "
            f"visibility_timeout of {timeout:.10g} s.",
            "Set CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT to some seconds less than the deployment "
            "waits before it kills, and start workers with REMAP_SIGTERM=SIGQUIT in their "
            "environment.",
        )
