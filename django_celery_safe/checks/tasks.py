"""Checks of tasks: options that do nothing, and messages that get lost or come twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage

from ..concurrency.guard import find_guarded
from ..concurrency.options import Options
from ..delivery.copies import visibility_timeout
from ..inspection.lock_store import fault
from ..sending import SafeTaskMixin
from ..sending.capture import find_misspelt
from .project import Project, count, is_carried, is_done_once, is_fallback

#: The options of a SafeTask.
OPTIONS: Final = ("send_on_commit", "outbox", "max_deaths")
#: Options of kombu's Redis transport that limit the wait for a silent server.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")
#: Transports that redeliver a message if it is not acknowledged within the visibility timeout.
REDELIVERING: Final = ("redis", "sqs")


def check_options(project: Project) -> Iterator[CheckMessage]:
    """E005: an option does nothing. W001: it is misspelt. W005: two contradict each other."""
    for task in project.tasks:
        guarded = find_guarded(task)
        lock = guarded.options if guarded else None
        yield from _find_idle(task, lock)
        for name, meant in find_misspelt(task, SafeTaskMixin):
            text = f"Task {task.name} has the option {name!r}, which does nothing."
            yield fault("W001", text, f"Did you mean {meant!r}?")
        if lock and lock.unique_until == "start" and lock.on_conflict == "skip":
            yield fault(
                "W005",
                f'Task {task.name} has unique_until="start" and on_conflict="skip": a message that '
                f"is sent during a run finds the run's lock held when its turn comes, and is "
                f"skipped.",
                'Set on_conflict="retry", or unique_until="end" if one run does it for all.',
            )


def _find_idle(task: Any, lock: Options | None) -> Iterator[CheckMessage]:
    """Yield E005 for options that only a SafeTask, or only a carried task, reads."""
    given = {name: getattr(task, name) for name in OPTIONS if name in vars(type(task))}
    if isinstance(task, SafeTaskMixin):
        if given.get("max_deaths") is not None and not is_carried(task):
            yield fault(
                "E005",
                f"Task {task.name} has max_deaths={task.max_deaths!r}, but it is not carried: "
                f"nothing counts the processes that die in it.",
                'Set outbox="until_done", which sends the task again after a death.',
            )
        return
    if lock is not None and lock.unique_until is not None:
        given["unique_until"] = lock.unique_until
    for name, value in given.items():
        yield fault(
            "E005",
            f"Task {task.name} has {name}={value!r}, but it is not a SafeTask: its sends are "
            f"Celery's own, and the option does nothing.",
            'Write Celery("shop", task_cls="django_celery_safe:SafeTask") for all tasks, or '
            "@shared_task(base=SafeTask) for this one.",
        )


def check_broker(project: Project) -> Iterator[CheckMessage]:
    """W006: a send may block for ever, or get lost without an error."""
    if not project.safe_tasks or is_fallback(project.app):
        return  # E004 reports the fallback app
    kind, options = project.broker
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
    """W008: the broker redelivers a message while its task still runs."""
    spans = [(0.0, "")]
    for task in project.tasks:
        guarded = find_guarded(task)
        ours = guarded or isinstance(task, SafeTaskMixin) or is_done_once(task)
        if ours and task.acks_late and not is_carried(task):
            waits = guarded.options.blocking_timeout if guarded else 0.0
            limit = task.time_limit or project.app.conf.task_time_limit or 0.0
            spans.append((max(limit, waits), task.name))
    longest, name = max(spans)
    timeout = visibility_timeout(project.app)
    if longest > timeout and project.broker[0] in REDELIVERING:
        yield fault(
            "W008",
            f"Task {name} may run for {longest:.10g} s and acknowledges late, but after a "
            f"visibility_timeout of {timeout:.10g} s the broker delivers its message again: it "
            f"runs twice, or meets its own lock.",
            'Set outbox="until_done", with which a second delivery does nothing, or add '
            f'{{"visibility_timeout": {longest * 1.5:.0f}}} to CELERY_BROKER_TRANSPORT_OPTIONS, '
            "set a shorter limit, or use RabbitMQ with a consumer_timeout above that.",
        )
