"""manage.py celery_locks doctor, as a program: its output, and its exit status."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from pytest_django import Settings

from django_celery_safe import cache_lock
from tests.conftest import MakeRedisCache
from tests.processes import wait_for
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.servers import RedisServer

#: The command line of ``manage.py celery_locks doctor``.
COMMAND = [sys.executable, "-m", "django", "celery_locks", "doctor"]

REDIS_IS_SAFE = """\
ok       store       Locks live in CACHES["default"] (redis).
ok       permissions The server lets this user run every command that locks need.
ok       eviction    Locks live in CACHES["default"] (redis): its maxmemory-policy is noeviction, \
which deletes no lock when its memory is short.
warning  clearing    Locks live in CACHES["default"] (redis), which is emptied along with \
everything else in the project's default cache: one cache.clear() frees every lock while its \
holder works. Name in LOCK_CACHE an alias with a database number (memcached: a server; Redis \
Cluster: a cluster) of its own: \
DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}. If other projects share that, give it a KEY_PREFIX \
too: locks of the same name would exclude each other.
ok       clock       This machine's clock is N s ahead of the store's.
ok       round_trip  To acquire and release takes N ms (median of N; N ms at the Nth percentile).
ok       listing     A lock that is held is listed.
ok       waking      A waiter had the lock N ms after its release (median of N; N ms at the most).
ok       lease       A lock with a lease of N s was free after N s.
ok       exclusion   N processes raced N times for a lock, N times for one whose lease had \
ended and N times for the last of N places; never did two hold one.
ok       fencing     The fence grew with each of N acquisitions.
Locks are safe here; N warning(s).
"""

MEMORY_IS_UNSAFE = """\
warning  store       Locks live in CACHES["default"] (LocMemCache), which every process has for \
itself: two worker processes, or a worker and a web server, get the same lock. Use Redis \
(django-redis or Django's RedisCache) or Valkey (django-valkey), or set LOCK_DATABASE to a \
database alias.
ok       clearing    Nothing else that the project clears takes the locks along.
ok       clock       The store has no clock that could be asked.
ok       round_trip  To acquire and release takes N ms (median of N; N ms at the Nth percentile).
ok       listing     A lock that is held is listed.
ok       waking      A waiter had the lock N ms after its release (median of N; N ms at the \
most): no release wakes it here, it asks again and again.
ok       lease       A lock with a lease of N s was free after N s.
unsafe   exclusion   N processes raced N times for a lock, N times for one whose lease had \
ended and N times for the last of N places: N times two held one lock at once. Keep the \
locks elsewhere. Use Redis (django-redis or Django's RedisCache) or Valkey \
(django-valkey), or set LOCK_DATABASE to a database alias.
ok       fencing     The fence grew with each of N acquisitions.
"""


class Ended:
    """A doctor that has ended."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env={**os.environ, **settings_environment(), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def text(self) -> str:
        """Its output, each finding in one line, and every figure an N."""
        return plain(re.sub(r"\n {21}(?=\S)", " ", self.out))


def plain(text: str) -> str:
    """Return a text without figures, and with one direction of the clock."""
    return re.sub(r"\d+(\.\d+)?", "N", text).replace("behind the store", "ahead of the store")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["django-redis", "django"])
def test_safe(kind: Any, redis_cache_settings: MakeRedisCache, settings: Settings) -> None:
    """On Redis without eviction it says that locks are safe, in 80 columns, and ends with 0."""
    settings.CACHES = redis_cache_settings(kind)
    ended = Ended()
    assert (ended.text, ended.err, ended.status) == (REDIS_IS_SAFE, "", 0)
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.nightly
def test_unsafe() -> None:
    """In local memory it says what is not safe, and ends with 1."""
    ended = Ended()
    said = "CommandError: Locks are not safe here: exclusion.\n"
    assert (ended.text, ended.err, ended.status) == (MEMORY_IS_UNSAFE, said, 1)
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.nightly
def test_json(redis_cache_settings: MakeRedisCache, settings: Settings) -> None:
    """--json prints one object: the verdict on all, and each finding with what was measured."""
    settings.CACHES = redis_cache_settings("django-redis")
    ended = Ended("--json", "--processes", "3")
    printed = json.loads(ended.out)
    checks = {finding["check"]: finding for finding in printed["findings"]}
    assert (printed["verdict"], ended.status, ended.err) == ("warning", 0, "")
    assert list(printed) == ["verdict", "findings"]
    assert {tuple(finding) for finding in printed["findings"]} == {
        ("check", "verdict", "said", "values")
    }
    assert {check: list(finding["values"]) for check, finding in checks.items()} == {
        "store": ["kind", "alias", "where"],
        "permissions": ["refused"],
        "eviction": ["policy", "max_memory_bytes"],
        "clearing": ["emptied_with"],
        "clock": ["offset_s"],
        "round_trip": ["median_ms", "p99_ms", "pairs"],
        "listing": ["listed"],
        "waking": ["promised", "median_ms", "longest_ms"],
        "lease": ["asked_s", "free_after_s"],
        "exclusion": [
            "processes",
            "tries",
            "expired_tries",
            "places_tries",
            "acquired",
            "expired_acquired",
            "places_acquired",
            "overlaps",
            "expired_overlaps",
            "places_overlaps",
            "errors",
        ],
        "fencing": ["acquisitions"],
    }
    assert checks["exclusion"]["values"]["processes"] == 3
    assert checks["eviction"]["values"] == {"policy": "noeviction", "max_memory_bytes": 0}
    said = [
        f"{finding['verdict']:<9}{finding['check']:<12}{finding['said']}\n"
        for finding in printed["findings"]
    ]
    assert plain("".join(said)) == REDIS_IS_SAFE.rpartition("Locks are safe")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_server_that_evicts(
    policy: str, redis_server: RedisServer, redis_cache_settings: MakeRedisCache, settings: Settings
) -> None:
    """A Redis that evicts is unsafe in its text and by the exit status 1."""
    settings.CACHES = redis_cache_settings("django")
    with redis_server.client() as admin:
        admin.config_set("maxmemory-policy", policy)
        try:
            ended = Ended()
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert (ended.err, ended.status) == (
        "CommandError: Locks are not safe here: eviction.\n",
        1,
    )
    assert (
        f'unsafe   eviction    Locks live in CACHES["default"] (redis): its maxmemory-policy is '
        f"{policy}, which deletes locks when its memory is short, and then two processes hold one "
        f"lock. (maxmemory is N: the server deletes nothing before somebody sets it.) Set "
        f"maxmemory-policy to noeviction, give the locks a server of their own, set LOCK_DATABASE, "
        f"or protect what the locks guard by their fence.\n"
    ) in ended.text


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_refused_cache(form: str, settings: Settings, tmp_path: Path) -> None:
    """A cache that can't hold locks is unsafe, and nothing else is said."""
    backend = "django.core.cache.backends.filebased.FileBasedCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": str(tmp_path)}}
    said = (
        'CACHES["default"] (FileBasedCache) can\'t hold locks: its add() is a read and then a '
        "write, so several processes get the same lock, and it drops entries when it is full. Use "
        "Redis (django-redis or Django's RedisCache) or Valkey (django-valkey), or set "
        "LOCK_DATABASE to a database alias."
    )
    ended = Ended(*(["--json"] if form == "json" else []))
    assert ended.err == "CommandError: Locks are not safe here: store.\n"
    assert ended.status == 1
    if form == "plain":
        assert ended.text == f"unsafe   store       {said}\n"
    else:
        where = 'CACHES["default"] (FileBasedCache)'
        values = {"kind": "cache", "alias": "default", "where": where}
        finding = {"check": "store", "verdict": "unsafe", "said": said, "values": values}
        assert json.loads(ended.out) == {"verdict": "unsafe", "findings": [finding]}


def test_a_server_that_is_down(settings: Settings, memcached_cache_settings: Any) -> None:
    """A store that could not be asked is neither safe nor unsafe: the exit status is 2."""
    settings.CACHES = memcached_cache_settings()
    settings.CACHES["default"]["LOCATION"] = "127.0.0.1:1"
    ended = Ended()
    assert (ended.err, ended.status) == (
        "CommandError: Whether locks are safe here is not known: store.\n",
        2,
    )
    assert ended.text == (
        'unknown  store       Locks live in CACHES["default"] (memcached), which could not be '
        "asked to acquire (ConnectionRefusedError: [Errno N] Connection refused). Check that the "
        "server is up and reachable, and lets this user ask it.\n"
    )


@pytest.mark.nightly
def test_keys_of_any_type_in_settings(
    redis_cache_settings: MakeRedisCache, settings: Settings, tmp_path: Path
) -> None:
    """A cache's settings may have keys of several types; processes are seen to share them."""
    settings.CACHES = redis_cache_settings("django")
    (tmp_path / "mixed.py").write_text(
        "from tests.settings import *\n"
        "CACHES['default']['SHARDS'] = [{1: 2, 'a': 3, None: 4, (5, 6): 7, b'c': 8}]\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = Ended(DJANGO_SETTINGS_MODULE="mixed", PYTHONPATH=path)
    assert (ended.text, ended.err, ended.status) == (REDIS_IS_SAFE, "", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("number", ["1", "65", "two", "-2"])
def test_processes_out_of_range(number: str) -> None:
    """A race needs two processes, and a machine does not bear any number of them."""
    ended = Ended(f"--processes={number}")
    assert ended.status == 2
    assert f"argument --processes: '{number}' is not a whole number from 2 to 64" in ended.err


class Racing(NamedTuple):
    """A doctor in the middle of a race, and the processes that it started."""

    process: "subprocess.Popen[str]"
    children: list[psutil.Process]


@pytest.fixture
def racing(
    redis_server: RedisServer, redis_cache_settings: MakeRedisCache, settings: Settings
) -> Iterator[Racing]:
    """A doctor in the middle of a race."""
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
        children: list[psutil.Process] = []
        try:
            wait_for(lambda: client.keys("*:exclusion"), 30)
            children += psutil.Process(doctor.pid).children()
            assert len(children) == 2
            yield Racing(doctor, children)
        finally:
            doctor.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.mark.nightly
def test_ctrl_c(racing: Racing, redis_server: RedisServer) -> None:
    """Ctrl-C in the middle of a race leaves no process and no key, whatever place was held."""
    with redis_server.client() as client:
        (places,) = client.keys("*:places")
    name = places.decode().removeprefix(":1:celery_safe:lock:")
    # As a process does that is killed while it holds the second place.
    wait_for(cache_lock(name, limit=2, timeout=60, renew=False).acquire, 10)
    os.killpg(racing.process.pid, signal.SIGINT)  # as a terminal does: the children get it too
    assert racing.process.wait(60) == 130
    assert all(map(is_gone, racing.children))
    assert racing.process.stderr is not None
    said = "CommandError: Stopped; nothing of the examination is left.\n"
    assert racing.process.stderr.read() == said
    with redis_server.client() as client:
        assert client.keys("*") == [b":1:celery_safe:fence"]


@pytest.mark.nightly
def test_killed(racing: Racing, redis_server: RedisServer) -> None:
    """A doctor that is killed takes its processes along, be it that the server says nothing."""
    redis_server.pause()
    try:
        racing.process.kill()
        racing.process.wait()
        # Before a client gives up to wait for the server.
        wait_for(lambda: all(map(is_gone, racing.children)), 30)
    finally:
        redis_server.resume()


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_reader_that_goes_away(
    redis_server: RedisServer, redis_cache_settings: MakeRedisCache, settings: Settings
) -> None:
    """Findings come one by one; when nobody reads them any more, nothing is left."""
    settings.CACHES = redis_cache_settings("django-redis")
    with subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env={**os.environ, **settings_environment(), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as doctor:
        assert doctor.stdout is not None
        assert doctor.stderr is not None
        assert doctor.stdout.readline() == REDIS_IS_SAFE.splitlines(keepends=True)[0]
        assert doctor.poll() is None
        doctor.stdout.close()
        assert doctor.wait(30) == 2
        said = "CommandError: The reader of the output has gone, so the examination was stopped.\n"
        assert doctor.stderr.read() == said
    with redis_server.client() as client:
        assert set(client.keys("*")) <= {b":1:celery_safe:fence"}
