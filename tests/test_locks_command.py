"""manage.py celery_locks, on the stores that it has to work on."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from django.core.management.base import OutputWrapper
from pytest_django import Settings

from django_celery_safe import HeldLock, cache_lock, find_lock, iter_locks
from django_celery_safe.leases.holder import (
    Holder,
    describe_arguments,
    read_lock,
)
from django_celery_safe.locks.stores import local, locate
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.management.console import write_array
from tests import commands
from tests.conftest import MakeRedisCache
from tests.processes import dead_port
from tests.processes.settings import settings_environment
from tests.terminal import answer

pytestmark = pytest.mark.usefixtures("store")

ROOT: Final = Path(__file__).resolve().parent.parent
#: Arguments that try to steer the terminal: a colour, a bidirectional override, a new line.
HOSTILE: Final = "('\x1b[31m\u202e\r\n\x9b',)"
ESCAPED: Final = "('\\x1b[31m\\u202e\\r\\n\\x9b',)"


@pytest.fixture
def store(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Where the locks of a test live: in Redis, if the test does not say where."""
    kind: str = getattr(request, "param", "redis")
    if kind in ("redis", "django redis"):
        make_cache: MakeRedisCache = request.getfixturevalue("redis_cache_settings")
        settings.CACHES = make_cache("django-redis" if kind == "redis" else "django")
    elif kind == "portable":
        folder = str(request.getfixturevalue("tmp_path"))
        settings.CACHES = {"default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": folder}}
    elif kind == "database":
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": request.getfixturevalue("db_alias")}
    else:
        local.clear()
    return kind


in_memory: Final = pytest.mark.parametrize("store", ["local"], indirect=True)

run = partial(commands.run_in_80_columns, "celery_locks")
listed = partial(commands.listed, "celery_locks")
refused = partial(commands.refused, "celery_locks")
status_of_program = partial(commands.status_of_program, "celery_locks")


def names(*arguments: str) -> list[str]:
    """Return the names of the locks that ``list`` shows, in its order."""
    return [row["name"] for row in listed(*arguments)]


def take(
    name: str, left: float, age: float = 0.0, *, by: Holder | None = None, **holder: Any
) -> HeldLock:
    """Hold a lock so that ``left`` seconds are left of a lease, as somebody else's."""
    if by is None:
        by = Holder("web1", 4711, time.time() - age)._replace(**holder)
    outcome = locate().store().acquire(name, uuid.uuid4().hex, left, by)
    assert isinstance(outcome, Acquired)
    lock = find_lock(name)
    assert lock is not None
    return lock


@pytest.mark.parametrize(
    "store",
    ["redis", "django redis", "local", pytest.param("database", marks=pytest.mark.sql)],
    indirect=True,
)
def test_each_store_that_lists_its_locks(store: str) -> None:
    """Locks are listed, chosen by task or prefix or both, shown and freed; others stay."""
    take("feed:1", 600, task="feeds.import", arguments="('secret',)")
    take("feed:2", 600, task="feeds.clean")
    take("report", 600, task="feeds.import")
    assert set(names()) == {"feed:1", "feed:2", "report"}
    assert set(names("--task", "feeds.import")) == {"feed:1", "report"}
    assert set(names("--prefix", "feed:")) == {"feed:1", "feed:2"}
    assert names("--task", "feeds.import", "--prefix", "feed:") == ["feed:1"]
    assert names("--task", "feeds") == []
    assert json.loads(run("show", "feed:1", "--json"))["arguments"] == "('secret',)"
    assert run("release", "--prefix", "feed:2", "--no-input") == "Released feed:2\n"
    told = run("release", "--task", "feeds.import", "--no-input")
    assert sorted(told.splitlines()) == ["Released feed:1", "Released report"]
    assert names() == []


# list


def test_list() -> None:
    """A lock is shown with its times, its holder and what that does; a late renewal is marked."""
    assert run() == run("list") == "No lock is held.\n"
    assert run("--task", "shop.tasks.index") == "No such lock is held.\n"
    assert run("--json") == "[]\n"
    task = {"task": "feeds.import", "task_id": "df318cdb-110b-49f6-8ce5-211dc16b2e31"}
    take(
        "feed:1", 7200, 10_800, renewed=True, lease=7260.0, arguments="(1,) {'full': True}", **task
    )
    take("feed:2", 7200, 36_000, renewed=True, lease=30_000.0)
    take(
        "sent:feeds.import:1", 7200, by=Holder("", 0, time.time() - 10_800, **task, arguments="()")
    )
    lines = [line.split() for line in run().splitlines()]
    assert ["3h", "2h+", "run", "pid", "4711", "on", "web1"] in lines
    assert ["10h", "2h!", "run", "pid", "4711", "on", "web1"] in lines
    assert ["3h", "2h", "message", "a", "message"] in lines
    assert ["feeds.import", "(1,)", "{'full':", "True}"] in lines
    assert [task["task_id"]] in lines
    assert lines[-2] == ["3", "lock(s)", "held."]


def test_json() -> None:
    """--json gives one object for each lock in a line of its own, as ``show`` does."""
    with cache_lock("feed:42", timeout=600) as lock:
        for arguments in (("--json",), ("--json", "list")):
            first, line, last = run(*arguments).splitlines()
            assert (first, last) == ("[", "]")
        row = json.loads(line)
        assert list(json.loads(run("show", "feed:42", "--json"))) == list(row)
    assert (row["name"], row["kind"], row["task"]) == ("feed:42", "run", None)
    assert (row["host"], row["pid"]) == (socket.gethostname(), os.getpid())
    assert (row["lease_s"], row["renewed"], row["overdue"]) == (600.0, True, False)
    assert row["fence"] == lock.fence is not None
    assert row["since"].endswith("+00:00")
    assert 0 <= row["age_s"] < 600
    assert 0 < row["remaining_s"] <= 600


def test_places() -> None:
    """Each holder of a lock of several has a line and a name of its own; the last line counts."""
    holder, there = Holder("web1", 4711, time.time()), locate().store()
    for _ in range(3):
        there.acquire("api", uuid.uuid4().hex, 600, holder, limit=4)
    assert run("release", "api", "--no-input").startswith("Released api")
    lines = run().splitlines()
    assert "api: 2 of 4 places held." in lines
    places = [line.rpartition(", ")[2] for line in lines if "pid 4711 on web1, place" in line]
    assert sorted(places) == ["place 2 of 4", "place 3 of 4"]
    rows = {row["name"]: (row["place"], row["limit"]) for row in listed()}
    assert rows == {"api:place:2": (2, 4), "api:place:3": (3, 4)}
    assert set(rows) == {lock.name for lock in iter_locks()}
    others = "Other places of it are held: api:place:2, api:place:3."
    assert f"Nobody holds api. {others}" in refused("show", "api")[1]
    assert refused("release", "api", "--no-input")[0] == f"Nobody holds api\n    {others}\n"
    there.acquire("geo:place:17", uuid.uuid4().hex, 600, holder)
    assert run("show", "geo:place:17").count("1 of 1") == 1
    assert "Other places" not in refused("show", "geo")[1]


def test_json_that_is_not_whole_is_no_json() -> None:
    """If the store falls silent in the middle, what was printed can't be taken for all."""

    def rows() -> Iterator[dict[str, Any]]:
        yield {"name": "feed:1"}
        raise ConnectionError("the server has gone")

    out = io.StringIO()
    with pytest.raises(ConnectionError):
        write_array(OutputWrapper(out), rows())
    assert out.getvalue() == '[\n{"name": "feed:1"}'


# what a terminal shows


def test_nothing_can_steer_the_terminal() -> None:
    """Control characters in any part of a lock are printed as escapes, and all is one lock's."""
    name = "feed:" + HOSTILE
    task = {"task": HOSTILE, "task_id": HOSTILE, "arguments": HOSTILE, "renewed": True}
    taken = take(name, 600, by=Holder(HOSTILE, 1, time.time())._replace(**task))
    outputs = [run(), run("show", name), run("--json")]
    outputs += [*refused("release", name), *refused("show", HOSTILE)]
    outputs.append(run("release", name, "--dry-run", "--force"))
    for text in outputs:
        assert not set("\x1b\u202e\r\x9b") & set(text)
    assert all(text.count(ESCAPED) >= 3 for text in outputs[:2])
    assert str(taken.holder).isprintable()  # as the log tells of a release
    assert listed()[0]["name"] == name
    assert run("release", name, "--force", "--no-input") == f"Released feed:{ESCAPED}\n"
    assert find_lock(name) is None


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash, in which ``$locks`` is the command, and its status any part's."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; locks='{sys.executable} -m django celery_locks'; {line}"],
        cwd=ROOT,
        env={**os.environ, **settings_environment()},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_a_reader_that_goes_away() -> None:
    """It ends the list quietly; release does all that it was told to do, with no output, too."""
    for number in range(500):
        take(f"feed:{number}", 6000)
    ended = shell("$locks | head -1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "LOCK\n", "")
    take("busy", 6000, renewed=True)
    ended = shell("$locks release busy feed:1 --no-input | exec 0<&-; exit ${PIPESTATUS[0]}")
    assert ended.returncode == 1
    assert ended.stderr.endswith("CommandError: 1 of 2 lock(s) were not released.\n")
    assert "Traceback" not in ended.stderr
    assert find_lock("feed:1") is None
    assert find_lock("busy") is not None
    # Without input and output nobody can be asked.
    assert shell("$locks release feed:2 <&- >&- 2>&-").returncode == 1
    assert shell("$locks release feed:2 --no-input <&- >&- 2>&-").returncode == 0
    assert find_lock("feed:2") is None


def test_an_output_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other characters are shown as escapes, also of an argument that was not decoded."""
    name = "caf\u00e9:\u65e5\u672c"
    typed = name.encode().decode("ascii", "surrogateescape")  # as in the locale POSIX
    take(name, 600, task="a.b", arguments="('x\u2026',)")
    for arguments, status in (
        (["list"], 0),
        (["release", typed, "--no-input"], 0),
        (["show", typed], 1),
    ):
        out = io.TextIOWrapper(io.BytesIO(), "ascii")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", out)
            assert status_of_program(*arguments) == status
        out.flush()
        assert "caf\\xe9:\\u65e5\\u672c" in out.buffer.getvalue().decode("ascii")
    assert names() == []


# whether the holder lives


#: What is known of a holder, and words of what ``show`` says of its lease and its life.
HOLDERS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"renewed": True, "lease": 79_200.0}, "20h left of 22h, renewed 2h ago", "lives, or died in"),
    ({"renewed": True, "lease": 270_000.0}, "20h left of 75h, renewed 55h ago", "dead, stopped or"),
    ({"renewed": True, "lease": 30.0}, "20h left, renewed", "lives if the lease begins again from"),
    ({"lease": 79_200.0}, "20h left of 22h, not renewed", "not known, because it does not renew"),
    ({"host": "", "pid": 0, "task_id": "1-2"}, "20h left, not renewed", "a message waits or runs"),
    ({"host": "", "pid": 0, "since": 0.0}, "20h left, not renewed", "not known"),
]


def test_show() -> None:
    """All that is known of a lock is shown, and of its holder's life no more than is known."""
    for number, (holder, lease, life) in enumerate(HOLDERS):
        take(f"feed:{number}", 72_000, 600, **holder)
        page = run("show", f"feed:{number}")
        assert f"lease left  {lease}\n" in page
        assert life in page
        assert ("in 20h at the latest" in page) is ("renewed" not in holder)
    take("feed:42", 7200, 600, task="a.b", task_id="1-2", arguments="(1,)")
    assert [line.split(maxsplit=1) for line in run("show", "feed:42").splitlines()[:6]] == [
        ["feed:42"],
        ["kind", "run"],
        ["task", "a.b"],
        ["arguments", "(1,)"],
        ["task", "id     1-2"],
        ["process", "pid 4711 on web1"],
    ]
    out, why = refused("show", "feed:43")
    assert (out, why.partition(".")[0]) == ("", "Nobody holds feed:43")
    assert status_of_program("show", "feed:43", "--json") == 1


@pytest.mark.parametrize("store", ["portable"], indirect=True)
def test_a_cache_that_can_not_list() -> None:
    """That is said instead of an empty list; a lock is shown and freed by its name."""
    with cache_lock("feed:42", timeout=60):
        page = run("show", "feed:42")
    assert "? left of 60.0s, renewed\n" in page
    assert "when its lease ends; this store can't tell when that is" in page
    take("a", 600)
    for arguments in ((), ("--json",), ("release", "--prefix", "a", "--no-input")):
        out, why = refused(*arguments)
        assert out == ""
        assert re.search(r"can't list its locks.*celery_locks release NAME", why)
        assert status_of_program(*arguments) == 2
    assert run("release", "a", "--no-input") == "Released a\n"
    assert refused("release", "a", "--no-input")[0] == "Nobody holds a\n"


# release


def test_a_renewed_lock_is_left_alone() -> None:
    """Without --force the lock of one that lives is kept, with the reason; others are freed."""
    take("busy", 72_000, renewed=True, lease=79_200.0)
    take("idle", 7200)
    told = run("release", "busy", "idle", "--dry-run", "--force")
    assert told == "Would release busy\nWould release idle\n"
    assert set(names()) == {"busy", "idle"}
    out, why = refused("release", "busy", "idle", "gone", "busy", "--no-input")
    lines = [line for line in out.splitlines() if line[0] != " "]
    assert lines == ["Left alone: busy", "Released idle", "Nobody holds gone"]
    assert "pid 4711 on web1 renewed it 2h ago" in " ".join(out.split())
    assert why == "2 of 3 lock(s) were not released."
    assert names() == ["busy"]
    busy, gone = json.loads(refused("release", "busy", "gone", "--json", "--no-input")[0])
    assert gone == {"name": "gone", "outcome": "not_held", "reason": ""}
    assert (busy["name"], busy["outcome"]) == ("busy", "renewed")
    assert busy["reason"].endswith("Stop that process first, or add --force")
    (freed,) = json.loads(run("release", "busy", "--json", "--force", "--no-input"))
    assert freed == {"name": "busy", "outcome": "released", "reason": ""}
    assert names() == []


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ((), "in one way", 2),
        (("a", "--task", "x"), "in one way", 2),
        (("--task", "x", "--prefix", "a"), "in one way", 2),
        (("--prefix", "", "--no-input"), "An empty --prefix would mean every lock", 2),
        (("--prefix", "", "--dry-run"), "An empty --prefix would mean every lock", 2),
        (("--task", "y"), "No such lock is held, so there was nothing to release.", 1),
        (("a",), "there is no terminal to ask at: nothing was done. Add --no-input", 1),
    ],
)
def test_release_refuses(arguments: tuple[str, ...], words: str, status: int) -> None:
    """A choice that is none, or too much, frees nothing, nor does one without a question."""
    take("a", 600, task="x")
    out, why = refused("release", *arguments)
    assert (out, words in why) == ("", True)
    assert status_of_program("release", *arguments) == status
    assert names() == ["a"]


@in_memory
def test_a_store_that_is_gone_is_said_so(settings: Settings) -> None:
    """A store that does not answer is status 2: neither "free" nor "held by another"."""
    gone = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://127.0.0.1:{dead_port()}/0",
    }
    settings.CACHES = {"default": gone}
    settings.DJANGO_CELERY_SAFE = {}
    for action in ("--json", "show a", "release a"):
        arguments = action.split()
        out, why = refused(*arguments)
        assert (out, "did not answer to " in why) == ("", True)
        assert status_of_program(*arguments) == 2


@in_memory
def test_memory_of_one_process_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody else's locks can be seen, that is said, beside the output."""
    assert status_of_program("--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert err.startswith("Locks live in this process's own memory")


# on a terminal


def test_the_question_shows_what_it_is_about() -> None:
    """release shows the locks, and why others stay; one that changes hands meanwhile stays, too."""
    take("busy", 7200, renewed=True)
    idle = [f"idle:{number}" for number in range(22)]
    first, *_ = [take(name, 7200) for name in idle]

    def read(question: str) -> None:
        assert question.count("\nidle:") == 20
        assert "\n... and 2 more.\n" in question
        assert "Left alone: busy\n" in question
        assert question.endswith("\nRelease 22 lock(s)? [yes/no] ")
        assert len(names()) == 23
        assert locate().store().release(first.name, first.token)
        take(first.name, 600)

    told, why = answer("yes\n", "celery_locks", "release", *idle, "busy", meanwhile=read)
    assert told.count("Released idle:") == 21
    assert "Left alone: idle:0\n    it ended meanwhile, or someone else holds it now.\n" in told
    assert why == "2 of 23 lock(s) were not released."
    assert set(names()) == {"busy", "idle:0"}


def test_only_yes_is_yes() -> None:
    """Any other answer, none, or Ctrl-C frees nothing."""
    take("idle", 600)

    def interrupt(question: str) -> None:
        signal.raise_signal(signal.SIGINT)

    for text, act in (("no\n", str), ("y\n", str), ("\x04", str), ("yes\n", interrupt)):
        why = answer(text, "celery_locks", "release", "idle", meanwhile=act)[1]
        assert (text, why) == (text, "The answer was not 'yes': nothing was done.")
    assert names() == ["idle"]
    assert answer(" YES \n", "celery_locks", "release", "idle")[1] == ""
    assert names() == []


# holders


@in_memory
def test_arguments(settings: Settings) -> None:
    """They are what the message shows, without empty parts, and no longer than 200 characters."""
    for args, kwargs, described in (
        ("('a',)", "{'full': True}", "('a',) {'full': True}"),
        ("('a',)", "{}", "('a',)"),
        ("()", "{}", "()"),
        ("x" * 150, "y" * 150, "x" * 150 + " " + "y" * 48 + "…"),
        (None, None, None),
        (["a"], "{}", None),
    ):
        assert describe_arguments(args, kwargs) == described
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    assert describe_arguments("('a',)", "{}") is None


def test_arguments_that_are_not_to_be_shown(settings: Settings) -> None:
    """With SHOW_ARGUMENTS off, those that another process wrote are shown nowhere either."""
    take("feed:42", 600, task="a.b", arguments="('secret',)")
    assert "secret" in run()
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    outputs = [run(), run("--json"), run("show", "feed:42"), run("show", "feed:42", "--json")]
    assert not [text for text in outputs if "secret" in text]
    assert [lock.holder.arguments for lock in iter_locks()] == [None]


@in_memory
def test_holders_of_other_versions() -> None:
    """Holders of older and newer versions are read; a garbled one leaves a lock unknown."""
    start = '["n","web1",7,1.5,true,"a.b","1-2"'
    for rest, arguments, lease, limit in (
        ("]", None, None, 1),
        (',"(1,)",30.0]', "(1,)", 30.0, 1),
        (',"(1,)",30.0,3,{"new":1}]', "(1,)", 30.0, 3),
    ):
        lock = read_lock("key", "t" * 32 + start + rest)
        assert (lock.name, lock.limit) == ("n", limit)
        assert lock.holder == Holder("web1", 7, 1.5, True, "a.b", "1-2", arguments, lease)
    for rest in (",5,30.0]", ',"(1,)","30"]', ',"(1,)",NaN]', ',"(1,)",30.0,"3"]', ""):
        assert read_lock("key", "t" * 32 + start + rest) == HeldLock("key", "t" * 32)
