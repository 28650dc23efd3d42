"""The processes of the harness: their arguments, results and remains; and the oracles."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from celery import Celery
from django.conf import settings as django_settings

from tests.processes import CeleryWorker, Gauge, Journal, wait_for
from tests.processes.functions import FunctionFailed, meet, run_in_processes, start_in_process, tell
from tests.servers import RedisServer

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]


def test_wait_for_returns_what_became_true() -> None:
    """Waiting ends with the first true value, which is returned."""
    values = iter([None, 0, "done"])
    assert wait_for(lambda: next(values)) == "done"


def test_wait_for_says_what_did_not_happen() -> None:
    """Waiting in vain raises the message given."""
    with pytest.raises(TimeoutError, match=r"After 0\.05 s: nothing came"):
        wait_for(lambda: False, 0.05, "nothing came")


def look_around() -> tuple[int, Any, Any]:
    """Return this process, and a setting that the test changed."""
    return os.getpid(), django_settings.DJANGO_CELERY_SAFE, django_settings.CACHES["other"]


def test_processes_get_the_settings_of_the_test(settings: "Settings") -> None:
    """Each process is another one, and reads the settings that the test changed."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 5}
    settings.CACHES = {**settings.CACHES, "other": {"BACKEND": "somewhere"}}
    results = run_in_processes(look_around, 3)
    assert len({pid for pid, *_ in results} | {os.getpid()}) == 4
    assert {pid: rest for pid, *rest in results} == {
        pid: [{"LOCK_TIMEOUT": 5}, {"BACKEND": "somewhere"}] for pid, *_ in results
    }


def test_processes_get_settings_of_their_own() -> None:
    """Settings given for the processes go on top; this process keeps its own."""
    ours = dict(django_settings.CACHES)
    changes = {
        "CACHES": {"other": {"BACKEND": "somewhere"}},
        "DJANGO_CELERY_SAFE": {"OUTBOX": True},
    }
    [(_, options, cache)] = run_in_processes(look_around, 1, settings=changes)
    assert (options, cache) == ({"OUTBOX": True}, {"BACKEND": "somewhere"})
    assert ours == django_settings.CACHES


def fail_in_one(journal: Journal) -> None:
    """Raise in the process that comes first, and wait for all in the others."""
    try:
        os.close(os.open(journal.path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        meet()
    else:
        raise LookupError("the first one fails")


def test_an_error_comes_back_with_its_traceback(tmp_path: Path) -> None:
    """The error of one process ends all at once and shows where it was raised."""
    with pytest.raises(FunctionFailed, match=r"fail_in_one(.|\n)*the first one fails"):
        run_in_processes(fail_in_one, 4, Journal(tmp_path / "first"))


def sleep_long() -> None:
    """Say that this process sleeps, and sleep longer than any test."""
    tell("asleep")
    time.sleep(300)


def test_slow_processes_are_ended() -> None:
    """Processes that run too long are an error."""
    with pytest.raises(TimeoutError, match="2 of 2 processes"):
        run_in_processes(time.sleep, 2, 300, timeout=1)


def test_a_killed_process_is_noticed() -> None:
    """A function whose process is killed has no result, and says how it ended."""
    with start_in_process(sleep_long) as sleeper:
        assert sleeper.receive() == "asleep"
        sleeper.kill()
        with pytest.raises(FunctionFailed, match="status -9"):
            sleeper.result()


def tick() -> None:
    """Tell the time for ever."""
    while True:
        tell(time.monotonic())
        time.sleep(0.01)


def test_a_paused_process_does_nothing() -> None:
    """A process stopped by SIGSTOP stands still until it is resumed."""
    with start_in_process(tick) as ticker:
        ticker.receive()
        ticker.pause()
        with pytest.raises(TimeoutError):
            # The first of these still get what was told before the pause.
            [ticker.receive(timeout=0.2) for _ in range(1000)]
        paused_at = time.monotonic()
        assert ticker.running
        ticker.resume()
        assert ticker.receive() > paused_at


def test_a_process_ends_with_the_block() -> None:
    """A function that still runs when its block ends is killed."""
    with start_in_process(sleep_long) as sleeper:
        sleeper.receive()
    assert not psutil.pid_exists(sleeper.pid)


def enter_together(gauge: Gauge) -> int:
    """Be in one section with all other processes."""
    with gauge.inside("shared") as number:
        meet()
    with gauge.inside(f"private {os.getpid()}"):
        pass
    return number


def test_a_gauge_sees_who_is_inside_together(tmp_path: Path) -> None:
    """The gauge records how many were in one section at once, each section by itself."""
    gauge = Gauge(tmp_path)
    assert sorted(run_in_processes(enter_together, 4, gauge))[-1] == 4
    assert gauge.highest("shared") == gauge.highest() == 4
    assert gauge.entered("shared") == 4
    assert gauge.entered() == 8
    assert {entry["section"] for entry in gauge.violations()} == {"shared"}


def stay_inside(gauge: Gauge) -> None:
    """Enter the section and never leave it."""
    gauge.enter()
    sleep_long()


def test_a_gauge_does_not_count_the_dead(tmp_path: Path) -> None:
    """A killed process is out of the room; a paused one is still in."""
    gauge = Gauge(tmp_path)
    with start_in_process(stay_inside, gauge) as stayer:
        stayer.receive()
        stayer.pause()
        with gauge.inside() as number:
            assert number == 2
        stayer.kill()
        with gauge.inside() as number:
            assert number == 1


def write_many(journal: Journal) -> None:
    """Write a hundred lines together with the others."""
    for number in range(100):
        journal.write("line", number=number, padding="x" * 500)


def test_a_journal_loses_no_line(tmp_path: Path) -> None:
    """Lines that processes write at once all arrive, whole, with their process."""
    journal = Journal(tmp_path / "journal")
    run_in_processes(write_many, 4, journal)
    assert journal.count("line") == 400
    assert set(journal.tally("number").values()) == {4}
    assert set(journal.tally("pid").values()) == {100}
    assert journal.count("line", number=7) == 4
    assert journal.count("other") == 0
    with journal.path.open("a") as file:
        file.write('{"effect": "line", "numb')  # another process is writing it just now
    assert journal.count("line") == 400


APP = """
import os, time
from celery import Celery
from pathlib import Path
from tests.processes import Journal

app = Celery("worker_app", broker=os.environ["WORKER_BROKER"])
journal = Journal(Path(os.environ["WORKER_JOURNAL"]))

@app.task
def work(seconds):
    from django.conf import settings
    journal.write("began", options=settings.DJANGO_CELERY_SAFE)
    time.sleep(seconds)
    journal.write("ended")
"""


@dataclass
class Work:
    """A Celery app for workers only; here there is just its broker, and what it wrote."""

    sender: Celery
    journal: Journal

    def send(self, seconds: float) -> None:
        """Send a task that takes this long."""
        self.sender.send_task("worker_app.work", (seconds,))


@pytest.fixture
def work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> Iterator[Work]:
    """A Celery app over Redis that workers can import, and whose tasks write a journal."""
    redis_server.flush()
    (tmp_path / "worker_app.py").write_text(APP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("WORKER_BROKER", redis_server.url)
    monkeypatch.setenv("WORKER_JOURNAL", str(tmp_path / "journal"))
    # Imported here, the app would be a second one in this process for other tests to meet.
    with Celery(broker=redis_server.url, set_as_current=False) as sender:
        yield Work(sender, Journal(tmp_path / "journal"))


def test_a_worker_stops_warm(work: Work, settings: "Settings") -> None:
    """A real worker has the test's settings, and ends what it began when asked to stop."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 5}
    with CeleryWorker("worker_app", concurrency=1) as worker:
        assert len(worker.children()) == 1
        work.send(0.5)
        wait_for(lambda: work.journal.count("began"))
        worker.stop()
        assert work.journal.count("ended") == 1
        assert "Warm shutdown" in worker.log
    assert work.journal.entries("began")[0]["options"] == {"LOCK_TIMEOUT": 5}


def test_a_killed_worker_leaves_no_child(work: Work) -> None:
    """Killing a worker kills its children in the middle of their tasks."""
    with CeleryWorker("worker_app", concurrency=2) as worker:
        work.send(60)
        wait_for(lambda: work.journal.count("began"))
        pids = [worker.pid, *(child.pid for child in worker.children())]
        worker.kill()
        assert len(pids) == 3
        assert not any(map(psutil.pid_exists, pids))
    assert work.journal.count("ended") == 0


def test_a_worker_that_can_not_start_says_why() -> None:
    """A worker that ends at once is an error with its log."""
    with (
        pytest.raises(RuntimeError, match="no_such_module was not found"),
        CeleryWorker("no_such_module"),
    ):
        pass


SURVIVOR = """
import sys, time
from tests.processes import CeleryWorker, start_in_process
from tests.test_processes import sleep_long
import django; django.setup()
with CeleryWorker("worker_app") as worker, start_in_process(sleep_long) as sleeper:
    sleeper.receive()
    print(worker.pid, *(child.pid for child in worker.children()), sleeper.pid, flush=True)
    time.sleep(60)
"""


def test_a_killed_test_run_leaves_no_process(work: Work) -> None:
    """When the tests are killed by SIGKILL, their workers and functions end too."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    with subprocess.Popen(
        [sys.executable, "-c", SURVIVOR], env=environment, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        tests.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 40, f"one of {pids} lives")
    assert len(pids) == 4


def test_no_thread_is_left() -> None:
    """Running functions in processes leaves no thread behind in the tests."""
    before = set(threading.enumerate())
    run_in_processes(os.getpid, 2)
    assert not set(threading.enumerate()) - before
