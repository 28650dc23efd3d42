"""
Tasks that kill their processes, on real workers, and whose messages the broker delivers again.

Both brokers say of such a message that it is redelivered; the deaths are counted in Redis.
"""

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_celery_safe import TaskPoisoned, iter_locks
from django_celery_safe.leases.holder import HOST
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer, Server
from tests.worker import deadly_tasks as tasks
from tests.worker.brokers import app_on_broker, result_state
from tests.worker.rooms import Room

#: Seconds until something must have happened for which leases of 2 s have to be over.
PATIENCE = 60


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def broker(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Server]:
    """Either broker, with results and locks in the private Redis."""
    broker: Server = request.getfixturevalue(f"{request.param}_server")
    with app_on_broker(broker, redis_server, LOCK_TIMEOUT=2):
        yield broker
        gc.collect()  # Results unsubscribe when they go.


def make_worker(queue: str, **settings: Any) -> CeleryWorker:
    """Return a worker with two children, not yet started."""
    arguments = ["--include", tasks.__name__, "--queues", queue]
    return CeleryWorker("tests.app", concurrency=2, arguments=arguments, settings=settings)


@pytest.fixture(scope="module")
def worker(broker: Server) -> Iterator[CeleryWorker]:
    """A worker with two children."""
    with make_worker("celery") as worker:
        yield worker


def fail(task: Any, room: Room, worker: CeleryWorker) -> tuple[str, BaseException]:
    """Send a task to a room, and wait until it has failed; return its id and its error."""
    result = task.delay(room.path)
    state = f"it is not failed\n{worker.log}"
    room.until(lambda: result_state(result.id) == "FAILURE", state, PATIENCE)
    return result.id, result.result


@pytest.mark.parametrize("task", [tasks.poison, tasks.leave], ids=["killed", "exits"])
def test_poison_ends_and_harms_no_other_task(
    task: Any, room: Room, tmp_path: Path, worker: CeleryWorker
) -> None:
    """After max_deaths it fails with TaskPoisoned and is acknowledged; the others are done."""
    other = Room(tmp_path / "other")
    other.folder.mkdir()
    before = [tasks.note.delay(other.path).id for _ in range(5)]
    task_id, error = fail(task, room, worker)
    after = [tasks.note.delay(other.path).id for _ in range(5)]
    assert isinstance(error, TaskPoisoned), error
    assert len(room.runs()) == 2
    last = room.runs()[-1]["pid"]
    text = f"2 process(es) died in {task.name}[{task_id}], the last one process {last} on "
    assert text + HOST in str(error)
    for one in before + after:
        wait_for(lambda one=one: result_state(one) == "SUCCESS", PATIENCE)
        assert len(other.runs(one)) == 1
    said = re.findall(rf"ERROR.*{task_id}\] is not run again: TaskPoisoned", worker.log)
    assert len(said) == 1, worker.log
    assert len(room.runs()) == 2


@pytest.mark.long
@pytest.mark.usefixtures("broker")
def test_a_worker_that_is_told_to_end(room: Room) -> None:
    """A cold shutdown kills its children, which is no death of their tasks."""
    result = tasks.stay.apply_async((room.path,), queue="cold")
    with make_worker("cold") as worker:
        room.until(room.runs, "it does not run", PATIENCE)
        os.kill(worker.pid, signal.SIGQUIT)
        wait_for(lambda: not worker.running, PATIENCE)
    assert not list(iter_locks(f"{tasks.stay.name}:death:"))
    room.open()
    with make_worker("cold"):
        room.until(lambda: result_state(result.id) == "SUCCESS", "it is not done", PATIENCE)
