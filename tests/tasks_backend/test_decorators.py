"""``@single_instance`` and ``@idempotent`` below Django's ``@task``."""

from pathlib import Path
from typing import Any

from django.db import transaction
from django.tasks import TaskResultStatus, signals
from django.test import override_settings

from django_celery_safe import cache_lock
from tests.listening import receiving
from tests.processes import Journal
from tests.routing import AllIn, routed_by
from tests.tasks_backend import work
from tests.tasks_backend.scenes import ByHand

IMMEDIATE = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}


def test_a_run_that_meets_a_held_lock_comes_back(by_hand: ByHand, tmp_path: Path) -> None:
    """The result is ready again meanwhile, and no attempt of the task's own is used up."""
    (tmp_path / "gate").touch()
    result = work.alone.enqueue(str(tmp_path), name="first")
    message = by_hand.take()
    finished: list[str] = []

    def note(task_result: Any, **kwargs: Any) -> None:
        finished.append(task_result.id)

    # The context is no argument of the key.
    key = by_hand.mailbox.app.tasks[work.alone.module_path].lock_name(str(tmp_path), name="")
    assert key == f"tests.tasks_backend.work.alone:{tmp_path}"
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


def test_work_with_a_key_is_done_once(by_hand: ByHand, tmp_path: Path) -> None:
    """A second task for the same key succeeds with the result of the first."""
    room = str(tmp_path / "journal")
    with routed_by(AllIn(by_hand.alias)):
        first = by_hand.enqueue_and_run(work.charge, room, 7)
        second = by_hand.enqueue_and_run(work.charge, room, 7)
    assert first.return_value == second.return_value == first.id
    assert Journal(Path(room)).count("charged") == 1


def test_decorators_hold_for_other_backends_too(locks_in_memory: None, tmp_path: Path) -> None:
    """On one of Django's own the function is called directly; the context is no argument there."""
    (tmp_path / "gate").touch()
    with override_settings(TASKS=IMMEDIATE):
        result = work.alone.enqueue(str(tmp_path), "first")
        assert result.return_value == 1
        with cache_lock(f"tests.tasks_backend.work.alone:{tmp_path}") as lock:
            assert lock
            result = work.alone.enqueue(str(tmp_path), "second")
        assert result.errors[0].exception_class_path.endswith(".AlreadyRunning")
