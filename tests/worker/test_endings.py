"""
Runs that were killed, and messages that never run: the worker frees their locks.

Leases are 30 s and an hour, so what is seen to be free before that was freed.
"""

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from celery import shared_task
from celery.signals import worker_process_shutdown
from django.db import connections
from pytest_django import Settings

from django_celery_safe import HeldLock, SafeTask, find_lock, iter_locks, single_instance
from django_celery_safe.delivery.header import HEADER
from tests.app.celery import app, tell_workers
from tests.concurrency.holders import remaining
from tests.conftest import LOOKING_OFTEN, app_on_redis
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer
from tests.settings import INSTALLED_APPS
from tests.worker.ending_tasks import asked, bare_app
from tests.worker.rooms import Room

#: A worker's apps, none of which has tasks; the admin is there for the tests' URLs.
WITHOUT_TASKS = [app for app in INSTALLED_APPS if app != "tests.app"]
#: Seconds until what happens at once must have happened; far less than any lease.
SOON = 15
#: Seconds that something may take which has a lease of 2 s to wait for.
PATIENCE = 30
#: Countdown of a retry that is not to come while the test looks, s.
COUNTDOWN = 600
#: After so many seconds the broker of ``impatient`` delivers again what runs.
VISIBILITY_TIMEOUT = 4
#: Names the environment variable with the file whose presence lets a worker's children go.
KEEPS_CHILDREN = "SAFE_KEEPS_CHILDREN"


def make_task(name: str, lock: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a task that is sent once for each room, and stays there."""

    @shared_task(base=SafeTask, bind=True, name=f"{__name__}.{name}", **options)
    @single_instance(key="{room}", unique_until="end", **(lock or {}))
    def staying(self: Any, room: str) -> Any:
        return Room(Path(room)).stay(self)

    return staying


lost = make_task("lost", retry_on_worker_lost=True, default_retry_delay=1)
lost_later = make_task("lost_later", retry_on_worker_lost=True, default_retry_delay=COUNTDOWN)
late = make_task("late", acks_late=True)


@shared_task(base=SafeTask, bind=True, acks_late=True, reject_on_worker_lost=True)
@single_instance(key="{room}", unique_until="end", timeout=2)
def long(self: Any, room: str) -> None:
    """Stay for longer than the broker's patience in each run; less if the gate is open."""
    place = Room(Path(room))
    with place.entered(self), suppress(TimeoutError):
        wait_for((place.folder / "gate").exists, VISIBILITY_TIMEOUT + 8)


#: Not known to workers that do not import this module.
unknown = make_task("unknown")


@pytest.fixture(scope="module", autouse=True)
def services(redis_server: RedisServer) -> Iterator[None]:
    """Locks, broker (database 1) and results (2) are in the private Redis."""
    with app_on_redis(redis_server):
        yield
        gc.collect()  # Results unsubscribe when they go.


def start(stack: ExitStack, *arguments: str, **settings: Any) -> CeleryWorker:
    """Start a worker that knows the tasks of this module."""
    worker = CeleryWorker(
        "tests.app",
        concurrency=4,
        arguments=["--include", __name__, *arguments],
        settings=settings,
    )
    return stack.enter_context(worker)


@pytest.fixture(scope="module")
def worker(services: None) -> Iterator[CeleryWorker]:
    """A worker whose broker delivers once."""
    with ExitStack() as stack:
        yield start(stack)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    """A room for this test alone, open in the end."""
    room = Room(tmp_path)
    yield room
    room.open()


def run_lock(task: Any, key: str) -> HeldLock | None:
    """Return the lock of a run."""
    return find_lock(f"{task.name}:{key}")


def sent_lock(task: Any, key: str) -> HeldLock:
    """Return the lock of a message."""
    lock = find_lock(f"sent:{task.name}:{key}")
    assert lock is not None
    return lock


def kill_run(room: Room) -> int:
    """Wait for a run in the room, and end its process; return that."""
    room.until(room.runs, "it does not run")
    pid: int = room.runs()[-1]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


# Celery sends a lost run again.


@pytest.mark.long
@pytest.mark.parametrize("call", [{}, {"on_conflict": "raise", "timeout": 100}], ids=str)
def test_the_retry_of_a_lost_run_is_that_message(
    call: dict[str, Any], room: Room, worker: CeleryWorker
) -> None:
    """It has key, options and lock of its message, and runs once."""
    key, options = room.path, {}
    if call:
        key = f"asked for {room.path}"
        options = {"single_instance": {**call, "key": key}}
    result = lost.apply_async((room.path,), **options)
    token = sent_lock(lost, key).token
    first = kill_run(room)
    room.until(lambda: len(room.runs()) == 2, "it was not sent again")
    run = run_lock(lost, key)
    assert run is not None
    assert run.holder.pid != first
    assert run.holder.task_id == result.id
    assert (remaining(run) > 50) is bool(call)
    assert sent_lock(lost, key).token == token
    assert lost.apply_async((room.path,), **options).id == result.id
    room.open()
    assert result.get(timeout=SOON) == [result.id, 1]
    room.until(lambda: locks_in(room) == [], "locks are left over")
    assert [run["retries"] for run in room.runs()] == [0, 1]


def locks_in(room: Room) -> list[str]:
    """Return the names of all locks with this room in their key."""
    return [lock.name for lock in iter_locks() if room.path in lock.name]


@pytest.mark.long
def test_a_lost_run_that_is_sent_again_frees_its_own_lock(room: Room, worker: CeleryWorker) -> None:
    """At once, while the message keeps the other for as long as it waits."""
    result = lost_later.delay(room.path)
    kill_run(room)
    room.until(lambda: run_lock(lost_later, room.path) is None, "its run's lock is held", SOON)

    def waits() -> bool:
        return remaining(sent_lock(lost_later, room.path)) > 3500 + COUNTDOWN

    room.until(waits, "the message's lock does not last", SOON)
    assert lost_later.delay(room.path).id == result.id
    assert len(room.runs()) == 1


# A message that no child of the pool took up.


@worker_process_shutdown.connect
def keep_a_recycled_child(**kwargs: Any) -> None:
    """Let a child that has run its last task stay until the test lets it go."""
    if kept := os.environ.get(KEEPS_CHILDREN):
        with suppress(TimeoutError):
            wait_for(Path(kept).exists, PATIENCE)


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


def held_for(room: Room, task_id: str) -> list[HeldLock]:
    """Return the locks of a room's task and of a message; the deaths that are counted stay."""
    found = [lock for lock in iter_locks() if task_id in lock.name or room.path in lock.name]
    return [lock for lock in found if f":death:{task_id}:" not in lock.name]


# Two deliveries of one message.


def test_of_two_deliveries_the_others_lock_is_kept(room: Room, worker: CeleryWorker) -> None:
    """The killed run's lock is free at once; the message's is the other's, which is to run."""
    result = late.delay(room.path)
    room.until(room.runs, "it does not run")
    token = sent_lock(late, room.path).token
    again = {
        "task_id": result.id,
        "headers": {HEADER: {"task": late.name, "key": room.path, "sent": token}},
    }
    app.send_task(late.name, (room.path,), countdown=COUNTDOWN, **again)
    received = f"[{result.id}] received"
    wait_for(lambda: worker.log.count(received) == 2, SOON, "the second was not delivered")
    kill_run(room)
    room.until(lambda: run_lock(late, room.path) is None, "its lock is held", SOON)
    ends_at = time.monotonic() + 1
    while time.monotonic() < ends_at:
        assert sent_lock(late, room.path).token == token
        time.sleep(0.05)
    assert late.delay(room.path).id == result.id
    assert len(room.runs()) == 1
    tell_workers("revoke", result.id, reply=True, limit=1)


# A run that is longer than the broker waits for it.


class Impatient:
    """A worker whose broker delivers again what runs for more than a few seconds."""

    def __init__(self, worker: CeleryWorker, server: RedisServer) -> None:
        self.worker, self.server = worker, server

    def send(self, task: Any, room: Room) -> Any:
        """Send a task to this worker."""
        with app.connection_for_write(self.server.database_url(3)) as connection:
            return task.apply_async((room.path,), connection=connection)

    def has_nothing(self) -> bool:
        """Tell whether no message is left: in the queue, given out, or on its way between."""
        ends_at = time.monotonic() + 1
        with self.server.client(db=3) as client:
            while time.monotonic() < ends_at:
                if client.exists("celery", "unacked", "unacked_index"):
                    return False
                time.sleep(0.02)
        return True


@pytest.fixture(scope="module")
def impatient(services: None, redis_server: RedisServer) -> Iterator[Impatient]:
    """A worker with a broker of its own, which looks for what is late twice a second."""
    options = {"visibility_timeout": VISIBILITY_TIMEOUT, **LOOKING_OFTEN}
    with ExitStack() as stack:
        worker = start(
            stack,
            CELERY_BROKER_URL=redis_server.database_url(3),
            CELERY_BROKER_TRANSPORT_OPTIONS=options,
        )
        yield Impatient(worker, redis_server)


def deaths_of(task_id: str) -> list[str]:
    """Return the names of the markers of deaths in a task."""
    return [lock.name for lock in iter_locks() if f":death:{task_id}:" in lock.name]


@pytest.mark.long
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_run_longer_than_the_brokers_patience_ends(
    ends: str, room: Room, impatient: Impatient
) -> None:
    """Delivered again while it runs, it runs twice at the most; killed, it runs again."""
    result = impatient.send(long, room)
    announced = f"{long.name}[{result.id}] was delivered while "
    room.until(lambda: announced in impatient.worker.log, "it was not delivered again", PATIENCE)
    assert len(room.runs()) == 1
    if ends == "killed":
        kill_run(room)
        room.until(lambda: len(room.runs()) >= 2, "it does not run again", PATIENCE)
        room.open()
    assert wait_for(lambda: app.AsyncResult(result.id).state == "SUCCESS", PATIENCE)
    room.until(impatient.has_nothing, "messages are left over", PATIENCE)
    # A second run may outlive its message, which is dropped if the first run ended by itself.
    room.until(lambda: not held_for(room, result.id), "a lock is held", PATIENCE)
    # Killed, both the broker and the copy may bring it again.
    assert len(room.runs()) <= (3 if ends == "killed" else 2)
    assert room.gauge.violations() == []
    # A worker reports a killed process late, perhaps after the copy has run.
    expected = [f"{long.name}:death:{result.id}:1"] if ends == "killed" else []
    room.until(lambda: deaths_of(result.id) == expected, "the death is not counted", PATIENCE)


# A worker that has no single-instance task.


@pytest.fixture(scope="module")
def bare(services: None) -> Iterator[CeleryWorker]:
    """A worker with a queue of its own, of a project without ``@single_instance``."""
    alone = {"INSTALLED_APPS": WITHOUT_TASKS}
    with CeleryWorker(
        "tests.worker.ending_tasks:bare_app",
        concurrency=1,
        arguments=["--queues", "bare"],
        settings=alone,
    ) as worker:
        yield worker


def test_a_worker_without_such_a_task_frees_an_unknown_message(
    room: Room, bare: CeleryWorker
) -> None:
    """The same task may be sent again."""
    first = unknown.apply_async((room.path,), queue="bare")
    wait_for(lambda: app.AsyncResult(first.id).state == "FAILURE", SOON)
    room.until(lambda: locks_in(room) == [], "its lock is held", SOON)


def test_a_worker_without_such_a_task_frees_what_one_call_asked_for(
    room: Room, bare: CeleryWorker
) -> None:
    """The lock of a killed run is free at once."""
    with app.connection_for_write() as connection:
        result = asked.apply_async(
            (room.path,),
            queue="bare",
            single_instance={"key": room.path},
            connection=connection,
        )
    room.until(room.runs, "it does not run")
    assert locks_in(room) == [f"{asked.name}:{room.path}"]
    kill_run(room)
    wait_for(lambda: bare_app.AsyncResult(result.id).state == "FAILURE", SOON)
    room.until(lambda: locks_in(room) == [], "its lock is held", SOON)


# Locks in a database.


def test_the_worker_keeps_no_connection_to_the_locks_database(
    services: None, postgres_alias: str, tmp_path: Path, settings: Settings
) -> None:
    """The worker closes its connections after a release, and survives if the server ends one."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}  # type: ignore[arg-type]
    bare = CeleryWorker(
        "tests.worker.ending_tasks:bare_app",
        concurrency=1,
        arguments=["--queues", "database"],
        settings={"INSTALLED_APPS": WITHOUT_TASKS},
    )
    with bare:
        for time_around in range(2):
            for number in range(8):
                unknown.apply_async((f"{tmp_path} {time_around} {number}",), queue="database")
            wait_for(lambda: list(iter_locks()) == [], SOON, "locks are held")
            wait_for(lambda: others_of(postgres_alias) == 0, SOON, "connections are open")
            end_others(postgres_alias)


def others_of(alias: str) -> int:
    """Return how many other connections the database has."""
    return len(rows(alias, "SELECT pid"))


def end_others(alias: str) -> None:
    """Let the server end all other connections, as it does with idle ones."""
    rows(alias, "SELECT pg_terminate_backend(pid)")


def rows(alias: str, select: str) -> list[Any]:
    """Ask for each other connection of the database."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"{select} FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return list(cursor.fetchall())
