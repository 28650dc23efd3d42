"""Sends that count as the running task's own message sent again, and others."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery.signals import before_task_publish

from django_celery_safe import SafeTask, find_lock, single_instance
from tests.concurrency.mailbox import Mailbox


@pytest.fixture
def audit(mailbox: Mailbox) -> Iterator[Any]:
    """A task, sent once for each number, that a receiver sends twice before each retry."""

    @single_instance(key="{number}", unique_until="end")
    def audited(number: int) -> None:
        pass

    task = mailbox.task(audited, base=SafeTask)
    task.results = []

    def send_twice(sender: str, headers: dict[str, Any], **kwargs: Any) -> None:
        if sender != task.name and headers["retries"]:
            task.results += [task.delay(1), task.delay(1)]

    before_task_publish.connect(send_twice, weak=False)
    yield task
    before_task_publish.disconnect(send_twice)


def retrying(self: Any, number: int) -> int:
    """Retry once."""
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return number


def test_a_receivers_sends_during_a_retry_are_ordinary_sends(mailbox: Mailbox, audit: Any) -> None:
    """They are sent once, under locks of their own, as from anywhere else."""
    task = mailbox.task(single_instance(key="{number}")(retrying), base=SafeTask, bind=True)
    task.delay(7)
    assert mailbox.deliver(mailbox.take_one()).state == "RETRY"
    assert [result.is_duplicate for result in audit.results] == [False, True]
    sent, again = mailbox.take()
    assert (sent.headers["task"], sent.ours["canvas"]) == (audit.name, False)
    assert mailbox.deliver(again) == ("SUCCESS", 7)
    lock = find_lock(f"sent:{audit.name}:1")
    assert lock is not None
    assert (lock.holder.task_id, lock.token) == (sent.id, sent.ours["sent"])


def test_one_id_used_twice_is_a_duplicate(mailbox: Mailbox) -> None:
    """An id of the caller's own makes the second send no message of a run sent again."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until="end")(retrying), base=SafeTask, bind=True
    )
    results = [task.apply_async((number,), task_id="own") for number in (7, 7, 8)]
    assert [(result.id, result.is_duplicate) for result in results] == [
        ("own", False),
        ("own", True),
        ("own", False),
    ]
    first, other = mailbox.take()
    assert [first.args, other.args] == [[7], [8]]
    assert mailbox.deliver(first).state == "RETRY"
    # The retry, which has the id too, is on its way under the lock of the first.
    again = mailbox.take_one()
    assert again.ours["sent"] == first.ours["sent"]
    assert task.apply_async((7,), task_id="own").is_duplicate is True
    assert mailbox.take() == []
    assert mailbox.deliver(again) == ("SUCCESS", 7)
    assert task.apply_async((7,), task_id="own").is_duplicate is False
