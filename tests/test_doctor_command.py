"""manage.py celery_locks doctor: its output, and its exit status."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytest_django import Settings

from tests import commands
from tests.conftest import MakeRedisCache
from tests.processes import wait_for
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.servers import RedisServer

#: The command line of ``manage.py celery_locks doctor``.
COMMAND = [sys.executable, "-m", "django", "celery_locks", "doctor"]

refused = partial(commands.refused, "celery_locks", "doctor")
status_of_program = partial(commands.status_of_program, "celery_locks", "doctor")


def test_a_refused_cache(settings: Settings, tmp_path: Path) -> None:
    """A cache that can't hold locks is unsafe, status 1, and nothing else is said."""
    backend = "django.core.cache.backends.filebased.FileBasedCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": str(tmp_path)}}
    out, why = refused()
    assert out.startswith('unsafe   store       CACHES["default"] (FileBasedCache) can\'t hold')
    assert max(map(len, out.splitlines())) <= 80
    assert why == "Locks are not safe here: store."
    assert status_of_program() == 1
    printed = json.loads(refused("--json")[0])
    (finding,) = printed["findings"]
    assert (printed["verdict"], finding["check"], finding["verdict"]) == (
        "unsafe", "store", "unsafe",
    )  # fmt: skip
    assert " ".join(out.split()[2:]) == finding["said"]
    assert finding["values"]["where"] == 'CACHES["default"] (FileBasedCache)'


def test_a_server_that_is_down(settings: Settings, memcached_cache_settings: Any) -> None:
    """A store that could not be asked is neither safe nor unsafe: the exit status is 2."""
    settings.CACHES = memcached_cache_settings()
    settings.CACHES["default"]["LOCATION"] = "127.0.0.1:1"
    out, why = refused()
    assert out.startswith("unknown  store       ")
    assert why == "Whether locks are safe here is not known: store."
    assert status_of_program() == 2


def test_processes_out_of_range() -> None:
    """A race needs two processes, and a machine does not bear any number of them."""
    for number in ("1", "65", "two", "-2"):
        why = refused(f"--processes={number}")[1]
        assert f"argument --processes: '{number}' is not a whole number from 2 to 64" in why


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle(
    number: signal.Signals,
    redis_server: RedisServer,
    redis_cache_settings: MakeRedisCache,
    settings: Settings,
) -> None:
    """Ctrl-C leaves no process and no key; a killed doctor takes its processes along."""
    settings.CACHES = redis_cache_settings("django-redis")
    with (
        subprocess.Popen(
            COMMAND,
            cwd=ROOT,
            env={**os.environ, **settings_environment()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as doctor,
        redis_server.client() as client,
    ):
        wait_for(lambda: client.keys("*:exclusion"), 30)
        children = psutil.Process(doctor.pid).children()
        assert len(children) == 2
        try:
            if number == signal.SIGINT:
                os.killpg(doctor.pid, number)  # as a terminal does: the children get it too
                assert doctor.wait(60) == 130
                assert client.keys("*") == [b":1:celery_safe:fence"]
            else:
                redis_server.pause()
                doctor.kill()
                doctor.wait()
            # Before a client gives up to wait for the server.
            wait_for(lambda: all(map(is_gone, children)), 30)
        finally:
            redis_server.resume()
            doctor.kill()


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
