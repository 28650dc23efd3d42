"""
Tasks that are carried until done, on real workers: their rows, and the number of their runs.

The rows are in PostgreSQL, and a relay runs in a process of its own. Leases are 2 s.
"""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from celery import shared_task
from celery.canvas import Signature
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_celery_safe import SafeTask
from django_celery_safe.models import OutboxMessage
from tests.app.celery import app, tell_workers
from tests.app.models import Person
from tests.conftest import app_on_redis
from tests.processes import CeleryWorker, FunctionProcess, wait_for
from tests.resuming.loops import EACH_ONCE, fill, written
from tests.servers import RedisServer, Server
from tests.servers.databases import Databases
from tests.versions import IS_CELERY_57
from tests.worker import carried_tasks as tasks
from tests.worker.relaying import relaying
from tests.worker.rooms import Room

#: Seconds until something must have happened for which a lease of 2 s has to be over.
PATIENCE = 40
LEASE = {"LOCK_TIMEOUT": 2}
#: The same where a message that no worker takes up is sent again soon.
IMPATIENT = {**LEASE, "OUTBOX_RESEND_AFTER": 3}


@shared_task(base=SafeTask, outbox="until_done")
def unknown(room: str, alias: str) -> None:
    """Be known to this process only."""


@dataclass
class Scene:
    """
    Where the tests of one broker play.

    Attributes:
        alias: The database with the outbox.
        broker: The server of the broker.
    """

    alias: str
    broker: Server

    @property
    def rows(self) -> Any:
        """The outbox."""
        return OutboxMessage.objects.using(self.alias)

    def row(self, task_id: str) -> Any:
        """Return the row of a task; None: it is gone."""
        return self.rows.filter(task_id=task_id).first()

    def state(self, task_id: str) -> str:
        """Return what the row of a task says; "gone": there is none."""
        row = self.row(task_id)
        return "gone" if row is None else row.state

    def send(self, task: Any, room: Room, *args: Any, **options: Any) -> str:
        """Send a task to a room; return its id."""
        sent = task.apply_async_on_commit(
            (room.path, self.alias, *args), using=self.alias, **options
        )
        assert sent.send_error is None
        task_id: str = sent.id
        return task_id

    def signature(self, task: Any, room: Room) -> Signature[Any]:
        """Return a part of a canvas that goes to a room."""
        signature: Signature[Any] = task.s(room.path, self.alias).set(using=self.alias)
        return signature

    def until(self, task_id: str, state: str, room: Room) -> Any:
        """Wait until the row of a task says something; return it."""
        room.until(
            lambda: self.state(task_id) == state,
            f"the row is not {state}, but {self.rows.values()}",
            PATIENCE,
        )
        return self.row(task_id)

    def worker(self, queue: str = "celery", pool: str = "prefork", size: int = 2) -> CeleryWorker:
        """Return a worker, not yet started, that knows the tasks but the unknown one."""
        return CeleryWorker(
            "tests.app",
            pool=pool,
            concurrency=size,
            arguments=["--include", tasks.__name__, "--queues", queue],
        )


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def scene(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    postgres_server: object,
    _databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Scene]:
    """An outbox in PostgreSQL, either broker, and results and locks in the private Redis."""
    broker: Server = request.getfixturevalue(f"{request.param}_server")
    with ExitStack() as stack:
        stack.enter_context(app_on_redis(redis_server, broker=broker))
        stack.enter_context(override_settings(DJANGO_CELERY_SAFE=LEASE))
        stack.enter_context(django_db_blocker.unblock())
        folder = tmp_path_factory.mktemp("carried")
        alias = stack.enter_context(_databases.alias("postgres", folder))
        yield Scene(alias, broker)
        gc.collect()  # Results unsubscribe when they go.


@pytest.fixture(autouse=True)
def _nothing_left(scene: Scene) -> None:
    """Begin each test with an empty outbox."""
    scene.rows.all().delete()


@pytest.fixture(scope="module")
def worker(scene: Scene) -> Iterator[CeleryWorker]:
    """A worker with four children, for what leaves the worker itself alive."""
    with scene.worker(size=4) as worker:
        yield worker


@pytest.fixture(scope="module")
def relay(scene: Scene) -> Iterator[FunctionProcess]:
    """A relay for all tests that need no other."""
    with relaying(scene.alias) as relay:
        yield relay


def result_state(task_id: str) -> str:
    """Return what the result backend says of a task."""
    state: str = app.AsyncResult(task_id).state
    return state


def deaths(room: Room, task_id: str | None = None) -> list[int]:
    """Return how many processes had died in a task when each of its runs began."""
    return [run["deaths"] for run in room.runs(task_id)]


# Processes that die.


def test_a_death_is_no_failure(scene: Scene, room: Room, worker: CeleryWorker) -> None:
    """A relay sends it once more; meanwhile its result is open, and a signal reports the death."""
    errback = scene.signature(tasks.note, room).set(immutable=True)
    task_id = scene.send(tasks.stay, room, link_error=errback)
    room.kill_run()
    wait_for(lambda: f"{task_id}] died" in worker.log, PATIENCE)
    assert result_state(task_id) == "PENDING"
    failed = room.journal.entries("failed")
    assert [(one["id"], one["error"]) for one in failed] == [(task_id, "WorkerLostError")]
    with relaying(scene.alias):
        room.until(lambda: len(room.runs()) == 2, "it is not run again", PATIENCE)
    room.open()
    wait_for(lambda: result_state(task_id) == "SUCCESS", PATIENCE)
    scene.until(task_id, "gone", room)
    assert deaths(room, task_id) == [0, 1]


@pytest.mark.usefixtures("relay")
def test_a_killed_worker_is_followed_by_another(scene: Scene, room: Room) -> None:
    """A later worker runs the interrupted task once more, and the waiting one once."""
    queue = "killed"
    with override_settings(DJANGO_CELERY_SAFE=IMPATIENT), scene.worker(queue, "solo", 1) as first:
        begun = scene.send(tasks.stay, room, queue=queue)
        room.until(room.runs, "it does not run", PATIENCE)
        waiting = scene.send(tasks.note, room, queue=queue, countdown=2)
        first.kill()
    room.open()
    with scene.worker(queue, "solo", 1):
        for task_id in (begun, waiting):
            scene.until(task_id, "gone", room)
    assert (deaths(room, begun), deaths(room, waiting)) == ([0, 1], [0])


# Messages that get lost.


@pytest.mark.usefixtures("worker")
def test_a_task_that_the_worker_does_not_know(scene: Scene, room: Room) -> None:
    """Its row says so, and waits for a worker that does."""

    def is_told() -> bool:
        row = scene.row(task_id)
        return row.state == "sent" and f"does not know the task {unknown.name}" in row.error

    with override_settings(DJANGO_CELERY_SAFE=IMPATIENT), relaying(scene.alias):
        task_id = scene.send(unknown, room)
        room.until(is_told, "its row does not say so", PATIENCE)


@pytest.mark.usefixtures("worker")
def test_a_message_that_the_worker_refuses_to_read(scene: Scene, room: Room) -> None:
    """Its row says why, and waits for a worker that accepts it."""
    task_id = scene.send(tasks.note, room, serializer="pickle")
    room.until(lambda: scene.row(task_id).error, "its row does not say so", PATIENCE)
    row = scene.row(task_id)
    assert row.state == "sent"
    assert "refused the message: ContentDisallowed" in row.error
    assert room.runs() == []


ends_solo = pytest.mark.skipif(
    not IS_CELERY_57, reason="a solo worker of older Celery goes on after SIGQUIT"
)


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize(
    "pool", [pytest.param("solo", marks=ends_solo), pytest.param("prefork", marks=pytest.mark.long)]
)
def test_a_cold_shutdown_gives_the_task_back(scene: Scene, room: Room, pool: str) -> None:
    """Whichever process runs it; that is no failure and no death, and the next worker runs it."""
    queue = f"cold-{pool}"
    with scene.worker(queue, pool, 1) as first:
        task_id = scene.send(tasks.stay, room, queue=queue)
        room.until(room.runs, "it does not run", PATIENCE)
        os.kill(first.pid, signal.SIGQUIT)
        wait_for(lambda: not first.running, PATIENCE)
    assert scene.state(task_id) in ("pending", "sent")  # a relay may have sent it again
    assert result_state(task_id) != "FAILURE"
    room.open()
    with scene.worker(queue, pool, 1):
        scene.until(task_id, "gone", room)
    assert deaths(room) == [0, 0]


# Tasks that are ended.


@pytest.mark.usefixtures("worker", "relay")
def test_a_hard_time_limit_fails_it(scene: Scene, room: Room) -> None:
    """It is not run again, though its process was killed."""
    task_id = scene.send(tasks.stay_too_long, room)
    row = scene.until(task_id, "failed", room)
    assert (row.error_type, row.due_at) == ("TimeLimitExceeded", None)
    assert deaths(room) == [0]
    assert result_state(task_id) == "FAILURE"


@pytest.mark.usefixtures("worker")
def test_a_task_that_is_revoked_before_it_begins(scene: Scene, room: Room) -> None:
    """Its row says so, and it never runs."""
    task_id = "00000000-revoked-" + os.urandom(8).hex()
    tell_workers("revoke", task_id, reply=True, limit=1)
    scene.send(tasks.note, room, task_id=task_id)
    row = scene.until(task_id, "failed", room)
    assert (row.error, room.runs()) == ("The task was revoked.", [])


@pytest.mark.usefixtures("worker", "relay")
def test_a_task_that_is_revoked_while_it_runs(scene: Scene, room: Room) -> None:
    """Its process is killed, which is no death that it would be run again after."""
    task_id = scene.send(tasks.stay, room)
    room.until(room.runs, "it does not run", PATIENCE)
    tell_workers("revoke", task_id, terminate=True, signal="SIGKILL", reply=True, limit=1)
    row = scene.until(task_id, "failed", room)
    assert (row.error, row.due_at) == ("The task was revoked.", None)
    assert deaths(room) == [0]


@pytest.mark.usefixtures("worker", "relay")
def test_a_task_that_expires(scene: Scene, room: Room) -> None:
    """Whether the worker or the broker drops its message, its row says so."""
    with override_settings(DJANGO_CELERY_SAFE=IMPATIENT):
        task_id = scene.send(tasks.note, room, expires=0.001)
    row = scene.until(task_id, "failed", room)
    assert (row.error, room.runs()) == ("The task expired before it was begun.", [])


# Resumable loops: children that are killed, and workers that shut down.


def begin_walk(scene: Scene, room: Room, queue: str) -> str:
    """Send a walk over ten rows; return its id when it has one chunk, and is in the second one."""
    Person.everyone.using(scene.alias).all().delete()
    fill(scene.alias)
    task_id = scene.send(tasks.walk, room, queue=queue)
    room.until(lambda: room.journal.entries("there"), "it is not there", PATIENCE)
    return task_id


@pytest.mark.usefixtures("relay")
def test_a_killed_child_loses_its_open_chunk(scene: Scene, room: Room) -> None:
    """Each row is written to once; three deaths with a chunk between them are none too many."""
    with scene.worker("walked", size=1):
        task_id = begin_walk(scene, room, "walked")
        room.kill_run()
        room.until(lambda: len(room.journal.entries("there")) == 2, "not again", PATIENCE)
        assert sum(written(scene.alias).values()) == 3
        assert scene.row(task_id).progress == "3/10"
        room.open()
        scene.until(task_id, "gone", room)
    assert written(scene.alias) == EACH_ONCE
    assert deaths(room) == [0, 1]


#: The signal for each kind of shutdown, and what the worker then writes into its log.
SHUTDOWNS = {
    "warm": (signal.SIGTERM, "told to shut down"),
    "soft": (signal.SIGQUIT, "Initiating Soft Shutdown"),
}


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
def test_a_worker_that_shuts_down_hands_over(
    scene: Scene, room: Room, relay: FunctionProcess, pool: str, how: str
) -> None:
    """The task ends behind its open chunk, without a death, and another worker does the rest."""
    queue = f"{pool}-{how}"
    soft = override_settings(CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT=5)
    with soft, scene.worker(queue, pool, 1) as first, ExitStack() as stack:
        task_id = begin_walk(scene, room, queue)
        # Otherwise the same worker could take the message again until its connection is closed.
        relay.pause()
        stack.callback(relay.resume)
        if how == "remote":
            tell_workers("shutdown", pattern=f"{first.name}@*", matcher="glob")
            wait_for(lambda: "Got shutdown from remote" in first.log, PATIENCE)
        else:
            number, said = SHUTDOWNS[how]
            os.kill(first.pid, number)
            wait_for(lambda: said in first.log, PATIENCE)
        room.open()
        wait_for(lambda: not first.running, PATIENCE)
        row = scene.row(task_id)
        assert (row.state, row.progress) == ("pending", "6/10")
    with scene.worker(queue, pool, 1):
        scene.until(task_id, "gone", room)
    assert written(scene.alias) == EACH_ONCE
    assert {*deaths(room)} == {0}
