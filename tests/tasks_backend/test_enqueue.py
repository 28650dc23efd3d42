"""The messages of ``enqueue``, with the results and signals that belong to them."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.tasks import TaskResultStatus, signals, task, task_backends
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.test import override_settings
from django.utils import timezone

from django_celery_safe import ConfigurationError, WrongTransaction
from tests.listening import receiving
from tests.processes import dead_port
from tests.sending.conftest import hearing, rolled_back
from tests.tasks_backend import work
from tests.tasks_backend.scenes import BACKEND, ByHand, tasks_setting

#: Django's signals, in the order in which a task sends them.
SIGNALS = (signals.task_enqueued, signals.task_started, signals.task_finished)


def test_a_task_is_a_task_of_celery(by_hand: ByHand) -> None:
    """Its message has the path as its name, the arguments as they are, and JSON for a body."""
    result = work.add.enqueue(1, y=2)
    message = by_hand.take()
    assert message.headers["task"] == work.add.module_path == "tests.tasks_backend.work.add"
    assert (message.id, message.args, message.kwargs) == (result.id, [1], {"y": 2})
    described = message.ours["django_task"]
    assert datetime.fromisoformat(described.pop("enqueued_at")) <= result.enqueued_at
    assert described == {"backend": "default", "queue_name": "default", "run_after": ""}
    assert len(result.id) < 64


def test_signals_say_what_happens(by_hand: ByHand) -> None:
    """A task is enqueued at the commit, started and finished by the worker, each once."""
    started: list[str] = []

    def look(task_result: Any, **kwargs: Any) -> None:
        started.append(str(task_result.status))  # the worker's result changes later

    with hearing(*SIGNALS) as heard, receiving(signals.task_started, look):
        with rolled_back(by_hand.alias):
            lost = work.add.enqueue(1)
            assert work.add.get_result(lost.id).status == TaskResultStatus.READY
        assert lost.enqueued_at is None
        with pytest.raises(TaskResultDoesNotExist):
            work.add.get_result(lost.id)
        with transaction.atomic(using=by_hand.alias):
            result = work.add.enqueue(1)
            assert (heard, result.enqueued_at, by_hand.mailbox.take()) == ([], None, [])
        assert [one["signal"] for one in heard] == [signals.task_enqueued]
        assert result.enqueued_at is not None
        by_hand.deliver()
    assert [one["signal"] for one in heard] == list(SIGNALS)
    assert {one["sender"].__name__ for one in heard} == {"SafeCeleryBackend"}
    results = [one["task_result"] for one in heard]
    assert [one.id for one in results] == [result.id] * 3
    assert (str(results[0].status), started) == ("READY", ["RUNNING"])
    assert str(results[-1].status) == "SUCCESSFUL"


def test_a_task_need_not_be_carried(by_hand: ByHand) -> None:
    """It still waits for the commit; it has no result, and the error says what is to be set."""
    with override_settings(TASKS=tasks_setting(by_hand.alias, outbox=True)):
        assert not task_backends["default"].supports_get_result
        with hearing(*SIGNALS) as heard:
            with transaction.atomic(using=by_hand.alias):
                result = work.add.enqueue(1)
                assert by_hand.mailbox.take() == []
            message = by_hand.take()
            assert "attempt" not in message.ours
            assert by_hand.mailbox.deliver(message).value == 1
        assert [one["signal"] for one in heard] == list(SIGNALS)
        assert by_hand.rows.done().count() == 0
        with pytest.raises(NotImplementedError, match="until_done"):
            result.refresh()


def test_what_json_has_not_is_refused(by_hand: ByHand) -> None:
    """The error comes from ``enqueue``, and nothing is sent."""
    for value in (timezone.now(), {1}):
        with pytest.raises(TypeError):
            work.add.enqueue(value)
    assert not by_hand.rows.exists()


def test_a_broker_that_is_gone(by_hand: ByHand) -> None:
    """
    The row has the task, which counts as enqueued, and a relay sends it.

    Without an outbox the message is lost, and ``enqueued_at`` stays empty.
    """
    by_hand.mailbox.app.conf.broker_url = f"redis://127.0.0.1:{dead_port()}"
    result = work.add.enqueue(1)
    assert result.enqueued_at is not None
    assert work.add.get_result(result.id).status == TaskResultStatus.READY
    assert by_hand.rows.pending().count() == 1
    setting = tasks_setting(by_hand.alias, outbox=False)
    with override_settings(TASKS=setting), hearing(*SIGNALS) as heard:
        with transaction.atomic(using=by_hand.alias):
            result = work.add.enqueue(1)
        assert (heard, result.enqueued_at) == ([], None)


def test_without_retention_there_are_no_results(by_hand: ByHand) -> None:
    """The backend says so before anything is asked in vain."""
    with override_settings(DJANGO_CELERY_SAFE={}):
        assert not task_backends["default"].supports_get_result
        result = work.add.enqueue(1)
        with pytest.raises(NotImplementedError, match="RETENTION"):
            result.refresh()
        by_hand.deliver()
    assert not by_hand.rows.exists()


def test_a_wrong_option_is_named() -> None:
    """It is an error when the backend is first used."""
    for options, text in (
        ({"outbx": True}, r"has \['outbx'\], but takes only \['outbox', 'using'\]"),
        ({"using": "replica2"}, "'replica2' names a database that DATABASES does not have"),
    ):
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


def test_a_function_that_no_worker_could_import_is_refused(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name, or is of a script: a worker's own __main__ has no such function."""

    def function() -> None:
        """Do nothing."""

    for module, name in (("__main__", "script"), (__name__, "<lambda>")):
        monkeypatch.setattr(function, "__module__", module)
        monkeypatch.setattr(function, "__name__", name)
        monkeypatch.setattr(function, "__qualname__", name)
        with pytest.raises(InvalidTask, match=rf"No worker could import .*'{module}\.{name}'"):
            replace(work.add, func=function)


def test_without_use_tz_all_moments_are_naive(by_hand: ByHand) -> None:
    """A result's are local, as with Django's own backends; run_after, the ETA, is so too."""
    moment = datetime.now(UTC).replace(tzinfo=None, microsecond=0) + timedelta(minutes=5)
    with override_settings(USE_TZ=False, TIME_ZONE="UTC"):
        later = work.add.using(run_after=moment)
        result = later.enqueue(1)
        eta = datetime.fromisoformat(by_hand.take().headers["eta"])
        assert eta == moment.replace(tzinfo=UTC)
        assert work.add.get_result(result.id).task == later
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        result = by_hand.enqueue_and_run(work.add, 1)
        assert result.started_at.tzinfo is None
        assert result.enqueued_at <= result.started_at <= timezone.now()
        assert timezone.now() - result.enqueued_at < timedelta(minutes=5)


def test_a_retry_is_another_attempt(by_hand: ByHand) -> None:
    """The task is ready again; of the workers of earlier attempts only the number is kept."""
    work.attempts.clear()
    result = work.try_again.enqueue(2)
    with hearing(*SIGNALS) as heard:
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
    assert [one["signal"] for one in heard] == [signals.task_started] * 3 + [signals.task_finished]


def test_a_task_may_run_eagerly(by_hand: ByHand) -> None:
    """With ``task_always_eager``, at the commit; there is no row, and so no result."""
    by_hand.mailbox.app.conf.task_always_eager = True
    with hearing(*SIGNALS) as heard:
        with transaction.atomic(using=by_hand.alias):
            result = work.describe_context.enqueue("room")
            assert heard == []
        assert {one["signal"] for one in heard} == set(SIGNALS)
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()


def test_an_app_that_is_finalized_gets_a_new_task(by_hand: ByHand) -> None:
    """As one does whose tasks are defined before."""
    by_hand.mailbox.app.finalize()
    assert by_hand.enqueue_and_run(task(work.double), 2).return_value == 4
