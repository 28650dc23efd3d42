"""The messages of ``enqueue``, with the results and signals that belong to them."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction
from django.tasks import TaskResultStatus, signals, task_backends
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.test import override_settings
from django.utils import timezone

from django_celery_safe import ConfigurationError, SafeTask, WrongTransaction
from django_celery_safe.delivery.header import HEADER
from tests.listening import receiving
from tests.processes import dead_port
from tests.tasks_backend import work
from tests.tasks_backend.scenes import BACKEND, ByHand, tasks_setting

if TYPE_CHECKING:
    from pytest_django import Settings

#: Django's signals, in the order in which a task sends them.
SIGNALS = ("task_enqueued", "task_started", "task_finished")


@contextmanager
def hearing_all() -> Iterator[list[tuple[Any, ...]]]:
    """Collect what Django's signals of tasks say meanwhile."""
    heard: list[tuple[Any, ...]] = []

    def hear(name: str) -> Any:
        def receive(sender: type, task_result: Any, **kwargs: Any) -> None:
            heard.append((name, sender.__name__, task_result.id, str(task_result.status)))

        return receive

    with ExitStack() as stack:
        for name in SIGNALS:
            stack.enter_context(receiving(getattr(signals, name), hear(name)))
        yield heard


def test_a_task_is_a_task_of_celery(by_hand: ByHand) -> None:
    """Its message has the path as its name, the arguments as they are, and JSON for a body."""
    result = work.add.enqueue(1, y=2)
    message = by_hand.take()
    assert message.headers["task"] == work.add.module_path == "tests.tasks_backend.work.add"
    assert (message.id, message.args, message.kwargs) == (result.id, [1], {"y": 2})
    described = message.ours["django_task"]
    assert datetime.fromisoformat(described.pop("enqueued_at")) <= result.enqueued_at
    assert described == {
        "backend": "default",
        "queue_name": "default",
        "priority": 0,
        "run_after": None,
    }
    assert len(result.id) < 64


def test_a_message_of_celery_runs_a_task_too(by_hand: ByHand) -> None:
    """Beat, a chain or ``.delay()`` can send it by its path; its row is a result, too."""
    work.add.enqueue(0)
    by_hand.deliver()
    celery_task = by_hand.mailbox.app.tasks[work.add.module_path]
    sent = celery_task.apply_async_on_commit((1, 2), using=by_hand.alias, outbox="until_done")
    assert by_hand.deliver().value == 3
    result = work.add.get_result(sent.id)
    assert (result.return_value, result.task, result.args) == (3, work.add, [1, 2])


def test_the_project_s_own_task_class_stays(by_hand: ByHand) -> None:
    """The task class of the app works for tasks of Django, too."""
    app = by_hand.mailbox.app
    seen: list[str] = []

    class Watched(app.Task):  # type: ignore[name-defined, misc]
        abstract = True

        def after_return(self, status: str, *args: Any) -> None:
            seen.append(status)

    app.Task = Watched
    assert by_hand.enqueue_and_run(work.add, 1).return_value == 1
    assert seen == ["SUCCESS"]


def test_arguments_that_do_not_fit_are_an_error_at_once(by_hand: ByHand) -> None:
    """The context is not among those that a caller gives."""
    with pytest.raises(TypeError, match="positional argument"):
        work.add.enqueue(1, 2, 3)
    with pytest.raises(TypeError, match="missing 1 required"):
        work.describe_context.enqueue()
    assert not by_hand.rows.exists()


def test_signals_say_what_happens(by_hand: ByHand) -> None:
    """A task is enqueued at the commit, started and finished by the worker, each once."""
    with hearing_all() as heard:
        with transaction.atomic(using=by_hand.alias):
            result = work.add.enqueue(1)
            assert heard == []
        assert [one[0] for one in heard] == ["task_enqueued"]
        by_hand.deliver()
    expected = [
        ("task_enqueued", "SafeCeleryBackend", result.id, "READY"),
        ("task_started", "SafeCeleryBackend", result.id, "RUNNING"),
        ("task_finished", "SafeCeleryBackend", result.id, "SUCCESSFUL"),
    ]
    assert heard == expected


def test_a_rollback_is_no_signal(by_hand: ByHand) -> None:
    """No task was enqueued."""
    with hearing_all() as heard, transaction.atomic(using=by_hand.alias):
        result = work.add.enqueue(1)
        transaction.set_rollback(True, using=by_hand.alias)
    assert heard == []
    assert result.enqueued_at is None
    assert by_hand.mailbox.take() == []


def test_a_task_is_finished_when_its_row_says_so(by_hand: ByHand) -> None:
    """A receiver of ``task_finished`` finds the very result."""
    found: list[Any] = []

    def look(task_result: Any, **kwargs: Any) -> None:
        again = task_result.task.get_result(task_result.id)
        found.append((again.status, again.errors and again.errors[0].exception_class))
        assert task_result.errors == [] or "ValueError: no" in task_result.errors[0].traceback

    with receiving(signals.task_finished, look):
        by_hand.enqueue_and_run(work.add, 1)
        by_hand.enqueue_and_run(work.fail, "no")
    assert found == [
        (TaskResultStatus.SUCCESSFUL, []),
        (TaskResultStatus.FAILED, ValueError),
    ]


@pytest.mark.parametrize("name", SIGNALS)
def test_an_error_of_a_receiver_harms_nothing(
    by_hand: ByHand, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the task runs."""

    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("no receiver")

    with receiving(getattr(signals, name), refuse):
        assert by_hand.enqueue_and_run(work.add, 1).return_value == 1
    assert "no receiver" in caplog.text


def test_django_logs_what_becomes_of_a_task(
    by_hand: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    """In the worker's log too, with the error and where it was raised."""
    caplog.set_level(logging.DEBUG, "django.tasks")
    result = by_hand.enqueue_and_run(work.fail, "no such order")
    records = [one for one in caplog.records if one.name == "django.tasks"]
    assert [one.levelname for one in records] == ["DEBUG", "INFO", "ERROR"]
    assert all(result.id in one.getMessage() for one in records)
    assert records[-1].exc_info is not None
    assert str(records[-1].exc_info[1]) == "no such order"


@pytest.mark.parametrize("outbox", [True, False])
def test_a_task_need_not_be_carried(by_hand: ByHand, outbox: bool) -> None:
    """It still waits for the commit; it has no result, and the error says what is to be set."""
    with override_settings(TASKS=tasks_setting(by_hand.alias, outbox=outbox)):
        assert not task_backends["default"].supports_get_result
        with hearing_all() as heard:
            with transaction.atomic(using=by_hand.alias):
                result = work.add.enqueue(1)
                assert by_hand.mailbox.take() == []
            message = by_hand.take()
            assert "attempt" not in message.ours
            assert by_hand.mailbox.deliver(message).value == 1
        assert [one[0] for one in heard] == list(SIGNALS)
        assert by_hand.rows.done().count() == 0
        for ask in (lambda: work.add.get_result(result.id), result.refresh):
            with pytest.raises(NotImplementedError, match="until_done"):
                ask()


def test_a_lost_message_is_not_enqueued(by_hand: ByHand, settings: "Settings") -> None:
    """Without an outbox, a broker that is gone after the commit leaves ``enqueued_at`` empty."""
    app = by_hand.mailbox.app
    app.conf.broker_url = f"redis://127.0.0.1:{dead_port()}"
    with (
        override_settings(TASKS=tasks_setting(by_hand.alias, outbox=False)),
        hearing_all() as heard,
        transaction.atomic(using=by_hand.alias),
    ):
        result = work.add.enqueue(1)
    assert (heard, result.enqueued_at) == ([], None)


def test_a_broker_that_is_gone_loses_nothing(by_hand: ByHand) -> None:
    """The row has the task, which counts as enqueued, and a relay sends it."""
    by_hand.mailbox.app.conf.broker_url = f"redis://127.0.0.1:{dead_port()}"
    result = work.add.enqueue(1)
    assert result.enqueued_at is not None
    assert work.add.get_result(result.id).status == TaskResultStatus.READY
    assert by_hand.rows.pending().count() == 1


def test_without_retention_there_are_no_results(by_hand: ByHand) -> None:
    """The backend says so before anything is asked in vain."""
    with override_settings(DJANGO_CELERY_SAFE={}):
        assert not task_backends["default"].supports_get_result
        result = work.add.enqueue(1)
        with pytest.raises(NotImplementedError, match="OUTBOX_RETENTION"):
            result.refresh()
        by_hand.deliver()
    assert not by_hand.rows.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"outbox": "until-done"}, "Did you mean 'until_done'"),
        ({"outbx": True}, "has no 'outbx'.* Did you mean 'outbox'"),
        ({"using": "replica2"}, "'replica2', which DATABASES does not have"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], text: str) -> None:
    """It is an error when the backend is first used."""
    with (
        override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": options}}),
        pytest.raises(ConfigurationError, match=text),
    ):
        work.add.enqueue(1)


def test_the_wrong_transaction_is_refused(
    by_hand: ByHand, sqlite_alias: str, django_db_blocker: Any
) -> None:
    """A task would leave before the commit of another database."""
    with transaction.atomic(using=sqlite_alias), pytest.raises(WrongTransaction):
        work.add.enqueue(1)


def test_a_queue_is_that_of_the_broker(by_hand: ByHand) -> None:
    """The default queue is Celery's own, wherever its routes lead."""
    other = by_hand.mailbox.add_queue()
    work.add.using(queue_name=other).enqueue(1)
    assert by_hand.take().delivery_info["routing_key"] == other
    work.add.enqueue(1)
    assert by_hand.take().delivery_info["routing_key"] == by_hand.mailbox.queue


def test_a_queue_that_the_backend_lacks_is_refused(by_hand: ByHand) -> None:
    """As by every backend; it is checked again when the settings have changed."""
    task = work.add.using(queue_name="unknown")
    setting = tasks_setting(by_hand.alias)
    setting["default"]["QUEUES"] = ["default"]
    with (
        override_settings(TASKS=setting),
        pytest.raises(InvalidTask, match="Queue 'unknown' is not valid"),
    ):
        task.enqueue(1)


def test_a_function_without_a_name_is_refused(by_hand: ByHand) -> None:
    """No worker could import it."""
    with pytest.raises(InvalidTask, match="no name"):
        replace(work.add, func=work.nameless)


def test_a_function_of_a_script_is_refused(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own __main__ has no such function."""

    def script(number: int) -> None:
        """Do nothing."""

    monkeypatch.setattr(script, "__module__", "__main__")
    monkeypatch.setattr(script, "__qualname__", "script")
    with pytest.raises(InvalidTask, match=r"'__main__\.script' is of the script that runs here"):
        replace(work.add, func=script)


@pytest.mark.parametrize("aware", [True, False])
def test_run_after_is_the_eta(by_hand: ByHand, aware: bool) -> None:
    """Without USE_TZ a moment is one of the project's own zone."""
    moment = datetime(2040, 1, 1, 12, tzinfo=UTC if aware else None)
    with override_settings(USE_TZ=aware, TIME_ZONE="UTC"):
        task = work.add.using(run_after=moment)
        result = task.enqueue(1)
        eta = datetime.fromisoformat(by_hand.take().headers["eta"])
        assert eta == moment.replace(tzinfo=UTC)
        assert work.add.get_result(result.id).task == task


def test_without_use_tz_all_moments_are_naive(by_hand: ByHand) -> None:
    """Without time zones a result's moments are local and naive, as with Django's own backends."""
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        result = by_hand.enqueue_and_run(work.add, 1)
        assert result.started_at.tzinfo is None
        assert result.enqueued_at <= result.started_at <= timezone.now()
        assert timezone.now() - result.enqueued_at < timedelta(minutes=5)


def test_a_retry_is_another_attempt(by_hand: ByHand) -> None:
    """The task is ready again; of the workers of earlier attempts only the number is kept."""
    work.attempts.clear()
    result = work.try_again.enqueue(2)
    with hearing_all() as heard:
        for number in (1, 2):
            assert by_hand.deliver().state == "RETRY"
            result.refresh()
            assert (result.status, result.attempts) == (TaskResultStatus.READY, number)
            assert (result.errors, result.finished_at) == ([], None)
        assert by_hand.deliver().state == "SUCCESS"
    result.refresh()
    assert result.return_value == [1, 2, 3]
    assert result.worker_ids[:2] == ["unknown", "unknown"]
    assert result.worker_ids[2].endswith(f":{os.getpid()}")
    assert [one[0] for one in heard] == ["task_started"] * 3 + ["task_finished"]


def test_a_result_is_known_only_to_its_database(by_hand: ByHand) -> None:
    """A row of Celery's own tasks is no result."""

    def plain() -> None:
        """Be a task of Celery alone."""

    task = by_hand.mailbox.task(plain, name="tests.plain", base=SafeTask)
    sent = task.apply_async_on_commit((), using=by_hand.alias, outbox="until_done")
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(sent.id)
    assert by_hand.take().headers[HEADER]["attempt"]


def test_a_moment_in_a_header_may_be_later(by_hand: ByHand) -> None:
    """A countdown of Celery and a moment of Django are the same."""
    work.add.using(run_after=timezone.now() + timedelta(minutes=5)).enqueue(1)
    assert 290 < by_hand.take().delay <= 300


def test_a_task_may_run_eagerly(by_hand: ByHand) -> None:
    """With ``task_always_eager``, at the commit; there is no row, and so no result."""
    by_hand.mailbox.app.conf.task_always_eager = True
    with hearing_all() as heard:
        with transaction.atomic(using=by_hand.alias):
            result = work.describe_context.enqueue("room")
            assert heard == []
        assert {one[0] for one in heard} == set(SIGNALS)
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()


def test_a_celery_task_can_be_called_by_hand(by_hand: ByHand) -> None:
    """Then the context is one of no message, also inside another task."""
    app = by_hand.mailbox.app
    for task, args, value in ((work.add, (1, 2), 3), (work.describe_context, ("room",), 1)):
        task.enqueue(*args)
        by_hand.deliver()
        celery_task = app.tasks[task.module_path]
        calls = celery_task(*args), celery_task.run(*args), celery_task.apply(args, {}).get()
        assert [found[0] if isinstance(found, list) else found for found in calls] == [value] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "body", lambda: app.tasks[work.add.module_path].run(1, 2))
        assert by_hand.enqueue_and_run(work.act, 1).return_value == 3


def test_enqueue_after_the_commit_works_as_well(by_hand: ByHand) -> None:
    """As Django's own page shows it."""
    with transaction.atomic(using=by_hand.alias):
        transaction.on_commit(partial(work.add.enqueue, 1), using=by_hand.alias)
    assert by_hand.deliver().value == 1


def test_an_unknown_app_gets_the_task(by_hand: ByHand) -> None:
    """One that was finalized before the task was defined has it from the first ``enqueue`` on."""
    app = by_hand.mailbox.app
    app.finalize()
    app.tasks.pop(work.add.module_path, None)
    assert by_hand.enqueue_and_run(work.add, 1).return_value == 1
