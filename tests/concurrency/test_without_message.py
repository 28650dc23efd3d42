"""Single-instance tasks that run without a message: direct calls, ``.apply()``, eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Task, shared_task

from django_celery_safe import (
    AlreadyRunning,
    ConfigurationError,
    SafeTask,
    release_lock,
    single_instance,
)
from tests.concurrency.mailbox import Mailbox
from tests.concurrency.test_options import KINDS, held_names, make_task
from tests.locks.renewals import get_lock, held_by

pytestmark = pytest.mark.usefixtures("locks_in_memory")


def directly(task: Any, *args: Any) -> Any:
    """Call the task as a function."""
    return task(*args)


def by_run(task: Any, *args: Any) -> Any:
    """Call what the task runs."""
    return task.run(*args)


def by_apply(task: Any, *args: Any) -> Any:
    """Run the task here, as ``.apply()`` does."""
    return task.apply(args).get()


def eagerly(task: Any, *args: Any) -> Any:
    """Send the task in eager mode."""
    task.app.conf.task_always_eager = True
    return task.delay(*args).get()


class Boom(Exception):
    """The error of the tasks."""


def work(number: int) -> Any:
    """Return the names of the locks; raise for numbers below 0."""
    if number < 0:
        raise Boom(held_names())
    return held_names()


@pytest.mark.parametrize(
    ("kind", "base", "call"),
    [
        ("bound", SafeTask, by_run),
        ("class", Task, by_apply),
        ("bound autoretry", SafeTask, eagerly),
        ("pydantic", SafeTask, by_apply),
    ],
)
def test_the_lock_is_taken_and_freed(
    kind: str, base: Any, call: Callable[..., Any], mailbox: Mailbox
) -> None:
    """Every kind of task runs under the lock of its key, and frees it at the end."""
    task = make_task(mailbox, kind, base)
    assert call(task, KINDS[kind][2]) == [f"{task.name}:7"]
    assert held_names() == []


@pytest.mark.parametrize("call", [directly, by_run, by_apply, eagerly])
def test_a_conflict_is_skipped(call: Callable[..., Any], mailbox: Mailbox) -> None:
    """While another run holds the lock the task returns None, and the lock stays as it is."""
    task = mailbox.task(single_instance(key="{number}")(work), base=SafeTask)
    with held_by(f"{task.name}:7", task_id="first") as lock:
        assert call(task, 7) is None
        assert call(task, 8) == [f"{task.name}:7", f"{task.name}:8"]
        assert get_lock(lock.name).token == lock.token


@pytest.mark.parametrize(
    ("on_conflict", "call"), [("retry", by_apply), ("reject", eagerly), ("raise", directly)]
)
def test_a_conflict_raises_already_running(
    on_conflict: str, call: Callable[..., Any], mailbox: Mailbox
) -> None:
    """Without a message there is nothing to retry or reject: AlreadyRunning names the holder."""
    decorate = single_instance(key="{number}", on_conflict=on_conflict)
    task = mailbox.task(decorate(work), base=SafeTask, autoretry_for=(Boom,))
    with (
        held_by(f"{task.name}:7", task_id="first"),
        pytest.raises(AlreadyRunning, match="holds the lock") as raised,
    ):
        call(task, 7)
    assert raised.value.task_id == "first"
    assert raised.value.name == f"{task.name}:7"
    assert "task first" in raised.value.holder
    assert mailbox.take() == []


def test_a_function_that_no_task_was_made_of_has_a_lock_too() -> None:
    """The decorated function alone takes the lock of its own dotted name, a method of its class."""

    class Shop:
        @single_instance(key="{number}")
        def work(self, number: int) -> Any:
            return held_names()

    assert single_instance(key="{number}")(work)(7) == [f"{__name__}.work:7"]
    assert Shop().work(7) == [f"{__name__}.{Shop.__qualname__}.work:7"]
    assert held_names() == []


@shared_task(base=SafeTask, name="tests.renamed")
@single_instance(key="{number}")
def renamed(number: int) -> Any:
    """Return the names of the locks."""
    return held_names()


def test_run_by_hand_finds_its_task() -> None:
    """``task.run()`` takes the lock of the task, whose name may be another than the function's."""
    assert renamed.run(7) == ["tests.renamed:7"]


@pytest.mark.parametrize(("again", "bind"), [(directly, True), (by_run, False)])
def test_a_task_may_call_itself_with_another_key(
    again: Callable[..., Any], bind: bool, mailbox: Mailbox
) -> None:
    """Inside its own message a direct call takes the lock of its own arguments."""
    seen: list[list[str]] = []

    def crawl(depth: int) -> int:
        seen.append(sorted(name.rpartition(":")[2] for name in held_names()))
        if depth:
            again(task, depth - 1)
        return depth

    def crawl_bound(self: Any, depth: int) -> int:
        return crawl(depth)

    function = single_instance(key="{depth}")(crawl_bound if bind else crawl)
    task = mailbox.task(function, base=SafeTask, bind=bind, name="tests.crawl")
    assert mailbox.deliver(mailbox.send(task, 2)) == ("SUCCESS", 2)
    assert seen == [["2"], ["1", "2"], ["0", "1", "2"]]
    assert mailbox.take() == []
    assert held_names() == []


@pytest.mark.parametrize("again", [directly, by_apply])
def test_a_task_that_calls_itself_with_the_same_key_is_a_conflict(
    again: Callable[..., Any], mailbox: Mailbox
) -> None:
    """A call inside the run that holds the lock is skipped, and its message stays where it is."""
    results: list[Any] = []

    @single_instance
    def task(number: int) -> int:
        results.append(again(made, number))
        return number

    made = mailbox.task(task, base=SafeTask)
    assert mailbox.deliver(mailbox.send(made, 7)) == ("SUCCESS", 7)
    assert results == [None]
    assert mailbox.take() == []


def test_a_retry_of_an_eager_task_is_not_skipped(mailbox: Mailbox) -> None:
    """The retry of ``.apply()`` runs, though the first attempt held the lock."""
    runs: list[int] = []

    @single_instance
    def task(self: Any) -> str:
        runs.append(self.request.retries)
        if len(runs) < 3:
            raise self.retry(countdown=0)
        return "done"

    made = mailbox.task(task, base=SafeTask, bind=True)
    assert made.apply().get() == "done"
    assert runs == [0, 1, 2]
    assert held_names() == []


# The name of the lock of a call.


def report(year: int, month: int = 1) -> list[str]:
    """Return the names of the locks that are held."""
    return sorted(held_names())


def bound_report(self: Any, year: int, month: int = 1) -> list[str]:
    """Do the same, and get the task."""
    return sorted(held_names())


@pytest.mark.parametrize(
    ("key", "bind"), [({}, True), ({"key": ["year"]}, False), ({"lock": "reports"}, True)]
)
def test_a_task_names_the_lock_of_a_call(key: Any, bind: bool, mailbox: Mailbox) -> None:
    """By the arguments alone, also where the key is hashed, that of its message too."""
    decorated = single_instance(unique_until="end", **key)(bound_report if bind else report)
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
    plain = mailbox.task(report, base=SafeTask, name="tests.plain")
    with pytest.raises(ConfigurationError, match=r"tests\.plain has no @single_instance"):
        plain.lock_name(2026)
    alone = mailbox.task(single_instance(report), base=SafeTask, name="tests.report")
    with pytest.raises(TypeError, match="'year'"):
        alone.lock_name()


def test_tasks_with_one_lock_exclude_each_other(mailbox: Mailbox) -> None:
    """Several tasks share a key: only one of them all is on its way, and only one runs."""
    decorate = single_instance(
        lock="reports", key="{year}", unique_until="end", on_conflict="raise"
    )
    one, other = (
        mailbox.task(decorate(report), base=SafeTask, name=f"tests.{name}")
        for name in ("one", "other")
    )
    first, second, third = one.delay(2026), other.delay(2026), other.delay(2027)
    assert [result.is_duplicate for result in (first, second, third)] == [False, True, False]
    assert second.id == first.id
    for message, year in zip(mailbox.take(), (2026, 2027), strict=True):
        with held_by(f"reports:{year}", "another"):
            assert mailbox.deliver(message).state == "FAILURE"
    assert held_names() == []
    message = mailbox.send(other, 2026)
    assert mailbox.deliver(message).value == ["reports:2026", "sent:reports:2026"]


def test_a_call_can_name_the_lock(mailbox: Mailbox) -> None:
    """The key of one call can be one for all tasks, as a global key is elsewhere."""
    tasks = [mailbox.task(report, base=SafeTask, name=f"tests.{name}") for name in ("one", "other")]
    asked = {"lock": "celery_once", "key": "report", "on_conflict": "raise"}
    for task in tasks:
        message = mailbox.send(task, 2026, single_instance=asked)
        assert mailbox.deliver(message).value == ["celery_once:report"]
        with held_by("celery_once:report", "another"):
            assert mailbox.deliver(message).state == "FAILURE"
