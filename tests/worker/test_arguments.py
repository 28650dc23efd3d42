"""A lock shows the arguments of the task that holds it, on a real prefork worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.test import override_settings

from django_celery_safe import HeldLock, iter_locks
from tests.app.celery import app
from tests.conftest import app_on_redis
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.worker import complaint_tasks, tasks
from tests.worker.rooms import Room

HIDDEN: dict[str, Any] = {"argsrepr": "('***',)", "kwargsrepr": "{}"}


@contextmanager
def working(server: RedisServer, **ours: Any) -> Iterator[None]:
    """Run a worker whose locks, broker and results are in Redis, with these settings of ours."""
    include = ["--include", complaint_tasks.__name__]
    with (
        app_on_redis(server),
        override_settings(DJANGO_CELERY_SAFE=ours),
        CeleryWorker("tests.app", concurrency=3, arguments=include),
    ):
        yield


@pytest.fixture
def worker(redis_server: RedisServer) -> Iterator[None]:
    """A worker with the settings as they come."""
    with working(redis_server):
        yield


def locks_of(task_id: str) -> list[HeldLock]:
    """Return the locks that a task of this id holds."""
    return [lock for lock in iter_locks() if lock.holder.task_id == task_id]


def arguments_of(task_id: str) -> set[str | None]:
    """Return what the locks of a task of this id tell of its arguments."""
    return {lock.holder.arguments for lock in locks_of(task_id)}


@pytest.mark.usefixtures("worker")
def test_a_run_and_its_message_show_their_arguments(room: Room) -> None:
    """The lock of a run and that of its message show what Celery shows of the call."""
    result = complaint_tasks.export.delay(room.path)
    room.until(lambda: room.runs(result.id), "it did not start")
    run, message = sorted(locks_of(result.id), key=lambda lock: lock.name.startswith("sent:"))
    assert message.name == f"sent:{run.name}"
    assert run.holder.arguments == message.holder.arguments == str((room.path,))
    assert run.holder.lease == 30.0
    room.open()
    result.get(timeout=20)


@pytest.mark.usefixtures("worker")
def test_what_is_redacted_stays_so(room: Room) -> None:
    """A message's own argsrepr is shown, also by the copy that comes back after a conflict."""
    first = tasks.returning.apply_async((room.path,), **HIDDEN)
    room.until(lambda: room.runs(first.id), "the first did not start")
    assert arguments_of(first.id) == {"('***',)"}
    second = tasks.returning.apply_async((room.path,), **HIDDEN)
    room.until(lambda: room.tries(second.id) > 2, "the second did not come back")
    app.control.revoke(first.id, terminate=True)
    room.until(lambda: room.runs(second.id), "the second did not start")
    assert arguments_of(second.id) == {"('***',)"}
    room.open()
    second.get(timeout=20)


def test_nothing_is_written_with_show_arguments_off(redis_server: RedisServer, room: Room) -> None:
    """With SHOW_ARGUMENTS off the arguments are in neither lock's value at all."""
    with working(redis_server, SHOW_ARGUMENTS=False):
        result = complaint_tasks.export.delay(room.path)
        room.until(lambda: room.runs(result.id), "it did not start")
        with override_settings(DJANGO_CELERY_SAFE={}):
            assert len(locks_of(result.id)) == 2
            assert arguments_of(result.id) == {None}
        room.open()
        result.get(timeout=20)
