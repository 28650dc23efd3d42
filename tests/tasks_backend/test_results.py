"""Results whose row did not end in the usual way, or was changed."""

from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded
from django.db import transaction
from django.tasks import TaskResultStatus, default_task_backend, signals
from django.tasks.exceptions import TaskResultDoesNotExist
from django.test import override_settings

from django_celery_safe import cache_lock
from django_celery_safe.databases import Now
from django_celery_safe.exceptions import CelerySafeError, InvalidResult, TaskPoisoned
from django_celery_safe.leases.holder import Holder, encode_holder
from tests.sending.conftest import hearing
from tests.tasks_backend import work
from tests.tasks_backend.scenes import ByHand, tasks_setting


def the_error(result: Any) -> Any:
    """Return the only error of a result that failed."""
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    (error,) = result.errors
    return error


@pytest.mark.sql
def test_an_id_that_no_task_can_have_has_no_result(by_hand: ByHand) -> None:
    """Such an id, from a URL for example, is one that does not exist, on every database."""
    for result_id in ("a\0b", "\ud800", "x" * 300, "'"):
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(result_id)


def test_a_long_return_value_fails_the_task(by_hand: ByHand) -> None:
    """It is said what to return instead; without retention nobody asks for it."""
    result = by_hand.enqueue_and_run(work.return_long, 70_000)
    error = the_error(result)
    assert error.exception_class is InvalidResult
    assert "70,002 characters of JSON, of 65,536 at most" in error.traceback
    with override_settings(DJANGO_CELERY_SAFE={}):
        work.return_long.enqueue(70_000)
        assert by_hand.deliver().state == "SUCCESS"


def test_a_task_may_say_itself_what_it_came_to(by_hand: ByHand) -> None:
    """The argument of ``finish()``, which another run would return, is its return value."""
    assert by_hand.enqueue_and_run(work.finish, 1, 2).return_value == 1


def test_the_class_of_an_error_is_the_one_that_was_raised(by_hand: ByHand) -> None:
    """Whatever the error says, however long it is."""
    text = "ä" * 5000 + "\nevil.ValueError"
    found = the_error(by_hand.enqueue_and_run(work.decline, text))
    assert found.exception_class is work.Declined
    assert found.traceback.endswith(f"{text[-3000:]}\n")


def test_an_error_without_a_traceback_has_its_class(by_hand: ByHand) -> None:
    """As of a process that was killed at its time limit, or a message that can't be sent."""
    result = work.add.enqueue(1)
    for name, error in (("TimeLimitExceeded", TimeLimitExceeded), ("SomethingOfNobody", Exception)):
        ended = {"state": "failed", "ended_at": Now(), "due_at": None}
        by_hand.rows.update(**ended, error_type=name, error="it ended")
        found = the_error(result)
        assert found.exception_class is error
        assert found.traceback.endswith(": it ended")
    by_hand.rows.update(state="dead", error_type="", error="no such exchange")
    error = the_error(result)
    assert error.exception_class is CelerySafeError
    assert error.traceback.endswith("CelerySafeError: no such exchange")
    assert result.finished_at is not None
    assert (result.started_at, result.worker_ids) == (None, [])


def test_a_poisoned_task_is_finished_once(by_hand: ByHand) -> None:
    """It failed although no run of it ended, and the signal says so."""
    result = work.add.enqueue(7)
    message = by_hand.take()
    by_hand.rows.update(deaths=3, last_death=encode_holder("task", Holder("web1", 42, 1.0, True)))
    with hearing(signals.task_finished) as told:
        by_hand.mailbox.deliver(message)
        by_hand.mailbox.deliver(message)  # it does nothing
    assert the_error(result).exception_class is TaskPoisoned
    (finished,) = [one["task_result"] for one in told]
    assert (finished.id, finished.args, str(finished.status)) == (result.id, [7], "FAILED")


def test_a_task_that_is_gone_from_the_code_has_no_result(by_hand: ByHand) -> None:
    """Nor has one whose settings do not fit any more its own: it has those of its definition."""
    result = work.add.using(queue_name="old").enqueue(1)
    setting = tasks_setting(by_hand.alias)
    setting["default"]["QUEUES"] = ["default"]
    with override_settings(TASKS=setting):
        assert default_task_backend.get_result(result.id).task == work.add
    for path in ("tests.tasks_backend.work.gone", "tests.gone.work.add", "nothing", "json.dumps"):
        by_hand.rows.update(task=path)
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(result.id)


# ``@single_instance`` below Django's ``@task``.


IMMEDIATE = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}


def test_a_run_that_meets_a_held_lock_comes_back(by_hand: ByHand) -> None:
    """The result is ready again meanwhile, and no attempt of the task's own is used up."""
    result = work.alone.enqueue("room", name="first")
    message = by_hand.take()
    # The context is no argument of the key.
    key = by_hand.mailbox.app.tasks[work.alone.module_path].lock_name("room", name="")
    assert key == "tests.tasks_backend.work.alone:room"
    with hearing(signals.task_finished) as finished:
        with cache_lock(key) as lock:
            assert lock
            assert by_hand.mailbox.deliver(message).state == "RETRY"
        result.refresh()
        assert (result.status, finished) == (TaskResultStatus.READY, [])
        assert by_hand.deliver().value == 1
    assert [one["task_result"].id for one in finished] == [result.id]


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
