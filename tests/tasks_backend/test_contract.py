"""
Django's expectations of a backend, on real workers, of which one is killed.

The expectations are those of its pages docs/topics/tasks.txt and docs/ref/tasks.txt (6.0 and
6.1), and of its own backends.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.tasks import TaskResultStatus, default_task_backend

from tests.processes import Journal, wait_for
from tests.tasks_backend import work
from tests.tasks_backend.scenes import PATIENCE, Scene
from tests.worker.relaying import relaying

pytestmark = pytest.mark.usefixtures("worker")


def test_a_task_is_enqueued_and_run(scene: Scene) -> None:
    """Its result is ready at first, and has all that Django names in the end."""
    result = work.add.enqueue(1, y=2)
    assert result.status == TaskResultStatus.READY
    assert not result.is_finished
    assert (result.args, result.kwargs) == ([1], {"y": 2})
    assert result.enqueued_at is not None
    assert (result.started_at, result.finished_at, result.attempts) == (None, None, 0)
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
    scene.until_finished(result)
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == 3
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert (result.task, result.args, result.kwargs) == (work.add, [1], {"y": 2})
    assert result.backend == "default"
    assert result.errors == []
    assert result.attempts == len(result.worker_ids) == 1
    failed = scene.until_finished(work.decline.enqueue("no such card"))
    assert failed.status == TaskResultStatus.FAILED
    with pytest.raises(ValueError, match="Task failed"):
        _ = failed.return_value
    assert failed.errors[0].traceback.startswith("Traceback (most recent call last):")


def test_the_methods_for_async_code_do_the_same(scene: Scene) -> None:
    """``aenqueue``, ``aget_result`` and ``arefresh`` are there, for both kinds of functions."""

    async def use(task: Any) -> Any:
        result = await task.aenqueue(20, y=22)
        while not result.is_finished:
            await asyncio.sleep(0.05)
            await result.arefresh()
        again = await task.aget_result(result.id)
        assert again == await default_task_backend.aget_result(result.id)
        return again.return_value

    async def use_both() -> list[Any]:
        values = [await use(task) for task in (work.add, work.add_async)]
        await sync_to_async(lambda: connections[scene.alias].close())()  # its thread's
        return values

    assert asyncio.run(asyncio.wait_for(use_both(), 40)) == [42, 42]


def test_the_context_is_that_of_the_run(scene: Scene, tmp_path: Path) -> None:
    """It has the result, which is running, and the number of the attempt."""
    queue = work.describe_context.using(queue_name="mails")
    result = scene.until_finished(queue.enqueue(room=str(tmp_path)))
    assert result.return_value == [1, result.id, "RUNNING", "mails", result.worker_ids, True]
    assert result.task == queue


def test_a_killed_process_is_followed_by_one_more_run(scene: Scene, tmp_path: Path) -> None:
    """The task succeeds in its second attempt, by another process."""
    journal = Journal(tmp_path / "journal")

    def until_runs(number: int) -> dict[str, Any]:
        wait_for(lambda: len(journal.entries("ran")) >= number, PATIENCE, f"{number} runs")
        return journal.entries("ran")[-1]

    with relaying(scene.alias):
        result = work.stay.enqueue(str(tmp_path))
        os.kill(until_runs(1)["pid"], signal.SIGKILL)
        second = until_runs(2)
        (tmp_path / "gate").touch()
        scene.until_finished(result)
    assert result.return_value == 2
    assert [one["attempt"] for one in journal.entries("ran")] == [1, 2]
    assert result.worker_ids[0] == "unknown"
    assert result.worker_ids[1].endswith(f":{second['pid']}")
