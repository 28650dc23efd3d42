"""
Conversion of Django's task priorities, from -100 to 100, to the priorities of broker queues.

RabbitMQ's queues have priorities from 0 to their ``x-max-priority``; the highest is delivered
first. On Redis a queue is several lists, and kombu empties the first list, 0, before the
others. Other brokers have no priorities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY
from kombu.transport.virtual import Channel

#: Priorities on Redis if ``priority_steps`` is unset (kombu: transport/redis.py).
REDIS_STEPS: Final = (0, 3, 6, 9)

#: The way to have priorities, for errors.
HOW: Final = (
    'On Redis set CELERY_BROKER_TRANSPORT_OPTIONS = {"queue_order_strategy": "priority"}, on '
    "RabbitMQ CELERY_TASK_QUEUE_MAX_PRIORITY; other brokers have no priorities."
)


def find_scale(app: Any, queue: str | None) -> Sequence[int]:
    """
    Return the priorities of a queue in the broker's numbers, lowest first; (): it has none.

    Args:
        queue: The queue's name; None: the app's default queue.
    """
    try:
        driver = app.connection_for_write().transport.driver_type
    except Exception:  # noqa: BLE001 - a broker that can't be used says so itself
        return ()
    if driver == "redis":
        options = app.conf.broker_transport_options or {}
        if options.get("queue_order_strategy") != "priority":
            return ()
        steps = options.get("priority_steps") or REDIS_STEPS
        return sorted({min(max(int(step), 0), Channel.max_priority) for step in steps})[::-1]
    if driver == "amqp":
        highest = _highest_priority(app, queue or app.conf.task_default_queue)
        return range(highest + 1) if highest else ()
    return ()


def to_broker(priority: int, scale: Sequence[int]) -> int:
    """Return the priority on a broker's scale for a Django priority."""
    part = (priority - TASK_MIN_PRIORITY) / (TASK_MAX_PRIORITY - TASK_MIN_PRIORITY)
    return scale[min(int(part * len(scale)), len(scale) - 1)]


def _highest_priority(app: Any, name: str) -> int:
    # A normal lookup would add a missing queue.
    queue: Any = dict.get(app.amqp.queues, name)
    if queue is None:
        return int(app.conf.task_queue_max_priority or 0)
    arguments = queue.queue_arguments or {}
    return int(arguments.get("x-max-priority") or queue.max_priority or 0)
