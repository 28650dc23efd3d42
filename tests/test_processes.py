"""The processes of the harness: their arguments, results and remains; and the oracles."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import Gauge, Journal, wait_for
from tests.processes.functions import FunctionFailed, meet, run_in_processes, start_in_process, tell
from tests.servers import PostgresServer, RedisServer

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]


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


SURVIVOR = """
import time
import django; django.setup()
from tests.processes import CeleryWorker, start_in_process
from tests.servers import PostgresServer, RedisServer
from tests.test_processes import sleep_long
redis, postgres = RedisServer(), PostgresServer()
redis.start()
postgres.start()
worker = CeleryWorker("tests.app", settings={"CELERY_BROKER_URL": redis.url})
with worker, start_in_process(sleep_long) as sleeper:
    sleeper.receive()
    postgres.pause()
    print(redis.pid, postgres.pid, worker.pid, *(child.pid for child in worker.children()),
          sleeper.pid, redis.folder, postgres.folder, flush=True)
    time.sleep(60)
"""


def test_a_killed_test_run_leaves_nothing(
    redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    """When the tests are killed, their servers, paused ones too, workers and functions end."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    with subprocess.Popen(
        [sys.executable, "-c", SURVIVOR],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    ) as tests:  # fmt: skip
        assert tests.stdout is not None
        *pids, redis_folder, postgres_folder = tests.stdout.readline().split()
        tests.send_signal(signal.SIGKILL)
    assert len(pids) == 6
    wait_for(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), 40, f"{pids} live")
    wait_for(lambda: not Path(redis_folder).exists() and not Path(postgres_folder).exists())
