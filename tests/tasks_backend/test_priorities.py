"""Django's priorities, from -100 to 100, as those of a broker."""

from collections.abc import Sequence
from typing import Any

import pytest
from django.tasks import task_backends
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


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ([9, 6, 3, 0], {-100: 9, -51: 9, -50: 6, -1: 6, 0: 3, 49: 3, 50: 0, 100: 0}),
        (range(11), {-100: 0, -99: 0, 0: 5, 99: 10, 100: 10}),
        (range(256), {-100: 0, 0: 128, 100: 255}),
        ([0], {-100: 0, 0: 0, 100: 0}),
    ],
)
def test_a_scale_is_divided_evenly(scale: Sequence[int], expected: dict[int, int]) -> None:
    """The highest of Django's is the highest of the broker's."""
    assert {one: to_broker(one, scale) for one in expected} == expected
    all_of_them = [scale.index(to_broker(one, scale)) for one in range(-100, 101)]
    assert all_of_them == sorted(all_of_them)


@pytest.mark.parametrize(
    ("broker", "conf", "scale"),
    [
        (REDIS, {}, []),
        (REDIS, {"broker_transport_options": BY_PRIORITY}, [9, 6, 3, 0]),
        (
            REDIS,
            {"broker_transport_options": {**BY_PRIORITY, "priority_steps": [0, 1, 20]}},
            [9, 1, 0],
        ),
        (AMQP, {}, []),
        (AMQP, {"task_queue_max_priority": 3}, [0, 1, 2, 3]),
        (AMQP, {"task_queues": [Queue("celery", max_priority=2)]}, [0, 1, 2]),
        (
            AMQP,
            {"task_queues": [Queue("celery", queue_arguments={"x-max-priority": 1})]},
            [0, 1],
        ),
        ("memory://", {"task_queue_max_priority": 3}, []),
        ("unknown://", {}, []),
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
    app.conf.update(
        broker_url=AMQP,
        task_queues=[Queue("fast", max_priority=9), Queue("slow"), Queue("other", max_priority=4)],
    )
    for queues, supported in ((["fast", "other"], True), (["fast", "slow"], False)):
        setting = tasks_setting(by_hand.alias)
        setting["default"]["QUEUES"] = queues
        with override_settings(TASKS=setting):
            assert task_backends["default"].supports_priority is supported
            first = work.add.using(queue_name="fast")
            if supported:
                first.using(priority=100).enqueue(1)
            else:
                with pytest.raises(InvalidTask, match="does not support setting priority"):
                    first.using(priority=100)
    properties = by_hand.rows.get().properties
    assert '"priority": 9' in properties


@pytest.mark.parametrize("priority", [101, -101, 0.5])
def test_a_priority_beyond_the_range_is_refused(by_hand: ByHand, priority: float) -> None:
    """As by every backend."""
    by_hand.mailbox.app.conf.update(broker_url=AMQP, task_queue_max_priority=10)
    with (
        override_settings(TASKS=tasks_setting(by_hand.alias)),
        pytest.raises(InvalidTask, match="whole number between -100 and 100"),
    ):
        work.add.using(priority=priority)
