"""
Resumable tasks on real workers: children that are killed, and workers that shut down.

The rows are in PostgreSQL, a relay runs in a process of its own, and leases are 2 s.
"""

import os
import signal

import pytest
from django.test import override_settings

from tests.app.celery import tell_workers
from tests.app.models import Person
from tests.processes import wait_for
from tests.resuming.loops import EACH_ONCE, fill, written
from tests.worker import carried_tasks as tasks
from tests.worker.rooms import Room
from tests.worker.test_carried import PATIENCE, Scene, deaths
from tests.worker.test_carried import relay as relay
from tests.worker.test_carried import scene as scene


@pytest.fixture(autouse=True)
def _rows(scene: Scene) -> None:
    """Begin each test with an empty outbox, and ten rows to which nothing was written."""
    scene.rows.all().delete()
    Person.everyone.using(scene.alias).all().delete()
    fill(scene.alias)


def begin(scene: Scene, room: Room, queue: str) -> str:
    """Send the task; return its id when it has one chunk, and is in the second one."""
    task_id = scene.send(tasks.walk, room, queue=queue)
    room.until(lambda: room.journal.entries("there"), "it is not there", PATIENCE)
    return task_id


@pytest.mark.usefixtures("relay")
def test_a_killed_child_loses_its_open_chunk(scene: Scene, room: Room) -> None:
    """Each row is written to once; three deaths with a chunk between them are none too many."""
    with scene.worker("killed", size=1):
        task_id = begin(scene, room, "killed")
        room.kill_run()
        room.until(lambda: len(room.journal.entries("there")) == 2, "not again", PATIENCE)
        assert sum(written(scene.alias).values()) == 3
        assert scene.row(task_id).progress == "3/10"
        room.open()
        scene.until(task_id, "gone", room)
    assert written(scene.alias) == EACH_ONCE
    assert deaths(room) == [0, 1]


#: What a worker is sent, and what its log says once its tasks are told.
SHUTDOWNS = {
    "warm": (signal.SIGTERM, "told to shut down"),
    "soft": (signal.SIGQUIT, "Initiating Soft Shutdown"),
}


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("prefork", "warm"),
        ("prefork", "soft"),
        pytest.param("prefork", "remote", marks=pytest.mark.long),
        pytest.param("solo", "warm", marks=pytest.mark.long),
        pytest.param("threads", "warm", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_shuts_down_hands_over(scene: Scene, room: Room, pool: str, how: str) -> None:
    """The task ends behind its open chunk, without a death, and another worker does the rest."""
    queue = f"{pool}-{how}"
    soft = override_settings(CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT=5)
    with soft, scene.worker(queue, pool, 1) as first:
        task_id = begin(scene, room, queue)
        if how == "remote":
            tell_workers("shutdown")
            wait_for(lambda: "Got shutdown from remote" in first.log, PATIENCE)
        else:
            number, said = SHUTDOWNS[how]
            os.kill(first.pid, number)
            wait_for(lambda: said in first.log, PATIENCE)
        room.open()
        wait_for(lambda: not first.running, PATIENCE)
    row = scene.row(task_id)
    assert row.state in ("pending", "sent")
    # Until it has closed its connection, the same worker may take the message once more.
    assert row.progress in ("6/10", "9/10")
    with scene.worker(queue, pool, 1):
        scene.until(task_id, "gone", room)
    assert written(scene.alias) == EACH_ONCE
    assert {*deaths(room)} == {0}
