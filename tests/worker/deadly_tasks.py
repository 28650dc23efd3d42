"""Tasks in which processes die, and whose messages the broker delivers again, for workers."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask
from tests.processes import wait_for
from tests.worker.rooms import Room

LATE: dict[str, Any] = {
    "base": SafeTask, "bind": True, "acks_late": True, "reject_on_worker_lost": True,
}  # fmt: skip
#: Deaths after which the tasks of this module would end well.
MOST = 4


def enter(task: Any, room: str) -> Room:
    """Note a run, and return the room."""
    place = Room(Path(room))
    place.note("started", task)
    return place


def die(task: Any, room: str) -> None:
    """Note a run and kill its process, but for one that comes after many others."""
    if len(enter(task, room).runs(task.request.id)) <= MOST:
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(**LATE)
def note(self: Any, room: str) -> None:
    """Note that it ran."""
    enter(self, room)


@shared_task(**LATE, max_deaths=2, autoretry_for=(Exception,), default_retry_delay=0)
def poison(self: Any, room: str) -> None:
    """Kill its process."""
    die(self, room)


@shared_task(**LATE, max_deaths=2)
def leave(self: Any, room: str) -> None:
    """End its process."""
    if len(enter(self, room).runs(self.request.id)) <= MOST:
        sys.exit(1)


@shared_task(**LATE)
def stay(self: Any, room: str) -> None:
    """Stay in the room until its gate opens."""
    wait_for((enter(self, room).folder / "gate").exists, 60)
