"""``@single_instance`` below Django's ``@task``."""

from typing import Any

from django.db import transaction
from django.tasks import TaskResultStatus, signals
from django.test import override_settings

from django_celery_safe import cache_lock
from tests.listening import receiving
from tests.tasks_backend import work
from tests.tasks_backend.scenes import ByHand

IMMEDIATE = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}


def test_a_run_that_meets_a_held_lock_comes_back(by_hand: ByHand) -> None:
    """The result is ready again meanwhile, and no attempt of the task's own is used up."""
    result = work.alone.enqueue("room", name="first")
    message = by_hand.take()
    finished: list[str] = []

    def note(task_result: Any, **kwargs: Any) -> None:
        finished.append(task_result.id)

    # The context is no argument of the key.
    key = by_hand.mailbox.app.tasks[work.alone.module_path].lock_name("room", name="")
    assert key == "tests.tasks_backend.work.alone:room"
    with receiving(signals.task_finished, note):
        with cache_lock(key) as lock:
            assert lock
            assert by_hand.mailbox.deliver(message).state == "RETRY"
        result.refresh()
        assert (result.status, finished) == (TaskResultStatus.READY, [])
        assert by_hand.deliver().value == 1
    assert finished == [result.id]


def test_a_duplicate_gets_the_result_of_the_first(by_hand: ByHand) -> None:
    """In a transaction that shows at the commit."""
    first = work.once_in_queue.enqueue("a")
    second = work.once_in_queue.enqueue("a")
    with transaction.atomic(using=by_hand.alias):
        third = work.once_in_queue.enqueue("a")
        assert third.id != first.id
    assert first.id == second.id == third.id
    assert (second.enqueued_at, third.enqueued_at) == (None, None)
    third.refresh()
    assert third.enqueued_at is not None
    by_hand.deliver()
    third.refresh()
    assert third.return_value == "a"
    assert work.once_in_queue.enqueue("a").id != first.id


def test_decorators_hold_for_other_backends_too(locks_in_memory: None) -> None:
    """On one of Django's own the function is called directly; the context is no argument there."""
    with override_settings(TASKS=IMMEDIATE):
        result = work.alone.enqueue("room", "first")
        assert result.return_value == 1
        with cache_lock("tests.tasks_backend.work.alone:room") as lock:
            assert lock
            result = work.alone.enqueue("room", "second")
        assert result.errors[0].exception_class_path.endswith(".AlreadyRunning")
