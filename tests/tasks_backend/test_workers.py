"""Tasks of Django on real workers that are killed, or know nothing yet."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.app.celery import app
from tests.app.late import multiply
from tests.processes import Journal, wait_for
from tests.tasks_backend import work
from tests.tasks_backend.scenes import PATIENCE, Scene


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


@pytest.mark.usefixtures("worker")
def test_a_module_is_imported_when_its_first_message_comes(scene: Scene) -> None:
    """By the worker and its children, which have not imported it at their start."""
    results = [multiply.enqueue(number, 7) for number in range(6)]
    assert [scene.until_finished(one).return_value for one in results] == [
        number * 7 for number in range(6)
    ]


def test_a_worker_imports_no_other_modules(scene: Scene, worker: Any) -> None:
    """
    A name that is no task of Django, in an installed app, is unknown as any other.

    So is one whose module fails on import; the error is logged, and the worker goes on.
    """
    failing = "tests.app.failing.fetch"
    for name in ("tests.app.late.PLAIN", "tests.app.gone.add", "tests.plans.add", failing, failing):
        seen = worker.log.count(text := f"unregistered task of type '{name}'")
        app.send_task(name)
        wait_for(lambda: worker.log.count(text) > seen, PATIENCE, f"{name} was taken")  # noqa: B023
    assert f"The task {failing} can't be imported" in worker.log
    assert "RuntimeError: SHOP_TOKEN is not set" in worker.log
    assert scene.until_finished(work.add.enqueue(1)).return_value == 1
