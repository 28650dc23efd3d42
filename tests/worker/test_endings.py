"""
Runs that were killed, and messages that never run: the worker frees their locks.

Leases are 30 s and an hour, so what is seen to be free before that was freed.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from celery import shared_task
from celery.signals import worker_process_shutdown
from django.db import connections
from pytest_django import Settings

from django_celery_safe import SafeTask, iter_locks, single_instance
from tests.app.celery import app, tell_workers
from tests.conftest import app_on_redis
from tests.idempotency.test_flags_race import end_sessions
from tests.processes import CeleryWorker, wait_for
from tests.servers import PostgresServer, RedisServer
from tests.settings import INSTALLED_APPS
from tests.worker.ending_tasks import asked, bare_app
from tests.worker.rooms import Room

#: A worker's apps, none of which has tasks; the admin is there for the tests' URLs.
WITHOUT_TASKS = [app for app in INSTALLED_APPS if app != "tests.app"]
#: Seconds until what happens at once must have happened; far less than any lease.
SOON = 15
#: Names the environment variable with the file whose presence lets a worker's children go.
KEEPS_CHILDREN = "SAFE_KEEPS_CHILDREN"


@shared_task(base=SafeTask, bind=True, acks_late=True)
@single_instance(key="{room}", unique_until="end")
def late(self: Any, room: str) -> Any:
    """Stay in the room; not known to workers that do not import this module."""
    return Room(Path(room)).stay(self)


@pytest.fixture(scope="module", autouse=True)
def services(redis_server: RedisServer) -> Iterator[None]:
    """Locks, broker (database 1) and results (2) are in the private Redis."""
    with app_on_redis(redis_server):
        yield
        gc.collect()  # Results unsubscribe when they go.


def locks_in(room: Room) -> list[str]:
    """Return the names of all locks with this room in their key."""
    return [lock.name for lock in iter_locks() if room.path in lock.name]


# A message that no child of the pool took up.


@worker_process_shutdown.connect
def keep_a_recycled_child(**kwargs: Any) -> None:
    """Let a child that has run its last task stay until the test lets it go."""
    if kept := os.environ.get(KEEPS_CHILDREN):
        with suppress(TimeoutError):
            wait_for(Path(kept).exists, SOON)


@pytest.mark.long
def test_a_message_given_to_a_child_that_ends_frees_its_lock_when_revoked(
    room: Room, tmp_path: Path
) -> None:
    """No process ran it, so there is none whose death would have to be waited for."""
    before, gone = Room(tmp_path / "before"), tmp_path / "child may go"
    before.folder.mkdir()
    before.open()
    with ExitStack() as stack:
        stack.callback(gone.touch)
        worker = CeleryWorker(
            "tests.app",
            concurrency=1,
            arguments=["--include", __name__, "--queues", "recycled", "--max-tasks-per-child=1"],
            env={KEEPS_CHILDREN: str(gone)},
        )
        stack.enter_context(worker)
        first = late.apply_async((before.path,), queue="recycled")
        assert first.get(timeout=SOON)
        result = late.apply_async((room.path,), queue="recycled")
        wait_for(lambda: f"[{result.id}] received" in worker.log, SOON)
        tell_workers("revoke", result.id, reply=True, limit=1)
        gone.touch()
        wait_for(lambda: result.state == "REVOKED", SOON, "it was not revoked")
        room.until(lambda: locks_in(room) == [], "its lock is held", SOON)
        assert room.runs() == []


# A worker that has no single-instance task.


def start_bare(queue: str) -> CeleryWorker:
    """Return a worker with a queue of its own, of a project without ``@single_instance``."""
    return CeleryWorker(
        "tests.worker.ending_tasks:bare_app",
        concurrency=1,
        arguments=["--queues", queue],
        settings={"INSTALLED_APPS": WITHOUT_TASKS},
    )


def test_a_worker_without_such_a_task_frees_locks(room: Room) -> None:
    """That of a message that it does not know, and of a killed run that one call asked for."""
    with start_bare("bare"):
        first = late.apply_async((room.path,), queue="bare")
        wait_for(lambda: app.AsyncResult(first.id).state == "FAILURE", SOON)
        room.until(lambda: locks_in(room) == [], "its lock is held", SOON)
        options = {"queue": "bare", "single_instance": {"key": room.path}}
        with app.connection_for_write() as connection:
            result = asked.apply_async((room.path,), connection=connection, **options)
        room.until(room.runs, "it does not run")
        assert locks_in(room) == [f"{asked.name}:{room.path}"]
        room.kill_run()
        wait_for(lambda: bare_app.AsyncResult(result.id).state == "FAILURE", SOON)
        room.until(lambda: locks_in(room) == [], "its lock is held", SOON)


# Locks in a database.


@pytest.mark.long
def test_the_worker_keeps_no_connection_to_the_locks_database(
    services: None,
    postgres_server: PostgresServer,
    postgres_alias: str,
    tmp_path: Path,
    settings: Settings,
) -> None:
    """The worker closes its connections after a release, and survives if the server ends one."""
    name = connections.settings[postgres_alias]["NAME"]
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}  # type: ignore[arg-type]
    with start_bare("database"):
        for time_around in range(2):
            for number in range(8):
                late.apply_async((f"{tmp_path} {time_around} {number}",), queue="database")
            wait_for(lambda: list(iter_locks()) == [], SOON, "locks are held")
            connections[postgres_alias].close()
            wait_for(lambda: not postgres_server.sessions(name), SOON, "connections are open")
            end_sessions(postgres_server, postgres_alias)
