"""A task of Django on a real worker that is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Journal, wait_for
from tests.tasks_backend import work
from tests.tasks_backend.scenes import PATIENCE, Scene
from tests.worker.relaying import relaying


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Return the runs that began in a room."""
    return Journal(folder / "journal").entries("ran")


def until_runs(folder: Path, number: int) -> dict[str, Any]:
    """Wait until so many runs began in a room; return the last."""
    wait_for(lambda: len(runs_in(folder)) >= number, PATIENCE, f"{number} runs")
    return runs_in(folder)[-1]


@pytest.mark.usefixtures("worker")
def test_a_killed_process_is_followed_by_one_more_run(scene: Scene, tmp_path: Path) -> None:
    """The task succeeds in its second attempt, by another process."""
    with relaying(scene.alias):
        result = work.stay.enqueue(str(tmp_path))
        first = until_runs(tmp_path, 1)
        os.kill(first["pid"], signal.SIGKILL)
        second = until_runs(tmp_path, 2)
        (tmp_path / "gate").touch()
        scene.until_finished(result)
    assert result.return_value == 2
    assert [one["attempt"] for one in runs_in(tmp_path)] == [1, 2]
    assert result.worker_ids[0] == "unknown"
    assert result.worker_ids[1].endswith(f":{second['pid']}")
