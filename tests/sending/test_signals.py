"""Celery's own signals and events come once for each message sent on commit."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, shared_task
from celery.canvas import Signature
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction

from django_celery_safe import SafeTask, send_on_commit, single_instance
from django_celery_safe.delivery.header import HEADER
from tests.app.tasks import add, total
from tests.sending.conftest import hearing
from tests.sending.published import Sent
from tests.sending.queued import without

pytestmark = pytest.mark.django_db(transaction=True)

CANVASES: dict[str, tuple[Callable[[], Signature[Any]], int]] = {
    "chain": (lambda: chain(add.s(1), add.s(2)), 1),
    "chord": (lambda: chord([add.s(1), add.s(2)], total.s()), 2),
}


@shared_task(base=SafeTask)
@single_instance(key=["x"], unique_until="end")
def add_once(x: int, y: int = 0) -> int:
    """Return the sum, of one message at a time."""
    return x + y


@pytest.mark.parametrize(("make", "count"), CANVASES.values(), ids=CANVASES.keys())
def test_each_publication_is_signalled_once(
    make: Callable[[], Signature[Any]], count: int, sent: Sent
) -> None:
    """before_task_publish comes at the call, after_task_publish at the commit, if there is one."""
    with hearing(after_task_publish) as after, transaction.atomic():
        send_on_commit(make())
        transaction.set_rollback(True)
    assert (after, sent()) == ([], [])
    with hearing(before_task_publish) as before, hearing(after_task_publish) as after:
        with transaction.atomic():
            send_on_commit(make())
            assert len(before) == count
            assert after == []
        assert len(before) == len(after) == count
    ids = [message.id for message in sent()]
    assert [said["headers"]["id"] for said in before] == ids
    assert [said["headers"]["id"] for said in after] == ids


def test_a_unique_send_is_announced_like_any_other(locks_in_memory: None, sent: Sent) -> None:
    """Message and signals are those of a plain send; a duplicate has none of them."""
    options = {"queue": "slow", "priority": 3, "headers": {"ours": [1]}, "shadow": "other"}
    with hearing(after_task_publish) as after:
        for task in (add, add_once):
            task.apply_async((1,), {"y": 2}, task_id="an-id", **options)
        add_once.apply_async((1,), {"y": 2}, task_id="duplicate")
    assert [said["headers"]["id"] for said in after] == ["an-id", "an-id"]
    plain, once = (vars(message) for message in sent())
    for form in (plain, once):
        form["headers"] = without(form["headers"], (HEADER, "task", "stamps"))
    assert plain == once
