"""Names of tasks' locks: by arguments, and for several tasks at once."""

from typing import Any

import pytest

from django_celery_safe import ConfigurationError, SafeTask, release_lock, single_instance
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox
from tests.concurrency.test_options import held_names
from tests.locks.renewals import get_lock

pytestmark = pytest.mark.usefixtures("locks_in_memory")


def work(year: int, month: int = 1) -> list[str]:
    """Return the names of the locks that are held."""
    return sorted(held_names())


def bound_work(self: Any, year: int, month: int = 1) -> list[str]:
    """Do the same, and get the task."""
    return sorted(held_names())


@pytest.mark.parametrize(
    ("key", "bind"), [({}, True), ({"key": ["year"]}, False), ({"lock": "reports"}, True)]
)
def test_a_task_names_the_lock_of_a_call(key: Any, bind: bool, mailbox: Mailbox) -> None:
    """By the arguments alone, also where the key is hashed, that of its message too."""
    decorated = single_instance(unique_until="end", **key)(bound_work if bind else work)
    task = mailbox.task(decorated, base=SafeTask, bind=bind, name="tests.report")
    task.delay(2026, month=1)
    name = task.lock_name(2026)
    assert held_names() == [f"sent:{name}"]
    assert mailbox.deliver(mailbox.take_one()).value == sorted([name, f"sent:{name}"])
    task.delay(year=2026)
    assert release_lock(get_lock(f"sent:{task.lock_name(2026)}"))
    assert task.delay(2026).is_duplicate is False


def test_what_has_no_lock_has_no_name(mailbox: Mailbox) -> None:
    """A task without the decorator, or arguments that don't fit, are an error."""
    plain = mailbox.task(work, base=SafeTask, name="tests.plain")
    with pytest.raises(ConfigurationError, match=r"tests\.plain has no @single_instance"):
        plain.lock_name(2026)
    alone = mailbox.task(single_instance(work), base=SafeTask, name="tests.report")
    with pytest.raises(TypeError, match="'year'"):
        alone.lock_name()


def test_tasks_with_one_lock_exclude_each_other(mailbox: Mailbox) -> None:
    """Several tasks share a key: only one of them all is on its way, and only one runs."""
    decorate = single_instance(
        lock="reports", key="{year}", unique_until="end", on_conflict="raise"
    )
    one, other = (
        mailbox.task(decorate(work), base=SafeTask, name=f"tests.{name}")
        for name in ("one", "other")
    )
    first, second, third = one.delay(2026), other.delay(2026), other.delay(2027)
    assert [result.is_duplicate for result in (first, second, third)] == [False, True, False]
    assert second.id == first.id
    for message, year in zip(mailbox.take(), (2026, 2027), strict=True):
        with held_by(f"reports:{year}", "another"):
            assert mailbox.deliver(message).state == "FAILURE"
    assert held_names() == []
    other.delay(2026)
    message = mailbox.take_one()
    assert mailbox.deliver(message).value == ["reports:2026", "sent:reports:2026"]


def test_a_call_can_name_the_lock(mailbox: Mailbox) -> None:
    """The key of one call can be one for all tasks, as a global key is elsewhere."""
    tasks = [mailbox.task(work, base=SafeTask, name=f"tests.{name}") for name in ("one", "other")]
    asked = {"lock": "celery_once", "key": "report", "on_conflict": "raise"}
    for task in tasks:
        task.apply_async((2026,), single_instance=asked)
        message = mailbox.take_one()
        assert mailbox.deliver(message).value == ["celery_once:report"]
        with held_by("celery_once:report", "another"):
            assert mailbox.deliver(message).state == "FAILURE"
