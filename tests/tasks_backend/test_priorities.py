"""Django's priorities, from -100 to 100, as those of a broker."""

from typing import Any

import pytest
from django.tasks.exceptions import InvalidTask
from django.test import override_settings
from kombu import Queue

from django_celery_safe.backends.priorities import find_scale, to_broker
from tests.concurrency.mailbox import Mailbox
from tests.tasks_backend import work
from tests.tasks_backend.scenes import ByHand, tasks_setting

AMQP = "amqp://127.0.0.1:1"
REDIS = "redis://127.0.0.1:1"
BY_PRIORITY = {"queue_order_strategy": "priority"}


def test_a_scale_is_divided_evenly() -> None:
    """The highest of Django's is the highest of the broker's."""
    redis = {-100: 9, -51: 9, -50: 6, -1: 6, 0: 3, 49: 3, 50: 0, 100: 0}
    rabbitmq = {-100: 0, -99: 0, 0: 5, 99: 10, 100: 10}
    for scale, expected in (([9, 6, 3, 0], redis), (range(11), rabbitmq)):
        assert {one: to_broker(one, scale) for one in expected} == expected
        all_of_them = [scale.index(to_broker(one, scale)) for one in range(-100, 101)]
        assert all_of_them == sorted(all_of_them)


@pytest.mark.parametrize(
    ("broker", "conf", "scale"),
    [
        (REDIS, {}, []),
        (REDIS, {"broker_transport_options": BY_PRIORITY}, [9, 6, 3, 0]),
        (AMQP, {"task_queue_max_priority": 3}, [0, 1, 2, 3]),
        (AMQP, {"task_queues": [Queue("celery", max_priority=2)]}, [0, 1, 2]),
        ("memory://", {"task_queue_max_priority": 3}, []),
    ],
)
def test_a_queue_has_the_priorities_of_its_broker(
    broker: str, conf: dict[str, Any], scale: list[int]
) -> None:
    """The answer needs no connection."""
    app = Mailbox(broker).app
    app.conf.update(task_default_queue="celery", **conf)
    assert list(find_scale(app, None)) == scale


def test_all_queues_of_a_backend_need_priorities(by_hand: ByHand) -> None:
    """Otherwise a task would be refused by one queue, and taken by another."""
    app = by_hand.mailbox.app
    queues = [Queue("fast", max_priority=9), Queue("slow"), Queue("other", max_priority=4)]
    app.conf.update(broker_url=AMQP, task_queues=queues)
    setting = tasks_setting(by_hand.alias)
    setting["default"]["QUEUES"] = ["fast", "other"]
    with override_settings(TASKS=setting):
        work.add.using(queue_name="fast", priority=100).enqueue(1)
    setting["default"]["QUEUES"] = ["fast", "slow"]
    with (
        override_settings(TASKS=setting),
        pytest.raises(InvalidTask, match="does not support setting priority"),
    ):
        work.add.using(queue_name="fast", priority=100)
    properties = by_hand.rows.get().properties
    assert '"priority": 9' in properties
