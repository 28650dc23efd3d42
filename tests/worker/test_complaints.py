"""
The most frequent complaints about locks for Celery: a test for each, named after it.

A complaint is played as its user met it, on a real worker with Redis, by public names
alone. Leases are 30 s where nothing else is said, and messages keep others from being
sent for an hour, so what is free before that was freed.
"""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord
from celery.exceptions import Reject
from django.core.management import call_command
from django.db import connections
from kombu import Connection
from kombu.exceptions import OperationalError

from django_celery_safe import find_lock
from django_celery_safe.signals import task_duplicate
from tests.app.celery import app
from tests.conftest import LOOKING_OFTEN, MakeDatabase, app_on_redis
from tests.processes import CeleryWorker, KeptProcess, dead_port, wait_for
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.servers import RedisServer
from tests.worker import complaint_tasks as tasks
from tests.worker.complaint_tasks import SHORT_LEASE
from tests.worker.rooms import Room

if TYPE_CHECKING:
    pass

#: Seconds until what has to happen must have happened; less than what a killed run's
#: lease still has, 20 s at least.
SOON = 15

#: The broker's visibility timeout, s: it redelivers unacknowledged messages after that.
VISIBILITY_TIMEOUT = 3

MakeRoom = Callable[[str], Room]
StartOther = Callable[[str], CeleryWorker]


@pytest.fixture(scope="module")
def site(redis_server: RedisServer, make_module_database: MakeDatabase) -> Iterator[dict[str, Any]]:
    """Locks, broker and results in Redis; gives the setting for the workers' database."""
    database = connections.settings[make_module_database("sqlite-immediate")]
    kept = {name: database[name] for name in ("ENGINE", "NAME", "OPTIONS")}
    with app_on_redis(redis_server, visibility_timeout=VISIBILITY_TIMEOUT, **LOOKING_OFTEN):
        yield {"DATABASES": {"default": kept}}


def make_worker(site: dict[str, Any], concurrency: int, *arguments: str) -> CeleryWorker:
    """Return a worker with our tasks."""
    arguments = ("--include", tasks.__name__, *arguments)
    return CeleryWorker("tests.app", concurrency=concurrency, arguments=arguments, settings=site)


@pytest.fixture(scope="module", autouse=True)
def worker(site: dict[str, Any]) -> Iterator[CeleryWorker]:
    """One worker for the module."""
    with make_worker(site, 3) as worker:
        yield worker


@pytest.fixture
def start_other(site: dict[str, Any]) -> Iterator[StartOther]:
    """Start another worker, with one process and a queue of its own."""
    with ExitStack() as stack:
        yield lambda queue: stack.enter_context(make_worker(site, 1, "--queues", queue))


@pytest.fixture
def make_room(tmp_path: Path) -> Iterator[MakeRoom]:
    """Make rooms; at the end of the test everybody may leave them."""
    with ExitStack() as stack:

        def make(name: str) -> Room:
            room = Room(tmp_path / name)
            room.folder.mkdir()
            stack.callback(room.open)
            return room

        yield make


@pytest.fixture
def room(make_room: MakeRoom) -> Room:
    """A room for this test alone."""
    return make_room("room")


def begin(task: Any, room: Room, *more: Any, **options: Any) -> Any:
    """Send the task and wait until it runs."""
    result = task.apply_async((room.path, *more), **options)
    room.until(lambda: room.runs(result.id), "it did not start")
    return result


def runs_again(task: Any, room: Room, timeout: float = SOON) -> None:
    """Send the same until it is not a duplicate, and let it run: no lock is in its way."""
    room.open()

    def sent() -> Any:
        result = task.delay(room.path)
        return None if result.is_duplicate else result

    again = room.until(sent, "the lock is left behind", timeout)
    assert again.get(timeout=SOON) == [again.id, 0]


def child_of(room: Room) -> int:
    """Return the process of the only run."""
    (run,) = room.runs()
    return int(run["pid"])


def celery_locks(*arguments: str) -> str:
    """Return what the command prints."""
    out = io.StringIO()
    call_command("celery_locks", *arguments, stdout=out)
    return out.getvalue()


# --- locks left behind


def test_a_lock_is_left_behind_after_a_crash(room: Room) -> None:
    """A run whose process is killed blocks nobody: the same is sent and runs, before its lease."""
    begin(tasks.export, room)
    os.kill(child_of(room), signal.SIGKILL)
    runs_again(tasks.export, room)


@pytest.mark.long
def test_a_lock_is_left_behind_after_a_crash_of_the_whole_worker(
    room: Room, start_other: StartOther
) -> None:
    """With nobody left who could free it, the lock ends with its lease, not after hours."""
    other = start_other("crash")
    begin(tasks.export_briefly, room, queue="crash")
    assert tasks.export_briefly.delay(room.path).is_duplicate
    other.kill()
    runs_again(tasks.export_briefly, room)
    assert room.gauge.violations() == []


@pytest.mark.long
def test_a_lock_is_left_behind_after_a_deploy(make_room: MakeRoom, start_other: StartOther) -> None:
    """A warm shutdown loses no waiting message and leaves no lock; the next worker goes on."""
    running, waiting = make_room("running"), make_room("waiting")
    old = start_other("deploy")
    first = begin(tasks.export, running, queue="deploy")
    second = tasks.export.apply_async((waiting.path,), queue="deploy")
    wait_for(lambda: second.id in old.log, message="the old worker did not take the second")
    os.kill(old.pid, signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in old.log, message="it goes on")
    running.open()
    wait_for(lambda: not old.running, 30, "the old worker does not end")
    assert first.get(timeout=SOON) == [first.id, 0]
    assert waiting.runs() == []
    assert tasks.export.delay(waiting.path).id == second.id
    start_other("deploy")
    waiting.open()
    assert second.get(timeout=SOON) == [second.id, 0]
    runs_again(tasks.export, running)
    runs_again(tasks.export, waiting)


@pytest.mark.long
def test_a_lock_is_left_behind_after_a_revoke(make_room: MakeRoom, worker: CeleryWorker) -> None:
    """A task that was revoked, before its start or while it ran, can be sent again at once."""
    waiting, running = make_room("waiting"), make_room("running")
    unborn = tasks.export.apply_async((waiting.path,), countdown=8)
    wait_for(lambda: unborn.id in worker.log, message="the worker did not take it")
    unborn.revoke()
    begin(tasks.export, running).revoke(terminate=True)
    waiting.until(lambda: unborn.state == "REVOKED", "it was not revoked")
    runs_again(tasks.export, waiting)
    assert waiting.runs(unborn.id) == []
    runs_again(tasks.export, running)


def test_a_lock_is_left_behind_after_a_time_limit(make_room: MakeRoom) -> None:
    """A run that is stopped by its time limit, soft or hard, blocks nobody."""
    limits = {"soft_time_limit": make_room("soft"), "time_limit": make_room("hard")}
    stopped = {limit: begin(tasks.export, room, **{limit: 3}) for limit, room in limits.items()}
    for limit, room in limits.items():
        error = stopped[limit].get(timeout=SOON, propagate=False)
        assert "TimeLimitExceeded" in type(error).__name__
        runs_again(tasks.export, room)


def test_a_lock_is_left_behind_after_a_failed_send(room: Room) -> None:
    """A send that failed because the broker was down can be repeated when it is back."""
    once = {"max_retries": 1, "interval_start": 0}
    broker = Connection(f"redis://127.0.0.1:{dead_port()}", transport_options=once)
    with broker, pytest.raises(OperationalError):
        tasks.export.apply_async((room.path,), connection=broker, retry=False)
    room.open()
    sent = tasks.export.delay(room.path)
    assert not sent.is_duplicate
    assert sent.get(timeout=SOON) == [sent.id, 0]


# --- retries, leases, renewal


@pytest.mark.parametrize("task", [tasks.retried, tasks.autoretried])
def test_a_retry_is_swallowed_by_its_own_lock(task: Any, room: Room) -> None:
    """A retry runs, by ``self.retry`` and by ``autoretry_for``, and the next send is a new one."""
    first = task.delay(room.path)
    assert first.get(timeout=SOON) == 1
    assert len(room.runs(first.id)) == 2
    room.until(lambda: not task.delay(room.path).is_duplicate, "the lock is left behind", SOON)
    assert room.gauge.violations() == []


def test_an_expired_lock_is_deleted_by_its_old_owner(room: Room) -> None:
    """A run that outlived its lease leaves the lock alone that is another's by now."""
    first = begin(tasks.crawl_unrenewed, room, "first gate")
    name = f"{tasks.crawl_unrenewed.name}:{room.path}"
    room.until(lambda: find_lock(name) is None, "the lease does not end")
    second = begin(tasks.crawl_unrenewed, room, "second gate", single_instance={"timeout": 60})
    (room.folder / "first gate").touch()
    first.get(timeout=SOON)
    third = tasks.crawl_unrenewed.delay(room.path, "second gate")
    third.get(timeout=SOON)
    assert room.runs(third.id) == []
    lock = find_lock(name)
    assert lock is not None
    assert lock.holder.task_id == second.id
    (room.folder / "second gate").touch()
    second.get(timeout=SOON)


def test_no_renewal(room: Room) -> None:
    """No second run gets in while the first goes on, however short the lease is."""
    first = begin(tasks.crawl, room)
    ends_at = time.monotonic() + 1.5 * SHORT_LEASE
    while time.monotonic() < ends_at:
        assert tasks.crawl.delay(room.path).get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert len(room.runs()) == 1


def test_a_renewer_dies(room: Room, worker: CeleryWorker, redis_server: RedisServer) -> None:
    """A renewal that fails, because Redis takes no connection for a while, is not the last one."""
    first = begin(tasks.crawl, room, single_instance={"timeout": 3 * SHORT_LEASE})
    name = f"{tasks.crawl.name}:{room.path}"
    failures = worker.log.count("could not be renewed")
    with redis_server.client() as operator:
        most = operator.config_get("maxclients")["maxclients"]
        operator.config_set("maxclients", 1)
        try:
            for client in operator.client_list():
                if client["db"] == "0" and int(client["id"]) != operator.client_id():
                    operator.client_kill_filter(_id=client["id"])
            room.until(
                lambda: worker.log.count("could not be renewed") > failures, "no renewal failed"
            )
        finally:
            operator.config_set("maxclients", most)
    before = end_of(name)
    room.until(lambda: end_of(name) > before + SHORT_LEASE / 4, "not renewed")
    assert tasks.crawl.delay(room.path).get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]


def end_of(name: str) -> float:
    """Return when the lease of a lock that is held ends."""
    lock = find_lock(name)
    assert lock is not None, "the lock was lost"
    assert lock.remaining is not None
    return time.monotonic() + lock.remaining


@pytest.mark.long
def test_a_renewer_never_ends(room: Room, site: dict[str, Any]) -> None:
    """A script that never released its lock ends all the same, and its lock with its lease."""
    name = f"script:{room.path}"
    script = (
        "import django; django.setup()\n"
        "from django_celery_safe import cache_lock\n"
        f"lock = cache_lock({name!r}, timeout={SHORT_LEASE})\n"
        "assert lock.acquire()\n"
    )
    assert run_python(script, site=site) == ""
    room.until(lambda: find_lock(name) is None, "somebody renews it", 2 * SHORT_LEASE)


def run_python(script: str, site: dict[str, Any]) -> str:
    """Return what a script prints, in a Python of its own with the settings of the site."""
    command = [sys.executable, "-c", script]
    env = {**os.environ, **settings_environment(site)}
    return subprocess.check_output(command, cwd=ROOT, env=env, timeout=30, text=True)


# --- what bypasses the lock


@pytest.mark.long
def test_beat_bypasses_the_lock(room: Room, redis_server: RedisServer) -> None:
    """A beat with nothing but its schedule, without Django or our tasks, starts no second run."""
    (room.folder / "scheduler.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('scheduler', broker={redis_server.database_url(1)!r})\n"
        "app.conf.beat_schedule = {'often': {\n"
        f"    'task': {tasks.import_feed.name!r}, 'schedule': 0.3, 'args': [{room.path!r}],\n"
        "}}\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "scheduler", "beat", "--loglevel", "INFO"]
    env = {name: text for name, text in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    with KeptProcess(command, folder=room.folder, env=env) as beat:
        room.until(lambda: beat.log.count("Sending due task") >= 4, "beat does not send")
    # Behind whatever beat has sent.
    assert tasks.import_feed.delay(room.path).get(timeout=SOON) is None
    assert len(room.runs()) == 1


def test_send_task_bypasses_the_lock(room: Room) -> None:
    """A task sent by its name meets the lock of one sent by ``delay``, and vice versa."""
    first = app.send_task(tasks.import_feed.name, (room.path,))
    room.until(room.runs, "it did not start")
    named = app.send_task(tasks.import_feed.name, kwargs={"room": room.path})
    assert named.get(timeout=SOON) is None
    assert tasks.import_feed.delay(room.path).get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert len(room.runs()) == 1


# --- canvases


@pytest.mark.parametrize("task", [tasks.import_feed, tasks.export])
def test_a_chain_hangs_on_a_duplicate(task: Any, room: Room) -> None:
    """A chain goes on behind a duplicate, at its begin and in its middle."""
    begin(task, room)
    last = tasks.tell.si("last", room.path)
    assert chain(task.si(room.path), last).apply_async().get(timeout=SOON) == "last"
    middle = chain(tasks.tell.si("first", room.path), task.si(room.path), last)
    assert middle.apply_async().get(timeout=SOON) == "last"
    assert len(room.runs()) == 1


@pytest.mark.parametrize("task", [tasks.import_feed, tasks.export])
def test_a_chord_hangs_on_a_duplicate(task: Any, room: Room) -> None:
    """The body of a chord gets None for a duplicate in its header."""
    begin(task, room)
    header = [task.si(room.path), tasks.tell.si("other", room.path)]
    joined = chord(header, tasks.tell.s(room.path)).apply_async()
    assert joined.get(timeout=SOON) == [None, "other"]
    assert len(room.runs()) == 1


# --- keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1,), {}), ((), {"a": 1})),
        (((1,), {}), ((1, 2), {})),
        (((), {"b": 3, "a": 1}), ((1, 3), {})),
        ((((1, 2),), {}), (([1, 2],), {})),
        ((({1: "x", 2: "y"},), {}), (({"2": "y", "1": "x"},), {})),
    ],
    ids=["by keyword", "default", "order of keywords", "tuple and list", "dict"],
)
def test_keys_differ_for_the_same_call(one: Any, other: Any, room: Room) -> None:
    """The same call in another form is a duplicate, and once the first has ended no more."""
    first = tasks.add.delay(room.path, *one[0], **one[1])
    assert tasks.add.delay(room.path, *other[0], **other[1]).id == first.id
    room.until(room.runs, "it did not start")
    # The worker makes the key of what was sent by name.
    named = app.send_task(tasks.add.name, (room.path, *other[0]), other[1])
    assert named.get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    again = tasks.add.delay(room.path, *other[0], **other[1])
    assert not again.is_duplicate
    assert again.get(timeout=SOON) == [again.id, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), ("1",)),
        ((1,), (True,)),
        ((None,), ("None",)),
        (("x_b-y", "z"), ("x", "y_b-z")),
        (("xb", "y"), ("x", "by")),
    ],
    ids=["number and text", "number and bool", "None and its name", "separators", "joined"],
)
def test_keys_collide(one: Any, other: Any, room: Room) -> None:
    """Calls that are not the same run at the same time."""
    begin(tasks.add, room, *one)
    assert not begin(tasks.add, room, *other).is_duplicate
    assert room.gauge.highest() == 2


# --- to see what happens


def test_a_skip_is_silent(room: Room, worker: CeleryWorker) -> None:
    """The worker's log says which run was skipped, and whose process holds the lock."""
    first = begin(tasks.import_feed, room)
    skipped = tasks.import_feed.delay(room.path)
    assert skipped.get(timeout=SOON) is None
    (line,) = [line for line in worker.log.splitlines() if f"{skipped.id} met the lock" in line]
    for detail in (f"{tasks.import_feed.name}:{room.path}", first.id, str(child_of(room)), "skip"):
        assert detail in line


def test_a_duplicate_is_silent(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    """The sender's result, log and signal say that nothing was sent, and what was before."""
    heard = []

    def hear(**fields: Any) -> None:
        heard.append((fields["sent_id"], fields["published"]))

    first = tasks.export.delay(room.path)
    task_duplicate.connect(hear)
    try:
        with caplog.at_level(logging.INFO, "django_celery_safe"):
            second = tasks.export.delay(room.path)
    finally:
        task_duplicate.disconnect(hear)
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.id == first.id
    assert heard == [(first.id, False)]
    assert f"was sent before, as task {first.id}; nothing was sent" in caplog.text


def test_no_way_to_see_a_lock(room: Room) -> None:
    """``celery_locks`` shows, also to scripts, which task in which process holds a lock."""
    first = begin(tasks.import_feed, room)
    name = f"{tasks.import_feed.name}:{room.path}"
    pid = child_of(room)
    lines = celery_locks().splitlines()
    assert f"run      pid {pid} on " in lines[lines.index(name) + 1]
    assert f"    {first.id}" in lines
    (row,) = [row for row in json.loads(celery_locks("--json")) if row["name"] == name]
    seen = (row["task"], row["task_id"], row["pid"], row["renewed"])
    assert seen == (tasks.import_feed.name, first.id, pid, True)


def test_no_way_to_free_a_lock(room: Room) -> None:
    """The lock of a message that was purged is found by ``celery_locks`` and freed by its name."""
    purged = tasks.export.apply_async((room.path,), queue="purged")
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("purged") == 1
    assert tasks.export.delay(room.path).is_duplicate
    name = f"sent:{tasks.export.name}:{room.path}"
    lines = celery_locks().splitlines()
    assert lines[lines.index(name) + 1].endswith("message  a message")
    assert f"    {purged.id}" in lines
    assert celery_locks("release", name, "--no-input") == f"Released {name}\n"
    room.open()
    sent = tasks.export.delay(room.path)
    assert sent.get(timeout=SOON) == [sent.id, 0]


@pytest.mark.long
def test_clearing_all_locks_at_start_up_deletes_live_ones(
    room: Room, start_other: StartOther, site: dict[str, Any]
) -> None:
    """Nothing that starts or stops frees the lock of a run that goes on."""
    first = begin(tasks.export, room)
    names = [f"{tasks.export.name}:{room.path}", f"sent:{tasks.export.name}:{room.path}"]
    before = [find_lock(name) for name in names]
    other = start_other("start-up")
    script = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('check'); call_command('celery_locks')\n"
    )
    assert names[0] in run_python(script, site=site)
    other.stop()
    after = [find_lock(name) for name in names]
    assert [lock and lock.token for lock in after] == [lock and lock.token for lock in before]
    assert None not in after
    assert tasks.export.delay(room.path).id == first.id
    assert app.send_task(tasks.export.name, (room.path,)).get(timeout=SOON) is None
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert len(room.runs()) == 1


# --- what Celery itself makes of it


def test_ignore_leaves_get_waiting(room: Room) -> None:
    """A skipped run has a result; one that raises Ignore itself leaves no lock to wait behind."""
    begin(tasks.import_feed, room)
    assert tasks.import_feed.delay(room.path).get(timeout=SOON) is None
    ignored = tasks.ignored.delay(room.path)
    room.until(lambda: room.runs(ignored.id), "it did not start")
    room.until(lambda: not tasks.ignored.delay(room.path).is_duplicate, "still a duplicate", SOON)


def test_reject_is_retried_by_autoretry(room: Room) -> None:
    """A rejected duplicate is taken up once and fails, in spite of autoretry_for=(Exception,)."""
    first = begin(tasks.rejected, room)
    duplicate = tasks.rejected.delay(room.path)
    with pytest.raises(Reject, match=first.id):
        duplicate.get(timeout=SOON)
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    # Behind whatever a retry would have sent.
    behind = tasks.rejected.delay(room.path)
    assert behind.get(timeout=SOON) == [behind.id, 0]
    assert room.tries(duplicate.id) == 1


def test_a_retry_inside_atomic_is_lost(room: Room) -> None:
    """``self.retry`` inside ``atomic()`` is sent, though the transaction rolls back."""
    first = tasks.retried_in_atomic.delay(room.path)
    assert first.get(timeout=SOON) == 1
    assert len(room.runs(first.id)) == 2


@pytest.mark.long
def test_a_delay_beyond_the_visibility_timeout_multiplies(
    room: Room, redis_server: RedisServer
) -> None:
    """A run that comes back late runs once, and no second message of it is left."""
    first = begin(tasks.come_back_late, room)
    second = tasks.come_back_late.delay(room.path)
    room.until(lambda: room.tries(second.id) > 2, "it does not come back")
    assert messages(redis_server, second.id) <= 2
    room.open()
    assert first.get(timeout=SOON) == [first.id, 0]
    assert second.get(timeout=SOON) == [second.id, 0]
    room.until(lambda: not messages(redis_server, second.id), "messages are left over", SOON)
    assert len(room.runs(second.id)) == 1
    assert room.gauge.violations() == []


def messages(server: RedisServer, task_id: str) -> int:
    """Return how many messages with this id the broker has, waiting or given out."""
    with server.client(db=1) as client, client.pipeline(transaction=True) as moment:
        waiting, given_out = moment.lrange("celery", 0, -1).hvals("unacked").execute()
    return sum(task_id.encode() in message for message in [*waiting, *given_out])


@pytest.mark.long
def test_a_second_delivery_returns_none(room: Room, redis_server: RedisServer) -> None:
    """A message that comes again while its task runs does not send the chain on with None."""
    linked = chain(tasks.acknowledged_late.si(room.path), tasks.tell.s(room.path)).apply_async()
    first = linked.parent
    room.until(lambda: room.tries(first.id) > 1, "it was not delivered again")
    # The second delivery has been dealt with when its copy comes.
    room.until(lambda: room.tries(first.id) > 2, "it was not sent again")
    assert first.state in {"PENDING", "RETRY"}
    assert room.journal.entries("told") == []
    room.open()
    assert linked.get(timeout=SOON) == [first.id, 0]
    room.until(lambda: not messages(redis_server, first.id), "messages are left over", SOON)
    # At least once: the copy on its way may run as well, when the first has ended.
    room.until(lambda: room.journal.count("told") == len(room.runs()), "not all went on", SOON)
    assert {tuple(entry["value"]) for entry in room.journal.entries("told")} == {(first.id, 0)}
    assert len(room.runs()) <= 2
    assert room.gauge.violations() == []
