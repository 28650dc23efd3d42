"""manage.py celery_locks, on the stores that it has to work on."""

import io
import json
import os
import socket
import time
import uuid
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from pytest_django import Settings

from django_celery_safe import HeldLock, cache_lock, find_lock
from django_celery_safe.locks.stores import local
from django_celery_safe.locks.stores.base import Holder
from django_celery_safe.management.commands.celery_locks import HEADING, as_lines
from tests.conftest import MakeDatabase, MakeRedisCache

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(params=["redis", "memcached", "database", "local"])
def store(request: pytest.FixtureRequest, settings: Settings) -> None:
    """Locks in Redis, in memcached, in a database, in local memory; or where none are listed."""
    if request.param == "redis":
        make_cache: MakeRedisCache = request.getfixturevalue("redis_cache_settings")
        settings.CACHES = make_cache("django-redis")
    elif request.param == "memcached":
        settings.CACHES = request.getfixturevalue("memcached_cache_settings")()
    elif request.param == "portable":
        folder = str(request.getfixturevalue("tmp_path"))
        settings.CACHES = {"default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": folder}}
    elif request.param == "database":
        make_database: MakeDatabase = request.getfixturevalue("make_database")
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": make_database("sqlite-immediate")}
    else:
        local.clear()


def run(*arguments: str) -> str:
    """Return what the command prints."""
    out = io.StringIO()
    call_command("celery_locks", *arguments, stdout=out)
    return out.getvalue()


def test_nothing_held() -> None:
    """Without a lock the list says so, and JSON is an empty list."""
    assert run() == "No lock is held.\n"
    assert run("list") == "No lock is held.\n"
    assert json.loads(run("--json")) == []


def test_the_table() -> None:
    """Each lock shows its name, how long it is held, what is left and who holds it."""
    with cache_lock("feed:42", timeout=60):
        output = run()
    heading, columns, name, details, total = output.splitlines()
    assert (heading, name, total) == (
        "LOCK",
        "feed:42",
        "1 lock(s) held; + means that the holder renews the lease.",
    )
    assert columns.split() == ["HELD", "LEFT", "HOLDER", "TASK", "ID"]
    held, left, *holder, task = details.split()
    assert held.endswith("s")
    assert left.endswith("s+")
    assert " ".join(holder) == f"{socket.gethostname()} pid {os.getpid()}"
    assert task == "-"


def test_a_line_fits_80_columns() -> None:
    """A holder with a long process id and a task's id fit a terminal of 80 columns."""
    holder = Holder("web1", 1234567, time.time() - 99, True, "task", str(uuid.uuid4()))
    lines = as_lines(HeldLock("feed:42", "token", 99.94, 1, holder)).splitlines()
    assert [len(line) <= 80 for line in [*lines, *HEADING.splitlines()]] == [True] * 4


def test_json() -> None:
    """--json gives one object for each lock, before or after the action's name."""
    with cache_lock("feed:42", timeout=60, renew=False) as lock:
        for arguments in (("--json",), ("list", "--json")):
            (row,) = json.loads(run(*arguments))
            assert {**row, "since": "", "age_s": 0, "remaining_s": 0} == {
                "name": "feed:42",
                "task": None,
                "task_id": None,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": "",
                "age_s": 0,
                "remaining_s": 0,
                "renewed": False,
                "fence": lock.fence,
            }
            assert 50 < row["remaining_s"] <= 60


def test_names_can_not_steer_the_terminal() -> None:
    """Control characters in a name are printed as escapes, and the name is as good as any."""
    name = "\x1b[31mred\n\x00"
    assert cache_lock(name).acquire()
    assert "\\x1b[31mred\\n\\x00" in run()
    assert "\x1b" not in run()
    assert run("release", name).startswith("Released \\x1b")
    assert find_lock(name) is None


def test_release_frees_by_name() -> None:
    """release frees the named locks and leaves the others."""
    locks = [cache_lock(name) for name in ("a", "b", "c")]
    assert all(lock.acquire() for lock in locks)
    assert run("release", "a", "b") == "Released a\nReleased b\n"
    assert [row["name"] for row in json.loads(run("--json"))] == ["c"]


def test_release_of_what_nobody_holds_fails() -> None:
    """release says which names were not held, frees the rest, and its exit status is 1."""
    lock = cache_lock("a")
    assert lock.acquire()
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"1 of 2 lock\(s\) were not held"):
        call_command("celery_locks", "release", "a", "b", stdout=out)
    assert out.getvalue() == "Released a\nNobody holds b\n"


def test_release_as_json() -> None:
    """release --json says for each name whether it was released."""
    lock = cache_lock("a")
    assert lock.acquire()
    assert json.loads(run("release", "a", "--json")) == {"released": {"a": True}}


def test_a_store_that_is_gone_is_said_so(settings: Settings) -> None:
    """A cache that does not answer is an error, not an empty list."""
    settings.CACHES = {
        **settings.CACHES,
        "gone": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://127.0.0.1:1/0",
        },
    }
    with pytest.raises(CommandError, match="did not answer to list"):
        run("--cache", "gone")


def test_help_reads_well(capsys: Any) -> None:
    """--help names the actions."""
    with pytest.raises(SystemExit):
        run("--help")
    assert "list,release" in capsys.readouterr().out


def test_the_note_of_a_message_is_no_unknown_holder() -> None:
    """The note that a task's copy is on its way is shown as such, with the task's id."""
    holder = Holder(since=time.time(), task="task", task_id=str(uuid.uuid4()))
    _, details = as_lines(HeldLock("task:copy:id", "token", 99.94, 1, holder)).splitlines()
    assert "message under way" in details
    assert details.endswith(str(holder.task_id))
    assert len(details) <= 80


def test_a_long_name_is_cut() -> None:
    """The table shows the begin of a very long name, and how long it is; JSON shows all."""
    lock = cache_lock("x" * 10_000)
    assert lock.acquire()
    assert "xxx... (10000 characters; --json shows all)" in run()
    assert json.loads(run("--json"))[0]["name"] == lock.name


@pytest.mark.parametrize("store", ["portable"], indirect=True)
def test_a_cache_that_can_not_list_says_so() -> None:
    """Where locks can't be listed, that is said instead of an empty list; one is freed by name."""
    lock = cache_lock("a")
    assert lock.acquire()
    for arguments in ((), ("list",), ("--json",)):
        with pytest.raises(CommandError, match=r"can't list its locks.*celery_locks release NAME"):
            run(*arguments)
    assert run("release", "a") == "Released a\n"
    assert find_lock("a") is None
    with pytest.raises(CommandError, match="not held"):
        run("release", "a")
