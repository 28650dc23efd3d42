"""
Every event in a task's life, and what it does to the task's two locks.

The table is that of the design: each row is one event, with the state of both locks
before and after each of its steps, for the three values of ``unique_until``. Leases are
30 s and 3600 s, so what is seen to be free before that was freed.
"""

import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
from celery.exceptions import NotRegistered
from celery.result import _set_task_join_will_block
from django.db import connections, transaction
from django.test import override_settings
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from django_celery_safe import LockBackendError, find_lock
from django_celery_safe.conf import UNSET
from tests.app.celery import app, tell_workers
from tests.conftest import REDIS_BACKENDS, forget_first_use, require
from tests.processes import CeleryWorker, dead_port, wait_for
from tests.processes.kept import KeptProcess
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.servers import RabbitMQServer, RedisServer
from tests.servers.databases import Databases
from tests.versions import IS_CELERY_57
from tests.worker import event_tasks
from tests.worker.event_tasks import COUNTDOWN, HOOKS, SHORT_LEASE, UNTIL, Kind, act, for_each
from tests.worker.rooms import Room

if TYPE_CHECKING:
    from pytest_django import DjangoDbBlocker

    from tests.servers import ServerPool

#: Seconds until what happens at once must have happened; far less than any lease.
SOON = 15
#: Time limit of the tasks of a row, s; all three are looked at before the first reaches it.
TIME_LIMIT = 12
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

#: For each unique_until: the run-time lock and the send-time lock.
Locks = dict[str | None, tuple[str | None, str | None]]


def locks(run: str | None = None, start: str | None = None, end: str | None = None) -> Locks:
    """Return the same run-time lock for all three, and the send-time locks of two."""
    return {None: (run, None), "start": (run, start), "end": (run, end)}


FREE = locks()
WAITING = locks(None, SENT, SENT)
RUNNING = locks(LEASE, None, LEASE)
#: A run whose message has no lock, or which has no message.
RUNNING_ALONE = locks(LEASE)
#: The message waits again after a run.
WAITING_AGAIN = locks(None, None, SENT)
WAITING_FOR_RETRY = locks(None, None, LATER)


@for_each()
def unknown(self: Any, room: str, how: str) -> None:
    """Not known to the worker, which does not import this module."""
    act(self, room, how)


# On RabbitMQ and with the database's locks, what may differ there is played again.
REDIS = ("redis",)
RABBITMQ = ("redis", "rabbitmq")
DATABASE = ("redis", "database")
EVERYWHERE = ("redis", "rabbitmq", "database")


class Stage(NamedTuple):
    """Where the table is played: a broker, a lock store and a worker."""

    name: str
    worker: CeleryWorker
    #: The server of the cache "frail".
    frail: RedisServer
    #: A database with transactions.
    database: str


class Scene:
    """One row while it is played: three tasks of a kind, each in a room of its own."""

    def __init__(self, stage: Stage, folder: Path, stack: ExitStack) -> None:
        self.stage, self.folder, self.stack = stage, folder, stack
        self.worker, self.queue = stage.worker, "celery"
        self.rooms = {until: Room(folder / str(until)) for until in UNTIL}
        for room in self.rooms.values():
            room.folder.mkdir(parents=True)
        self.kind: Kind = event_tasks.noted
        #: How often each task has begun to run.
        self.number = 0
        self.results: dict[str | None, Any] = {}
        self.calls: dict[str | None, Future[Any]] = {}
        #: Three more, whose messages wait behind these.
        self.behind: Scene | None = None
        self._tokens: dict[str | None, str] = {}

    def locks(self) -> Locks:
        """Return the state of all locks."""
        return {until: (self._left(until, ""), self._left(until, "sent:")) for until in UNTIL}

    def locks_seen_by_others(self) -> Locks:
        """Return the state of all locks for who is not in this thread's transaction."""

        def look() -> Locks:
            try:
                return self.locks()
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as other:
            return other.submit(look).result()

    def _left(self, until: str | None, prefix: str) -> str | None:
        name = f"{prefix}{self.kind.tasks[until].name}:{self.rooms[until].path}"
        lock = find_lock(name, UNSET if self.kind.cache is None else self.kind.cache)
        if lock is None:
            return None
        if prefix and self._tokens.setdefault(until, lock.token) != lock.token:
            return "another message's"
        left = lock.remaining
        assert left is not None
        fits = (name for name, (least, most) in LEASES.items() if least <= left <= most)
        return next(fits, f"{left:.1f} s")

    def send(self, how: str, *more: Any, **options: Any) -> None:
        """Send the three tasks, while the worker can't take them."""
        self.worker.pause()
        for until, task in self.kind.tasks.items():
            room = self.rooms[until].path
            sent = {"queue": self.queue, **options}
            if "ids" in sent:
                sent["task_id"] = sent.pop("ids")[until]
            self.results[until] = task.apply_async((room, how, *more), **sent)

    def call(self, function: Callable[[Any, str], Any]) -> None:
        """Call a function with each of the three tasks, in threads of this process."""
        threads = ThreadPoolExecutor(3, initializer=app.set_current)
        # Celery forbids a task to wait for results by a switch for the whole process, which
        # several that run eagerly at once leave on.
        self.stack.callback(_set_task_join_will_block, False)
        self.stack.callback(threads.shutdown)
        for until, task in self.kind.tasks.items():
            self.calls[until] = threads.submit(function, task, self.rooms[until].path)

    def begin(self) -> None:
        """Let the worker go on, and wait until each task runs, once more than before."""
        self.number += 1
        self.worker.resume()
        for room in self.rooms.values():
            room.until(lambda: len(room.runs()) == self.number, "it does not run", 30)  # noqa: B023

    def open(self) -> None:
        """Let the runs go on to their end."""
        for room in self.rooms.values():
            (room.folder / f"gate {self.number}").touch()

    def end(self, state: str) -> None:
        """Wait until all results are in this state."""
        for until, room in self.rooms.items():
            # A new one each time: a result remembers a failure, though the task runs again.
            task_id = self.results[until].id
            room.until(lambda: app.AsyncResult(task_id).state == state, f"not {state}", 40)  # noqa: B023

    def pids(self) -> list[int]:
        """Return the processes of the latest runs."""
        return [room.runs()[-1]["pid"] for room in self.rooms.values()]

    def hooks(self) -> dict[str | None, list[str]]:
        """Return which hooks were called; a retry may overtake the hooks of its first run."""
        noted = {until: room.journal.entries() for until, room in self.rooms.items()}
        return {
            until: sorted(entry["effect"] for entry in entries if entry["effect"] in HOOKS)
            for until, entries in noted.items()
        }


Action = Callable[[Scene], Any]


class Step(NamedTuple):
    """What happens, the locks that are then held, and how soon (0: in that moment)."""

    action: Action
    locks: Locks
    within: float = SOON


class Row(NamedTuple):
    """One event: the steps up to it, and those after it."""

    event: str
    steps: list[Step]
    #: Hooks of the task's class that are called in all; None: it is another's matter.
    hooks: list[str] | None = None
    #: Whether it has a worker of its own, which ends.
    own_worker: bool = False
    #: Where it is played.
    stages: tuple[str, ...] = REDIS


# --- actions


def send(
    kind: Kind = event_tasks.noted, how: str = "succeed", *more: Any, **options: Any
) -> Action:
    """Send three tasks."""

    def action(scene: Scene) -> None:
        scene.kind = kind
        scene.send(how, *more, **options)

    return action


def begin(scene: Scene) -> None:
    """Let the tasks run."""
    scene.begin()


def end(state: str | None) -> Action:
    """Let the runs end, with this result; None: the result tells nothing."""

    def action(scene: Scene) -> None:
        scene.open()
        if state is not None:
            scene.end(state)

    return action


def result(state: str, error: type[Exception] | None = None, runs: int = 0) -> Action:
    """Let the worker go on; it stores this result for the message, and no more runs begin."""

    def action(scene: Scene) -> None:
        scene.worker.resume()
        scene.end(state)
        assert [len(room.runs()) for room in scene.rooms.values()] == [runs] * 3
        for one in scene.results.values():
            assert error is None or isinstance(one.result, error)

    return action


def wait(scene: Scene) -> None:
    """Let time pass."""


def take_no_more(scene: Scene) -> None:
    """Let the worker take no message until ``take_again``."""
    tell_workers("cancel_consumer", scene.queue, reply=True, limit=1)
    scene.stack.callback(tell_workers, "add_consumer", scene.queue, reply=True, limit=1)


def take_again(scene: Scene) -> None:
    """End ``take_no_more``, and wait for the next runs."""
    tell_workers("add_consumer", scene.queue, reply=True, limit=1)
    scene.begin()


def requeue(scene: Scene) -> None:
    """Let the runs give their messages back to the broker, and stay there."""
    take_no_more(scene)
    scene.open()


def kill_children(scene: Scene) -> None:
    """End the processes of the runs with SIGKILL."""
    for pid in scene.pids():
        os.kill(pid, signal.SIGKILL)


def killed(state: str) -> Action:
    """End the processes of the runs with SIGKILL, and wait for this result."""

    def action(scene: Scene) -> None:
        kill_children(scene)
        scene.end(state)

    return action


def terminate(how: str) -> Action:
    """Revoke the running tasks with this signal."""

    def action(scene: Scene) -> None:
        ids = [result.id for result in scene.results.values()]
        tell_workers("revoke", ids, terminate=True, signal=how)
        scene.end("REVOKED")

    return action


def revoke_then_send(scene: Scene) -> None:
    """Revoke ids, then send tasks with them."""
    ids = {until: uuid.uuid4().hex for until in UNTIL}
    tell_workers("revoke", list(ids.values()), reply=True, limit=1)
    scene.send("succeed", ids=ids)


def revoke_waiting(scene: Scene) -> None:
    """Revoke tasks that the worker keeps until their ETA."""
    scene.worker.resume()
    for one in scene.results.values():
        wait_for(lambda: one.id in scene.worker.log, message="it was not received")  # noqa: B023
    tell_workers("revoke", [one.id for one in scene.results.values()], reply=True, limit=1)


def send_garbled(scene: Scene) -> None:
    """Send three tasks whose bodies are no JSON."""

    class Garbling(Producer):
        def publish(self, body: Any, **options: Any) -> Any:
            options.pop("serializer", None)
            as_json = {"content_type": "application/json", "content_encoding": "utf-8"}
            return super().publish(b"{garbled", **{**options, **as_json})

    connection = scene.stack.enter_context(app.connection_for_write())
    scene.send("succeed", producer=Garbling(connection, auto_declare=False))


def refuse_garbled(scene: Scene) -> None:
    """Let the worker take the garbled messages."""
    said = scene.worker.log.count("Can't decode message body")
    scene.worker.resume()
    wait_for(lambda: scene.worker.log.count("Can't decode message body") == said + 3)


def dead_broker(scene: Scene) -> Connection:
    """Return a connection to a broker that is not there."""
    once = {"max_retries": 1, "interval_start": 0}
    connection = Connection(f"redis://127.0.0.1:{dead_port()}", transport_options=once)
    return scene.stack.enter_context(connection)


def send_to_a_dead_broker(scene: Scene) -> None:
    """The broker can't be reached: the error reaches the caller."""
    for until, task in scene.kind.tasks.items():
        with pytest.raises(OperationalError):
            task.apply_async(
                (scene.rooms[until].path, ""), connection=dead_broker(scene), retry=False
            )


def commit_without_broker(scene: Scene) -> None:
    """The broker can't be reached at the commit: the error is kept."""
    results = []
    with transaction.atomic(using=scene.stage.database):
        for until, task in scene.kind.tasks.items():
            args = (scene.rooms[until].path, "")
            results.append(
                task.apply_async_on_commit(
                    args, using=scene.stage.database, connection=dead_broker(scene), retry=False
                )
            )
    assert [type(result.send_error) for result in results] == [OperationalError] * 3


def send_on_commit(scene: Scene) -> None:
    """Send on commit: no lock is held before."""
    using = scene.stage.database
    scene.worker.pause()
    with transaction.atomic(using=using):
        for until, task in scene.kind.tasks.items():
            args = (scene.rooms[until].path, "succeed")
            scene.results[until] = task.apply_async_on_commit(args, using=using)
        assert scene.locks_seen_by_others() == FREE


def roll_back(scene: Scene) -> None:
    """Send on commit, and roll back."""
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=scene.stage.database):
        send_on_commit(scene)
        raise ZeroDivisionError
    scene.worker.resume()


def stop_cache(scene: Scene) -> None:
    """Stop the server of the locks."""
    scene.stage.frail.stop()
    scene.stack.callback(scene.stage.frail.start)


def fail_without_cache(scene: Scene) -> None:
    """The locks' server goes away before the tasks are taken: they fail without running."""
    stop_cache(scene)
    result("FAILURE", LockBackendError)(scene)
    scene.stage.frail.start()


def send_without_cache(scene: Scene) -> None:
    """A task that needs a lock at the send is not sent while the locks' server is gone."""
    scene.kind = event_tasks.frail
    stop_cache(scene)
    for until, task in scene.kind.tasks.items():
        queue = f"never taken {until} {scene.folder}"
        args = (scene.rooms[until].path, "")
        if until is None:
            task.apply_async(args, queue=queue)
        else:
            with pytest.raises(LockBackendError):
                task.apply_async(args, queue=queue)
        with app.connection_for_read() as connection:
            count = connection.default_channel._size(queue)
        assert count == (1 if until is None else 0)
    scene.stage.frail.start()


def send_by_name(scene: Scene) -> None:
    """Send plain messages, without our header."""
    scene.worker.pause()
    for until, task in scene.kind.tasks.items():
        scene.results[until] = app.send_task(task.name, (scene.rooms[until].path, "succeed"))


def start_beat(scene: Scene) -> None:
    """Let a real beat send the tasks, again and again."""
    schedule = {
        str(until): {
            "task": task.name,
            "schedule": 0.5,
            "args": [scene.rooms[until].path, "succeed"],
        }
        for until, task in scene.kind.tasks.items()
    }
    command = [
        sys.executable, "-m", "celery", "-A", "tests.worker.event_tasks:app", "beat",
        "--schedule", scene.folder / "schedule", "--pidfile", "", "--loglevel", "DEBUG",
    ]  # fmt: skip
    settings = settings_environment({"CELERY_BEAT_SCHEDULE": schedule})
    beat = KeptProcess(
        command, folder=ROOT, log_path=scene.folder / "log", env=os.environ | settings
    )
    scene.stack.enter_context(beat)
    scene.begin()
    # At its third send the first run still stays, so "end" has had two duplicates.
    sent = f"{scene.kind.tasks['end'].name} sent. id"

    def has_sent_enough() -> bool:
        """Tell whether it has, and leave it paused between two sends if so."""
        if beat.log.count(sent) < 3:
            return False
        beat.pause()
        wait_for(lambda: beat.process.status() == psutil.STATUS_STOPPED, 20, "beat goes on")
        if beat.log.count("Sending due task") == beat.log.count(" sent. id"):
            return True
        beat.resume()
        return False

    # A kill within a send would leave that send's lock, which is not what this row tells.
    wait_for(has_sent_enough, 30, "beat sends no more")
    beat.kill()
    assert scene.hooks()["end"] == ["before_start"]


def call(function: Callable[[Any, str], Any]) -> Action:
    """Call the tasks in this process."""

    def action(scene: Scene) -> None:
        scene.call(function)
        scene.begin()

    return action


def send_eagerly(scene: Scene) -> None:
    """Send the tasks where no worker is asked."""
    app.conf.task_always_eager = True
    scene.stack.callback(app.conf.update, task_always_eager=False)
    call(lambda task, room: task.delay(room, "succeed"))(scene)


def returned(scene: Scene) -> None:
    """Let the calls end."""
    scene.open()
    for future in scene.calls.values():
        future.result(20)


def raised(scene: Scene) -> None:
    """Let the calls end with an error."""
    scene.open()
    for future in scene.calls.values():
        assert isinstance(future.exception(20), KeyError)


def stay(scene: Scene) -> None:
    """Let the runs go on for longer than their lease."""
    keeps(scene, RUNNING, 1.5 * SHORT_LEASE)


def kill_worker(scene: Scene) -> None:
    """End a busy worker for which messages wait."""
    waiting = Scene(scene.stage, scene.folder / "waiting", scene.stack)
    waiting.worker, waiting.queue, waiting.kind = scene.worker, scene.queue, scene.kind
    waiting.send("succeed")
    waiting.worker.resume()
    for one in waiting.results.values():
        wait_for(lambda: one.id in scene.worker.log, message="it was not received")  # noqa: B023
    scene.worker.kill()
    scene.behind = waiting


def let_another_take_over(scene: Scene) -> None:
    """Let the stage's worker take what the scene's own leaves, and wait for the runs."""
    scene.worker = scene.stage.worker
    tell_workers("add_consumer", scene.queue, reply=True, limit=1)
    scene.begin()


def kill_worker_for_another(scene: Scene) -> None:
    """End a busy worker; the broker gives its messages to another."""
    scene.worker.kill()
    let_another_take_over(scene)


def end_worker_for_another(scene: Scene) -> None:
    """Let a busy worker shut down cold, which gives its messages back."""
    ask_to_end(signal.SIGQUIT)(scene)
    ended(scene)
    let_another_take_over(scene)


def look_at_waiting(scene: Scene) -> None:
    """A message that waits still blocks its duplicates."""
    assert scene.behind is not None
    assert scene.behind.locks() == WAITING


def ask_to_end(number: signal.Signals) -> Action:
    """Send the worker a signal."""
    return lambda scene: os.kill(scene.worker.pid, number)


def ended(scene: Scene) -> None:
    """Wait until the worker has ended by itself."""
    wait_for(lambda: not scene.worker.running, 20, "the worker did not end")


def keeps(scene: Scene, expected: Locks, seconds: float) -> None:
    """Look for some time whether the locks stay as they are."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        assert scene.locks() == expected
        time.sleep(0.05)


# --- the table

RAN = ["before_start", "on_success", "after_return"]
FAILED = ["before_start", "on_failure", "after_return"]
RETRIED = ["before_start", "on_retry"]
STEPPED_OUT = ["before_start"]
TIMED_OUT = FAILED if IS_CELERY_57 else STEPPED_OUT


def sent(*args: Any, **options: Any) -> list[Step]:
    """Return the first steps of most rows: a message waits, then its task runs."""
    return [Step(send(*args, **options), WAITING, 0), Step(begin, RUNNING, 0)]


def once(kind: Kind, how: str, state: str | None, after: Locks = FREE) -> list[Step]:
    """Return the steps of a task that runs once and ends in this way."""
    return [*sent(kind, how), Step(end(state), after)]


def twice(kind: Kind, how: str, state: str) -> list[Step]:
    """Return the steps of a task that runs twice, the second time at once after the first."""
    again = [Step(lambda scene: (scene.open(), scene.begin()), RUNNING, 0), Step(end(state), FREE)]
    return [*sent(kind, how), *again]


TABLE = [
    Row("success", once(event_tasks.noted, "succeed", "SUCCESS"), RAN, stages=DATABASE),
    Row("exception", once(event_tasks.noted, "fail", "FAILURE"), FAILED, stages=DATABASE),
    Row("Ignore", once(event_tasks.noted, "ignore", None), STEPPED_OUT),
    Row("Reject", once(event_tasks.noted, "reject", "FAILURE"), STEPPED_OUT, stages=RABBITMQ),
    Row(
        "Reject that requeues",
        [
            *sent(event_tasks.late, "requeue"),
            Step(requeue, WAITING_AGAIN),
            Step(take_again, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        STEPPED_OUT + RAN,
        stages=EVERYWHERE,
    ),
    Row(
        "retry",
        once(event_tasks.noted, "retry", "RETRY", WAITING_FOR_RETRY),
        RETRIED,
        stages=EVERYWHERE,
    ),
    Row("retry, then success", twice(event_tasks.noted, "retry now", "SUCCESS"), RETRIED + RAN),
    Row(
        "the last retry fails",
        twice(event_tasks.retried_once, "retry until it fails", "FAILURE"),
        RETRIED + FAILED,
    ),
    Row(
        "a long run",
        [
            *sent(event_tasks.leased_briefly, "succeed"),
            Step(stay, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        RAN,
        stages=DATABASE,
    ),
    Row(
        "revoked before the start",
        [Step(revoke_then_send, WAITING, 0), Step(result("REVOKED"), FREE)],
        [],
        stages=RABBITMQ,
    ),
    Row(
        "revoked before its ETA",
        [
            Step(send(countdown=COUNTDOWN), locks(None, LATER, LATER), 0),
            Step(revoke_waiting, locks(None, LATER, LATER)),
        ],
        [],
    ),
    Row(
        "revoked while it waits, and due",
        [
            Step(send(countdown=5), WAITING, 0),
            Step(revoke_waiting, WAITING),
            Step(result("REVOKED"), FREE),
        ],
        [],
    ),
    Row("terminated by SIGTERM", [*sent(), Step(terminate("SIGTERM"), FREE)], STEPPED_OUT),
    Row("terminated by SIGKILL", [*sent(), Step(terminate("SIGKILL"), FREE)], STEPPED_OUT),
    Row("SystemExit", [*sent(how="exit"), Step(end("FAILURE"), FREE)], STEPPED_OUT),
    Row(
        "expired before it was taken",
        [
            Step(send(expires=8), locks(None, LEASE, LEASE), 0),
            Step(wait, FREE),
            Step(result("REVOKED"), FREE),
        ],
        [],
        stages=RABBITMQ,
    ),
    Row(
        "soft time limit",
        [*sent(soft_time_limit=TIME_LIMIT), Step(result("FAILURE", runs=1), FREE)],
        FAILED,
    ),
    Row(
        "hard time limit",
        [*sent(time_limit=TIME_LIMIT), Step(result("FAILURE", runs=1), FREE)],
        TIMED_OUT,
        stages=DATABASE,
    ),
    Row(
        "hard time limit, acknowledged late",
        [*sent(event_tasks.late, time_limit=TIME_LIMIT), Step(result("FAILURE", runs=1), FREE)],
        TIMED_OUT,
    ),
    Row(
        "hard time limit, delivered again",
        [
            *sent(event_tasks.unacknowledged, time_limit=TIME_LIMIT),
            Step(begin, RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
    ),
    Row("child killed", [*sent(), Step(killed("FAILURE"), FREE)], STEPPED_OUT, stages=DATABASE),
    Row(
        "child killed, acknowledged late",
        [*sent(event_tasks.late), Step(killed("FAILURE"), FREE)],
        STEPPED_OUT,
    ),
    Row(
        "child killed, delivered again",
        [
            *sent(event_tasks.surviving),
            Step(lambda scene: (kill_children(scene), scene.begin()), RUNNING, 0),
            Step(end("SUCCESS"), FREE),
        ],
        stages=RABBITMQ,
    ),
    Row(
        "worker killed",
        [
            *sent(event_tasks.leased_briefly),
            Step(kill_worker, FREE, ONE_LEASE),
            Step(look_at_waiting, FREE),
        ],
        STEPPED_OUT,
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
        [
            *sent(),
            Step(ask_to_end(signal.SIGTERM), RUNNING, 0),
            Step(end("SUCCESS"), FREE),
            Step(ended, FREE),
        ],
        RAN,
        own_worker=True,
    ),
    Row(
        "cold shutdown",
        [
            *sent(event_tasks.leased_briefly),
            Step(ask_to_end(signal.SIGQUIT), FREE, ONE_LEASE),
            Step(ended, FREE),
        ],
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
    Row("broker down at the send", [Step(send_to_a_dead_broker, FREE, 0)], []),
    Row("broker down at the commit", [Step(commit_without_broker, FREE, 0)], [], stages=DATABASE),
    Row("rollback", [Step(roll_back, FREE, 0)], [], stages=DATABASE),
    Row(
        "commit",
        [Step(send_on_commit, WAITING, 0), Step(begin, RUNNING, 0), Step(end("SUCCESS"), FREE)],
        RAN,
        stages=DATABASE,
    ),
    Row(
        "unknown task",
        [Step(send(unknown), WAITING, 0), Step(result("FAILURE", NotRegistered), FREE)],
        [],
        stages=RABBITMQ,
    ),
    Row(
        "content type not accepted",
        [Step(send(serializer="pickle"), WAITING, 0), Step(result("PENDING"), FREE)],
        [],
    ),
    # Celery tells nobody, so the lock ends by its lease.
    Row("garbled body", [Step(send_garbled, WAITING, 0), Step(refuse_garbled, WAITING)], []),
    Row("eager mode", [Step(send_eagerly, RUNNING, 0), Step(returned, FREE, 0)], RAN),
    Row(
        "direct call",
        [
            Step(call(lambda task, room: task(room, "succeed")), RUNNING_ALONE, 0),
            Step(returned, FREE, 0),
        ],
        [],
    ),
    Row(
        "direct call that fails",
        [
            Step(call(lambda task, room: task(room, "fail")), RUNNING_ALONE, 0),
            Step(raised, FREE, 0),
        ],
        [],
    ),
    Row(
        "apply",
        [
            Step(call(lambda task, room: task.apply((room, "succeed"))), RUNNING_ALONE, 0),
            Step(returned, FREE, 0),
        ],
        RAN,
    ),
    Row(
        "sent by name",
        [
            Step(send_by_name, FREE, 0),
            Step(begin, RUNNING_ALONE, 0),
            Step(end("SUCCESS"), FREE),
        ],
        RAN,
    ),
    Row("beat", [Step(start_beat, locks(LEASE, None, LEASE)), Step(end(None), FREE)]),
    Row("replace", once(event_tasks.noted, "replace", "SUCCESS"), STEPPED_OUT),
    Row(
        "replace by itself",
        twice(event_tasks.noted, "replace by itself", "SUCCESS"),
        STEPPED_OUT + RAN,
    ),
    Row("class-based", once(event_tasks.class_based, "succeed", "SUCCESS"), RAN),
    Row("class-based that fails", once(event_tasks.class_based, "fail", "FAILURE"), FAILED),
    Row(
        "autoretry, then success",
        twice(event_tasks.autoretried, "fail once", "SUCCESS"),
        RETRIED + RAN,
    ),
    Row(
        "autoretry exhausted",
        twice(event_tasks.autoretried, "fail", "FAILURE"),
        RETRIED + FAILED,
        stages=DATABASE,
    ),
    Row(
        "autoretry later",
        once(event_tasks.autoretried_later, "fail", "RETRY", WAITING_FOR_RETRY),
        RETRIED,
    ),
    Row(
        "pydantic",
        [*sent(event_tasks.modelled, "succeed", {"number": 1}), Step(end("SUCCESS"), FREE)],
        RAN,
    ),
    Row(
        "pydantic refuses the arguments",
        [
            Step(send(event_tasks.modelled, "succeed", {"number": "many"}), WAITING, 0),
            Step(result("FAILURE"), FREE),
        ],
        FAILED,
    ),
    Row(
        "before_start fails",
        [
            Step(send(event_tasks.noted, "fail before the start"), WAITING, 0),
            Step(result("FAILURE", KeyError), FREE),
        ],
        FAILED,
    ),
    Row(
        "cache gone before the run",
        [Step(send(event_tasks.frail), WAITING, 0), Step(fail_without_cache, FREE, 0)],
        FAILED,
    ),
    Row("cache gone at the send", [Step(send_without_cache, FREE, 0)], []),
]


# --- the tests


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest,
    servers: "ServerPool",
    redis_server: RedisServer,
    _databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: "DjangoDbBlocker",
) -> Iterator[Stage]:
    """
    One worker for all rows that need none of their own.

    Broker and locks are in Redis; on "rabbitmq" the broker is that, and on "database"
    the locks are in PostgreSQL. Results are always in Redis.
    """
    name: str = request.param
    redis_server.flush()
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        kind: Any = "sqlite-immediate"
        if name == "database":
            request.getfixturevalue("postgres_server")
            kind = "postgres"
        folder = tmp_path_factory.mktemp("database")
        database = stack.enter_context(_databases.alias(kind, folder))
        frail = stack.enter_context(RedisServer())
        broker = {
            "broker_url": redis_server.database_url(1),
            "result_backend": redis_server.database_url(2),
            "broker_transport_options": {},
        }
        if name == "rabbitmq":
            broker["broker_url"] = require(servers, RabbitMQServer).url
        caches = {
            "default": {"BACKEND": REDIS_BACKENDS["django-redis"], "LOCATION": redis_server.url},
            "frail": {"BACKEND": REDIS_BACKENDS["django"], "LOCATION": frail.url},
        }
        ours = {"LOCK_DATABASE": database} if name == "database" else {}
        settings = {f"CELERY_{option.upper()}": value for option, value in broker.items()}
        stack.enter_context(override_settings(CACHES=caches, DJANGO_CELERY_SAFE=ours, **settings))
        app.conf.update(broker)
        forget_first_use()
        stack.callback(forget_first_use)
        worker = stack.enter_context(_worker(4))
        yield Stage(name, worker, frail, database)
        # A result in a traceback asks its backend for something when it goes.
        gc.collect()


def _worker(concurrency: int, *arguments: str) -> CeleryWorker:
    include = ["--include", event_tasks.__name__]
    return CeleryWorker("tests.app", concurrency=concurrency, arguments=[*include, *arguments])


@pytest.fixture
def scene(stage: Stage, tmp_path: Path) -> Iterator[Scene]:
    """The stage for one row; at its end nothing of it runs."""
    with ExitStack() as stack:
        scene = Scene(stage, tmp_path, stack)
        yield scene
        for room in scene.rooms.values():
            for number in range(1, 5):
                (room.folder / f"gate {number}").touch()
        if scene.worker.running:
            scene.worker.resume()


#: The beginnings of rows that can fail on a busy machine.
HURRIED = ("soft time limit", "hard time limit", "expired")


def _marks(stage: str, row: Row) -> list[pytest.MarkDecorator]:
    """Return the tiers of a play."""
    marks = [] if stage == "redis" else [pytest.mark.long]
    if row.event.startswith(HURRIED):
        reason = "three runs looked at in 12 s, or a message that expires in 8 s"
        marks.append(pytest.mark.quarantine("2026-11-26", reason))
    return marks


PLAYS = [
    pytest.param(stage, row, id=f"{stage}-{row.event}", marks=_marks(stage, row))
    for row in TABLE
    for stage in row.stages
]


@pytest.mark.parametrize(("stage", "row"), PLAYS, indirect=["stage"], scope="module")
def test_an_event_leaves_the_locks_as_the_table_says(
    row: Row, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, during and after each event both locks are free, or held for as long as they say."""
    if row.own_worker:
        # One that is busy with the three tasks of a row.
        scene.queue = scene.folder.name
        scene.worker = scene.stack.enter_context(_worker(3, "--queues", scene.queue))
    for number, step in enumerate(row.steps):
        step.action(scene)
        ends_at = time.monotonic() + step.within
        while scene.locks() != step.locks and time.monotonic() < ends_at:
            time.sleep(0.02)
        assert scene.locks() == step.locks, f"step {number}"
    expected = None if row.hooks is None else dict.fromkeys(UNTIL, sorted(row.hooks))
    if expected is not None:
        scene.rooms[None].until(lambda: scene.hooks() == expected, f"not {expected}", SOON)
    keeps(scene, row.steps[-1].locks, LOOK)
    assert expected is None or scene.hooks() == expected
    caplog.clear()  # Its records keep tracebacks, and these keep results beyond their backend.
