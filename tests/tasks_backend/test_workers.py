"""Tasks of Django on real workers that are killed, know nothing yet, or have priorities."""

import os
import signal
from pathlib import Path
from typing import Any

import celery
import pytest
from celery.exceptions import TimeLimitExceeded
from django.tasks import TaskResultStatus
from django.tasks.exceptions import InvalidTask
from django.test import override_settings

from django_celery_safe import TaskPoisoned
from tests.app.celery import app
from tests.app.late import multiply
from tests.processes import Gauge, Journal, wait_for
from tests.servers import RabbitMQServer
from tests.tasks_backend import work
from tests.tasks_backend.scenes import PATIENCE, Scene, tasks_setting


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Return the runs that began in a room."""
    return Journal(folder / "journal").entries("ran")


def until_runs(folder: Path, number: int) -> dict[str, Any]:
    """Wait until so many runs began in a room; return the last."""
    wait_for(lambda: len(runs_in(folder)) >= number, PATIENCE, f"{number} runs")
    return runs_in(folder)[-1]


@pytest.mark.usefixtures("worker", "relay")
def test_a_killed_process_is_followed_by_one_more_run(scene: Scene, tmp_path: Path) -> None:
    """The task succeeds in its second attempt, by another process."""
    result = work.stay.enqueue(str(tmp_path))
    first = until_runs(tmp_path, 1)
    os.kill(first["pid"], signal.SIGKILL)
    second = until_runs(tmp_path, 2)
    (tmp_path / "gate").touch()
    scene.until_finished(result)
    assert result.return_value == 2
    assert [one["attempt"] for one in runs_in(tmp_path)] == [1, 2]
    assert [one.rpartition(":")[2] for one in result.worker_ids] == [
        str(one["pid"]) for one in (first, second)
    ]


@pytest.mark.parametrize("task", [work.die, work.leave], ids=["killed", "exit"])
@pytest.mark.usefixtures("worker", "relay")
def test_a_task_that_ends_its_process_fails(scene: Scene, task: Any) -> None:
    """After as many deaths as MAX_DEATHS says, with an error that names the last of them."""
    result = scene.until_finished(task.enqueue())
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class is TaskPoisoned
    assert result.attempts == 3  # a delivery that is refused is no attempt


@pytest.mark.usefixtures("worker", "relay")
def test_options_of_celery_are_those_of_a_path(scene: Scene, tmp_path: Path) -> None:
    """CELERY_TASK_ANNOTATIONS gives a task of Django a time limit, for one."""
    annotations = {work.stay.module_path: {"time_limit": 1}}
    with (
        override_settings(CELERY_TASK_ANNOTATIONS=annotations),
        scene.worker("limited") as worker,
    ):
        result = work.stay.using(queue_name="limited").enqueue(str(tmp_path))
        scene.until_finished(result)
        assert result.errors[0].exception_class is TimeLimitExceeded
        if celery.VERSION >= (5, 7):  # before it nothing of a task runs in the main process
            wait_for(lambda: "state=FAILED" in worker.log, PATIENCE)  # by task_finished


@pytest.mark.usefixtures("worker")
def test_a_module_is_imported_when_its_first_message_comes(scene: Scene) -> None:
    """By the worker and its children, which have not imported it at their start."""
    results = [multiply.enqueue(number, 7) for number in range(6)]
    assert [scene.until_finished(one).return_value for one in results] == [
        number * 7 for number in range(6)
    ]


def test_a_worker_imports_no_other_modules(scene: Scene, worker: Any) -> None:
    """A name that is no task of Django, in an installed app, is unknown as any other."""
    for name in ("tests.app.late.PLAIN", "tests.app.gone.add", "this.s", "tests.plans.add"):
        app.send_task(name)
        wait_for(
            lambda: f"unregistered task of type '{name}'" in worker.log,  # noqa: B023
            PATIENCE,
            f"{name} was taken",
        )
    assert scene.until_finished(work.add.enqueue(1)).return_value == 1


def test_a_module_that_fails_on_import_costs_no_worker(scene: Scene, worker: Any) -> None:
    """Its error is logged, its message is that of an unknown task, and the worker goes on."""
    for _ in range(2):
        app.send_task("tests.app.failing.fetch")
    text = "unregistered task of type 'tests.app.failing.fetch'"
    wait_for(lambda: worker.log.count(text) == 2, PATIENCE)
    assert "The task tests.app.failing.fetch can't be imported" in worker.log
    assert "RuntimeError: SHOP_TOKEN is not set" in worker.log
    assert scene.until_finished(work.add.enqueue(1)).return_value == 1


@pytest.mark.usefixtures("worker", "relay")
def test_one_instance_runs_at_a_time(scene: Scene, tmp_path: Path) -> None:
    """One task of a key runs at a time; the others are retried."""
    results = [work.alone.enqueue(str(tmp_path), name) for name in ("a", "b", "c")]
    wait_for(lambda: Gauge(tmp_path).entered(), PATIENCE)
    (tmp_path / "gate").touch()
    for result in results:
        assert scene.until_finished(result).status == TaskResultStatus.SUCCESSFUL
    assert Gauge(tmp_path).highest() == 1
    assert Gauge(tmp_path).entered() == 3


@pytest.mark.parametrize("outbox", [True, False])
@pytest.mark.usefixtures("worker")
def test_a_task_that_is_not_carried_runs(scene: Scene, tmp_path: Path, outbox: bool) -> None:
    """Once, as any task of Celery, whose result backend knows it by its id."""
    with override_settings(TASKS=tasks_setting(scene.alias, outbox=outbox)):
        result = work.note.enqueue(str(tmp_path / "journal"), "once")
        wait_for(lambda: app.AsyncResult(result.id).state == "SUCCESS", PATIENCE)
    assert len(runs_in(tmp_path)) == 1


# Priorities.

PRIORITIES = [-100, 0, -30, 100, 60]
ORDER = [100, 60, 0, -30, -100]


def run_in_order(scene: Scene, folder: Path) -> list[int]:
    """Enqueue tasks before a worker starts; return the priorities in the order of their runs."""
    path = str(folder / "journal")
    tasks = [work.note.using(priority=one, queue_name="ordered") for one in PRIORITIES]
    results = [one.enqueue(path, str(one.priority)) for one in tasks]
    with scene.worker("ordered", concurrency=1, more=["--prefetch-multiplier", "1"]):
        for task, result in zip(tasks, results, strict=True):
            assert scene.until_finished(result).task == task
    return [int(one["name"]) for one in runs_in(folder)]


def test_redis_has_priorities_if_celery_is_told(scene: Scene, tmp_path: Path) -> None:
    """By the option that Celery names for them."""
    with pytest.raises(InvalidTask, match="queue_order_strategy"):
        work.note.using(priority=1)
    options = {"queue_order_strategy": "priority", "priority_steps": list(range(10))}
    with scene.configured(broker_transport_options=options):
        assert run_in_order(scene, tmp_path) == ORDER


@pytest.mark.long
def test_rabbitmq_has_priorities_if_its_queues_do(
    scene: Scene, tmp_path: Path, rabbitmq_server: RabbitMQServer
) -> None:
    """By Celery's setting for all queues."""
    with scene.configured(broker_url=rabbitmq_server.url):
        with pytest.raises(InvalidTask, match="CELERY_TASK_QUEUE_MAX_PRIORITY"):
            work.note.using(priority=1)
        with scene.configured(task_queue_max_priority=10):
            assert run_in_order(scene, tmp_path) == ORDER
