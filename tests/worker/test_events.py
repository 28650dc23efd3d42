"""
Every event in a task's life, and what it does to the task's two locks.

The table is that of the design: each row is one event, with the state of both locks
after each of its steps. Leases are 30 s and 3600 s, so what is seen to be free before
that was freed. What does not need a worker is in ``tests/concurrency`` and in
``tests/sending/test_unique.py``: direct calls, eager mode, sends that fail, commits.
"""

import gc
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery.exceptions import NotRegistered
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_celery_safe import find_lock
from tests.app.celery import app, tell_workers
from tests.conftest import app_on_redis
from tests.processes import CeleryWorker, wait_for
from tests.servers import RabbitMQServer, RedisServer, ServerPool
from tests.servers.databases import Databases
from tests.versions import IS_CELERY_57
from tests.worker import event_tasks
from tests.worker.event_tasks import COUNTDOWN, SHORT_LEASE, make_task
from tests.worker.rooms import Room

#: Seconds until what happens at once must have happened; far less than any lease.
SOON = 15
#: Time limit of runs that stay for longer, s.
TIME_LIMIT = 1
#: Seconds until a short lease must be over.
ONE_LEASE = SHORT_LEASE + 11
#: Seconds for which a lock that is kept is looked at.
LOOK = 0.1

# How long a lock still has. None: it is free.
LEASE = "the run's lease"
SENT = "sent_timeout"
LATER = "sent_timeout and the countdown"

#: How many seconds are left of each, at least and at most; a short countdown comes on top.
LEASES = {LEASE: (0, 30), SENT: (3540, 3610), LATER: (3540 + COUNTDOWN, 3600 + COUNTDOWN)}

#: The lock of the run, and that of the send.
Locks = tuple[str | None, str | None]

FREE = (None, None)
WAITING = (None, SENT)
RUNNING = (LEASE, LEASE)
#: A run whose message has no lock.
RUNNING_ALONE = (LEASE, None)
WAITING_FOR_RETRY = (None, LATER)


#: Not known to the worker, which does not import this module.
unknown = make_task("unknown")


# On RabbitMQ and with the database's locks, what may differ there is played again.
REDIS = ("redis",)
RABBITMQ = ("redis", "rabbitmq")
DATABASE = ("redis", "database")
EVERYWHERE = ("redis", "rabbitmq", "database")


class Scene:
    """One row while it is played: a task in a room of its own, and its worker."""

    def __init__(self, worker: CeleryWorker, folder: Path, stack: ExitStack) -> None:
        self.stage = self.worker = worker
        self.stack, self.queue, self.room = stack, "celery", Room(folder)
        self.task: Any = event_tasks.noted
        #: How often the task has begun to run.
        self.number = 0
        self.result: Any = None
        self._token: str | None = None

    def locks(self) -> Locks:
        """Return the state of both locks."""
        return self._left(""), self._left("sent:")

    def _left(self, prefix: str) -> str | None:
        lock = find_lock(f"{prefix}{self.task.name}:{self.room.path}")
        if lock is None:
            return None
        if prefix:
            self._token = self._token or lock.token
            if self._token != lock.token:
                return "another message's"
        left = lock.remaining
        assert left is not None
        fits = (name for name, (least, most) in LEASES.items() if least <= left <= most)
        return next(fits, f"{left:.1f} s")

    def begin(self) -> None:
        """Let the worker go on, and wait until the task runs, once more than before."""
        self.number += 1
        self.worker.resume()
        self.room.until(lambda: len(self.room.runs()) == self.number, "it does not run", 30)

    def open(self, *numbers: int) -> None:
        """Let the latest run, or those with these numbers, go on to its end."""
        for number in numbers or [self.number]:
            (self.room.folder / f"gate {number}").touch()

    def end(self, state: str) -> None:
        """Wait until the result is in this state."""
        # A new one each time: a result remembers a failure, though the task runs again.
        task_id = self.result.id
        self.room.until(lambda: app.AsyncResult(task_id).state == state, f"not {state}", 40)


Action = Callable[[Scene], Any]


class Step(NamedTuple):
    """An event, the locks that are held after it, and within which time (0: at once)."""

    action: Action
    locks: Locks
    within: float = SOON


class Row(NamedTuple):
    """One event: the steps up to it, and those after it."""

    event: str
    steps: list[Step]
    #: Whether it has a worker of its own, which ends.
    own_worker: bool = False
    #: Where it is played.
    stages: tuple[str, ...] = REDIS


# --- actions


def send(task: Any = event_tasks.noted, how: str = "succeed", **options: Any) -> Action:
    """Send a task, while the worker can't take it."""

    def action(scene: Scene) -> None:
        scene.task = task
        scene.worker.pause()
        scene.result = task.apply_async((scene.room.path, how), queue=scene.queue, **options)

    return action


def end(state: str | None) -> Action:
    """Let the run end, with this result; None: the result tells nothing."""

    def action(scene: Scene) -> None:
        scene.open()
        if state is not None:
            scene.end(state)

    return action


def result(state: str, error: type[Exception] | None = None) -> Action:
    """Let the worker go on; it stores this result for the message."""

    def action(scene: Scene) -> None:
        scene.worker.resume()
        scene.end(state)
        assert error is None or isinstance(scene.result.result, error)

    return action


def refused(state: str, error: type[Exception] | None = None) -> Action:
    """Let the worker store this result for a message that it does not run."""

    def action(scene: Scene) -> None:
        result(state, error)(scene)
        assert scene.room.runs() == []

    return action


def requeue(scene: Scene) -> None:
    """Let the run give its message back to the broker, and let it stay there."""
    tell_workers("cancel_consumer", scene.queue, reply=True, limit=1)
    scene.stack.callback(tell_workers, "add_consumer", scene.queue, reply=True, limit=1)
    scene.open()


def take_again(scene: Scene) -> None:
    """Let the worker take messages again, and wait for the next run."""
    tell_workers("add_consumer", scene.queue, reply=True, limit=1)
    scene.begin()


def killed(scene: Scene) -> None:
    """End the process of the run with SIGKILL, and wait for its result."""
    scene.room.kill_run()
    scene.end("FAILURE")


def run_again(scene: Scene) -> None:
    """Let the run go on to its end, and wait for the next run."""
    scene.open()
    scene.begin()


def run_after_kill(scene: Scene) -> None:
    """End the process of the run with SIGKILL, and wait for the next run."""
    scene.room.kill_run()
    scene.begin()


def terminated(scene: Scene) -> None:
    """Revoke the running task with a signal that its process can't handle."""
    tell_workers("revoke", scene.result.id, terminate=True, signal="SIGKILL")
    scene.end("REVOKED")


def revoke_then_send(scene: Scene) -> None:
    """Revoke an id, then send a task with it."""
    task_id = uuid.uuid4().hex
    tell_workers("revoke", task_id, reply=True, limit=1)
    send(task_id=task_id)(scene)


def revoke_waiting(scene: Scene) -> None:
    """Revoke a task that the worker keeps until its ETA."""
    scene.worker.resume()
    wait_for(lambda: scene.result.id in scene.worker.log, message="it was not received")
    tell_workers("revoke", scene.result.id, reply=True, limit=1)


def succeed_in_the_end(scene: Scene) -> None:
    """Let the run reach its limit, and the next one end before that."""
    scene.open(2, 3, 4)
    result("SUCCESS")(scene)
    assert len(scene.room.runs()) > 1


def send_by_name(scene: Scene) -> None:
    """Send a plain message, without our header."""
    scene.worker.pause()
    scene.result = app.send_task(scene.task.name, (scene.room.path, "succeed"))


def kill_worker(scene: Scene) -> None:
    """End the busy worker with SIGKILL."""
    scene.worker.kill()


def let_another_take_over(scene: Scene) -> None:
    """Let the stage's worker take what the scene's own leaves, and wait for the run."""
    scene.worker = scene.stage
    take_again(scene)


def kill_worker_for_another(scene: Scene) -> None:
    """End a busy worker; the broker gives its message to another."""
    kill_worker(scene)
    let_another_take_over(scene)


def end_worker_for_another(scene: Scene) -> None:
    """Let a busy worker shut down cold, which gives its message back."""
    os.kill(scene.worker.pid, signal.SIGQUIT)
    ended(scene)
    let_another_take_over(scene)


def ask_to_end(scene: Scene) -> None:
    """Ask the worker for a warm shutdown."""
    os.kill(scene.worker.pid, signal.SIGTERM)


def ended(scene: Scene) -> None:
    """Wait until the worker has ended by itself."""
    wait_for(lambda: not scene.worker.running, 20, "the worker did not end")


# --- the table


def sent(*args: Any, **options: Any) -> list[Step]:
    """Return the first steps of most rows: a message waits, then its task runs."""
    return [Step(send(*args, **options), WAITING, 0), Step(Scene.begin, RUNNING, 0)]


def once(task: Any, how: str, state: str | None, after: Locks = FREE) -> list[Step]:
    """Return the steps of a task that runs once and ends in this way."""
    return [*sent(task, how), Step(end(state), after)]


def twice(task: Any, how: str, state: str) -> list[Step]:
    """Return the steps of a task that runs twice, the second time at once after the first."""
    # Celery stores that it is retried while it runs again, and would store it over its success.
    retried = [] if "replace" in how else [Step(result("RETRY"), RUNNING, 0)]
    return [*sent(task, how), Step(run_again, RUNNING, 0), *retried, Step(end(state), FREE)]


def refusal(task: Any, state: str, error: Any, *more: Any, **options: Any) -> list[Step]:
    """Return the steps of a message that the worker does not run."""
    return [Step(send(task, *more, **options), WAITING, 0), Step(refused(state, error), FREE)]


def limited(task: Any) -> list[Step]:
    """Return the steps of a run that a time limit ends; how soon it begins does not matter."""
    return [Step(send(task, time_limit=TIME_LIMIT), WAITING, 0), Step(result("FAILURE"), FREE)]


TABLE = [
    Row("success", once(event_tasks.noted, "succeed", "SUCCESS"), stages=DATABASE),
    Row("exception", once(event_tasks.noted, "fail", "FAILURE")),
    Row("Ignore", once(event_tasks.noted, "ignore", None)),
    Row("Reject", once(event_tasks.noted, "reject", "FAILURE"), stages=RABBITMQ),
    Row(
        "Reject that requeues",
        [
            *sent(event_tasks.late, "requeue"),
            Step(requeue, WAITING),
            Step(take_again, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        stages=EVERYWHERE,
    ),
    Row("retry", once(event_tasks.noted, "retry", "RETRY", WAITING_FOR_RETRY), stages=EVERYWHERE),
    Row("retry, then success", twice(event_tasks.noted, "retry now", "SUCCESS")),
    Row(
        "revoked before the start",
        [Step(revoke_then_send, WAITING, 0), Step(refused("REVOKED"), FREE)],
        stages=RABBITMQ,
    ),
    Row(
        "revoked before its ETA",
        [
            Step(send(countdown=COUNTDOWN), WAITING_FOR_RETRY, 0),
            Step(revoke_waiting, WAITING_FOR_RETRY),
        ],
    ),
    Row("terminated", [*sent(), Step(terminated, FREE)]),
    Row("SystemExit", once(event_tasks.noted, "exit", "FAILURE")),
    Row(
        "expired before it was taken",
        [Step(send(expires=1), FREE), Step(refused("REVOKED"), FREE)],
        stages=RABBITMQ,
    ),
    Row("hard time limit", limited(event_tasks.noted), stages=DATABASE),
    Row("hard time limit, acknowledged late", limited(event_tasks.late)),
    Row(
        "hard time limit, delivered again",
        [
            Step(send(event_tasks.unacknowledged, time_limit=TIME_LIMIT), WAITING, 0),
            Step(succeed_in_the_end, FREE),
        ],
    ),
    Row("child killed", [*sent(), Step(killed, FREE)], stages=DATABASE),
    Row("child killed, acknowledged late", [*sent(event_tasks.late), Step(killed, FREE)]),
    Row(
        "child killed, delivered again",
        [
            *sent(event_tasks.surviving),
            Step(run_after_kill, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        stages=RABBITMQ,
    ),
    Row(
        "worker killed",
        [*sent(event_tasks.leased_briefly), Step(kill_worker, FREE, ONE_LEASE)],
        own_worker=True,
        stages=DATABASE,
    ),
    Row(
        "worker killed, delivered again",
        [
            *sent(event_tasks.taken_over),
            Step(kill_worker_for_another, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        own_worker=True,
        stages=("rabbitmq",),
    ),
    Row(
        "warm shutdown",
        [*sent(), Step(ask_to_end, RUNNING, 0), Step(end("SUCCESS"), FREE), Step(ended, FREE)],
        own_worker=True,
    ),
    Row(
        "cold shutdown, delivered again",
        [
            *sent(event_tasks.taken_over),
            Step(end_worker_for_another, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        own_worker=True,
    ),
    Row("unknown task", refusal(unknown, "FAILURE", NotRegistered), stages=RABBITMQ),
    Row(
        "content type not accepted",
        refusal(event_tasks.noted, "PENDING", None, serializer="pickle"),
    ),
    Row(
        "sent by name",
        [
            Step(send_by_name, FREE, 0),
            Step(Scene.begin, RUNNING_ALONE, 0),
            Step(end("SUCCESS"), FREE),
        ],
    ),
    Row("replace by itself", twice(event_tasks.noted, "replace by itself", "SUCCESS")),
    Row("autoretry exhausted", twice(event_tasks.autoretried, "fail", "FAILURE")),
    Row(
        "before_start fails",
        refusal(event_tasks.noted, "FAILURE", KeyError, "fail before the start"),
    ),
]
if IS_CELERY_57:
    TABLE.append(
        Row(
            "child killed, sent again by Celery",
            [*sent(event_tasks.lost), Step(run_after_kill, RUNNING, 0), Step(end("SUCCESS"), FREE)],
        )
    )


# --- the tests


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest,
    servers: ServerPool,
    redis_server: RedisServer,
    _databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[CeleryWorker]:
    """
    One worker for all rows that need none of their own.

    Broker and locks are in Redis; on "rabbitmq" the broker is that, and on "database"
    the locks are in PostgreSQL. Results are always in Redis.
    """
    broker: Any = redis_server
    ours: dict[str, Any] = {}
    with ExitStack() as stack:
        if request.param == "rabbitmq":
            broker = servers.get(RabbitMQServer)
        if request.param == "database":
            stack.enter_context(django_db_blocker.unblock())
            folder = tmp_path_factory.mktemp("database")
            ours["LOCK_DATABASE"] = stack.enter_context(_databases.alias("postgres", folder))
        stack.enter_context(app_on_redis(redis_server, broker=broker))
        stack.enter_context(override_settings(DJANGO_CELERY_SAFE=ours))
        yield stack.enter_context(_worker())
        # A result in a traceback asks its backend for something when it goes.
        gc.collect()


def _worker(*arguments: str) -> CeleryWorker:
    include = ["--include", event_tasks.__name__]
    return CeleryWorker("tests.app", concurrency=2, arguments=[*include, *arguments])


@pytest.fixture
def scene(stage: CeleryWorker, tmp_path: Path) -> Iterator[Scene]:
    """The stage for one row; at its end nothing of it runs."""
    with ExitStack() as stack:
        scene = Scene(stage, tmp_path, stack)
        yield scene
        scene.open(1, 2, 3, 4)
        if scene.worker.running:
            scene.worker.resume()


#: Events that need a worker of their own are long.
PLAYS = [
    pytest.param(
        stage,
        row,
        id=f"{stage}-{row.event}",
        marks=[pytest.mark.long] if stage != "redis" or row.own_worker else [],
    )
    for row in TABLE
    for stage in row.stages
]


@pytest.mark.parametrize(("stage", "row"), PLAYS, indirect=["stage"], scope="module")
def test_an_event_leaves_the_locks_as_the_table_says(
    row: Row, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, during and after each event both locks are free, or held for as long as they say."""
    if row.own_worker:
        scene.queue = scene.room.folder.name
        scene.worker = scene.stack.enter_context(_worker("--queues", scene.queue))
    for number, step in enumerate(row.steps):
        step.action(scene)
        with suppress(TimeoutError):
            wait_for(lambda: scene.locks() == step.locks, step.within)  # noqa: B023
        assert scene.locks() == step.locks, f"step {number}"
    ends_at = time.monotonic() + LOOK
    while time.monotonic() < ends_at:
        assert scene.locks() == row.steps[-1].locks
        time.sleep(0.02)
    caplog.clear()  # Its records keep tracebacks, and these keep results beyond their backend.
