"""manage.py celery_locks, on the stores that it has to work on."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from django.core.management import CommandError, call_command
from pytest_django import Settings

from django_celery_safe import HeldLock, cache_lock, find_lock, iter_locks
from django_celery_safe.inspection.locks import LockRow
from django_celery_safe.leases.holder import (
    Holder,
    describe_arguments,
    is_overdue,
    read_lock,
    seconds_since_renewal,
)
from django_celery_safe.locks.stores import local, locate
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.management.commands.celery_locks import HEADING, LEGEND
from django_celery_safe.management.console import as_text
from tests import commands
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.processes import dead_port, start_in_process, tell, wait_for
from tests.processes.settings import settings_environment
from tests.terminal import answer, on_terminal

pytestmark = pytest.mark.usefixtures("store")

ROOT: Final = Path(__file__).resolve().parent.parent
#: The output after any answer but yes.
REFUSED = "The answer was not 'yes': nothing was done."
#: Seconds until a process must have done what is waited for.
PATIENCE: Final = 120
#: Where nothing depends on the store.
in_redis: Final = pytest.mark.parametrize("store", ["redis"], indirect=True)
#: Patterns of texts that differ from one run to the next.
FENCE: Final = re.compile(r"\b\d{16}\b")
#: The columns of a lock that is young.
TIMES: Final = re.compile(r" +\d+\.\ds +\d+\.\ds  ")
TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
#: Arguments that try to steer the terminal: a colour, a bidirectional override, a new line.
HOSTILE: Final = "('\x1b[31m\u202e\r\n\x9b',)"
ESCAPED: Final = "('\\x1b[31m\\u202e\\r\\n\\x9b',)"

#: Stores that list their locks.
KINDS: Final = ["redis", "django redis", "sqlite", "postgres", "local"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Where the locks of a test live: every store that can list them, and one that can't."""
    kind: str = request.param
    if kind in ("redis", "django redis"):
        make_cache: MakeRedisCache = request.getfixturevalue("redis_cache_settings")
        settings.CACHES = make_cache("django-redis" if kind == "redis" else "django")
    elif kind == "memcached":
        settings.CACHES = request.getfixturevalue("memcached_cache_settings")()
    elif kind == "portable":
        folder = str(request.getfixturevalue("tmp_path"))
        settings.CACHES = {"default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": folder}}
    elif kind in ("sqlite", "postgres"):
        make_database: MakeDatabase = request.getfixturevalue("make_database")
        alias = make_database("postgres" if kind == "postgres" else "sqlite-immediate")
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    else:
        local.clear()
    return kind


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


def masked(text: str) -> str:
    """Return a text without what differs from one run to the next."""
    return TIME.sub("<time>", FENCE.sub("F" * 16, text))


def fence_of(kind: str) -> str:
    """Return a fence as :func:`masked` leaves it."""
    return "F" * 16


# list


def test_nothing_held() -> None:
    """Without a lock the list says so, and JSON is an empty list."""
    assert run() == "No lock is held.\n"
    assert run("list") == "No lock is held.\n"
    assert run("--json") == "[]\n"
    assert run("--task", "shop.tasks.index") == "No such lock is held.\n"
    assert run("list", "--prefix", "feed:") == "No such lock is held.\n"


def test_the_table(store: str) -> None:
    """Each lock shows its name, its times, its holder and what that does, and nothing else."""
    task = {"task": "feeds.import", "task_id": "df318cdb-110b-49f6-8ce5-211dc16b2e31"}
    take("feed:1", 7200, 180, renewed=True, lease=7260.0, arguments="(1,) {'full': True}", **task)
    take("feed:2", 7200, 36_000, renewed=True, lease=30_000.0)
    message = Holder("", 0, time.time() - 180, **task, arguments="()")
    take("sent:feeds.import:1", 7200, by=message)
    blocks = {
        "feed:1": (
            "       3min       2h+  run      pid 4711 on web1\n"
            "    feeds.import (1,) {'full': True}\n"
            "    df318cdb-110b-49f6-8ce5-211dc16b2e31\n"
        ),
        "feed:2": "        10h       2h!  run      pid 4711 on web1\n",
        "sent:feeds.import:1": (
            "       3min        2h  message  a message\n"
            "    feeds.import ()\n"
            "    df318cdb-110b-49f6-8ce5-211dc16b2e31\n"
        ),
    }
    heading = "LOCK\n       HELD      LEFT  KIND     HOLDER\n    TASK AND ARGUMENTS\n    TASK ID\n"
    legend = "+: its holder renews the lease. !: that is overdue, so the holder may be dead.\n"
    for name, block in blocks.items():
        assert run("--prefix", name) == f"{heading}{name}\n{block}1 lock(s) held.\n{legend}"
    text = run()
    assert (text.startswith(heading), text.endswith(f"3 lock(s) held.\n{legend}")) == (True, True)
    assert all(f"{name}\n{block}" in text for name, block in blocks.items())


def test_json(store: str) -> None:
    """--json gives one object for each lock in a line of its own, before or after the action."""
    with cache_lock("feed:42", timeout=600) as lock:
        for arguments in (("--json",), ("list", "--json"), ("--json", "list")):
            first, line, last = run(*arguments).splitlines()
            assert (first, last) == ("[", "]")
            row = json.loads(line)
            times = {key: row.pop(key) for key in ("since", "age_s", "remaining_s", "renewed_s")}
            assert row == {
                "name": "feed:42",
                "kind": "run",
                "task": None,
                "arguments": None,
                "task_id": None,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "lease_s": 600.0,
                "renewed": True,
                "overdue": False,
                "fence": lock.fence,
                "place": 1,
                "limit": 1,
            }
            assert times["since"].endswith("+00:00")
            assert 0 <= times["age_s"] < 60
            assert 540 < times["remaining_s"] <= 600
            assert 0 <= times["renewed_s"] < 60
            assert lock.fence is not None


def test_only_some() -> None:
    """--task and --prefix narrow the list, each and both."""
    take("feed:1", 60, task="feeds.import")
    take("feed:2", 60, task="feeds.clean")
    take("report", 60, task="feeds.import")
    assert set(names()) == {"feed:1", "feed:2", "report"}
    assert set(names("--task", "feeds.import")) == {"feed:1", "report"}
    assert set(names("--prefix", "feed:")) == {"feed:1", "feed:2"}
    assert names("--task", "feeds.import", "--prefix", "feed:") == ["feed:1"]
    assert names("--task", "feeds") == []
    assert "\n1 lock(s) held." in run("--task", "feeds.clean")


def test_markers_are_shown_if_asked_for() -> None:
    """Markers of copies and deaths are listed, and released by task or prefix, only with --all."""
    message = {"host": "", "pid": 0, "task": "feeds.import", "task_id": "1-2"}
    markers = {f"feeds.import:{kind}:1-2:0.0" for kind in ("copy", "claim_copy", "ended")}
    for name in (*markers, "sent:feeds.import:1"):
        take(name, 60, **message)
    # A death has the process that died for a holder.
    markers.add("feeds.import:death:1-2:1")
    take("feeds.import:death:1-2:1", 60, task="feeds.import", task_id="1-2")
    take("feeds.import:copy:1", 60, task="feeds.import", task_id="1-2")  # a run of that key
    assert {row["name"]: row["kind"] for row in listed()} == {
        "sent:feeds.import:1": "message",
        "feeds.import:copy:1": "run",
    }
    assert {row["name"] for row in listed("--all") if row["kind"] == "marker"} == markers
    assert "       0.0s     60.0s  marker   a message\n" in TIMES.sub(
        "       0.0s     60.0s  ", run("--all", "--prefix", "feeds.import:ended:")
    )
    run("release", "--task", "feeds.import", "--no-input")
    assert set(names("--all")) == markers
    run("release", "--task", "feeds.import", "--all", "--no-input")
    assert names("--all") == []


def test_nothing_can_steer_the_terminal() -> None:
    """Control characters in any part of a lock are printed as escapes, and all is one lock's."""
    name = "feed:" + HOSTILE
    task = {"task": HOSTILE, "task_id": HOSTILE, "arguments": HOSTILE, "renewed": True}
    take(name, 60, by=Holder(HOSTILE, 1, time.time())._replace(**task))
    outputs = [run(), run("show", name), run("--json")]
    outputs += [*refused("release", name), *refused("show", HOSTILE)]
    outputs.append(run("release", name, "--dry-run", "--force"))
    for text in outputs:
        assert not set("\x1b\u202e\r\x9b") & set(text)
    assert all(text.count(ESCAPED) >= 3 for text in outputs[:2])
    assert str(find_lock_of(name).holder).isprintable()  # as the log tells of a release
    assert listed()[0]["name"] == name
    assert run("release", name, "--force", "--no-input") == f"Released feed:{ESCAPED}\n"
    assert find_lock(name) is None


def test_what_is_long_fits_80_columns() -> None:
    """Long ids, hosts, tasks and arguments take more lines; a very long name is cut."""
    holder = Holder(
        "web-" * 40, 1234567, time.time() - 99, True, "t" * 300, "i" * 200, "('x', 'y')" * 20, 30.0
    )
    for part in (holder, Holder("web1", 1234567, task_id=str(uuid.uuid4()))):
        lines = as_text(LockRow(HeldLock("feed:42", "token", 99.94, 2**53, part))).splitlines()
        assert max(map(len, [*lines, *HEADING.splitlines(), *LEGEND.splitlines()])) <= 80
    lock = cache_lock("x" * 10_000)
    assert lock.acquire()
    assert "xxx... (10000 characters; --json shows all)" in commands.run("celery_locks")
    assert names() == [lock.name]


@in_redis
def test_a_closed_pipe_ends_it_quietly() -> None:
    """A reader that has seen enough ends the list: status 0, not a word of it."""
    for number in range(500):
        take(f"feed:{number}", 60)
    for form in ("", "--json"):
        line = f"set -o pipefail; {sys.executable} -m django celery_locks {form} | head -1"
        ended = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env={**os.environ, **settings_environment()},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        first = "[\n" if form else "LOCK\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, first, "")


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash, in which ``$locks`` is the command, and its status any part's."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; locks='{sys.executable} -m django celery_locks'; {line}"],
        cwd=ROOT,
        env={**os.environ, **settings_environment(), **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=False,
    )


@in_redis
@pytest.mark.parametrize("buffered", ["", "1"], ids=["at the end", "each line"])
def test_a_status_outlives_its_reader(buffered: str) -> None:
    """release does all that it was told to do, and tells by its status, though nobody reads."""
    take("busy", 60, renewed=True)
    take("idle", 60)
    ended = shell(
        "$locks release busy idle --no-input | exec 0<&-; exit ${PIPESTATUS[0]}",
        PYTHONUNBUFFERED=buffered,
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        1,
        "CommandError: 1 of 2 lock(s) were not released.",
    )
    assert "Traceback" not in ended.stderr
    assert names() == ["busy"]


#: Ends with the status of each action.
EVERY_ACTION: Final = """
import sys
from django.core.management import ManagementUtility

def status_of(line):
    try:
        ManagementUtility(["manage.py", "celery_locks", *line.split()]).execute()
    except SystemExit as end:
        return end.code
    return 0

lines = "list", "--json", "show idle", "release idle", "release idle --no-input"
statuses = [status_of(line) for line in (*lines, lines[-1])]
sys.exit(int("".join(map(str, statuses)), 2))
"""


@in_redis
def test_nothing_is_open() -> None:
    """In a process without input, output and error output each action does and ends as ever."""
    take("idle", 60)
    ended = shell(f"{sys.executable} -c '{EVERY_ACTION}' <&- >&- 2>&-")
    assert f"{ended.returncode:06b}" == "000101"  # nobody could be asked, then: nothing was left
    assert names() == []


@in_redis
@pytest.mark.long
def test_an_output_that_is_closed() -> None:
    """Without input, output or error output the command does the same and ends with the same."""
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        take("idle", 60)
        ended = shell(f"$locks {closed} && $locks release idle --no-input {closed}")
        assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)
        assert names() == []
        ended = shell(f"$locks release idle --no-input {closed}")
        assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    take("idle", 60)
    ended = shell("$locks release idle <&-")
    assert (ended.returncode, "no terminal to ask at" in ended.stderr) == (1, True)


POSIX: Final = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@in_redis
def test_what_an_output_of_ascii_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters outside ASCII are shown as escapes, also in an argument that was not decoded."""
    name = "caf\u00e9:\u65e5\u672c"
    take(name, 60, task="a.b", arguments="('x\u2026',)")
    escaped = "caf\\xe9:\\u65e5\\u672c"
    typed = name.encode().decode("ascii", "surrogateescape")  # as in the locale POSIX

    def shown(*arguments: str) -> tuple[int, str, str]:
        outputs = [io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", outputs[0])
            patch.setattr(sys, "stderr", outputs[1])
            status = status_of_program(*arguments)
            for output in outputs:
                output.flush()
        out, err = (output.buffer.getvalue().decode("ascii") for output in outputs)
        return status, out, err

    for action in (("list",), ("show", typed)):
        status, out, err = shown(*action)
        assert (status, err) == (0, "")
        assert f"{escaped}\n" in out
        assert "('x\\u2026',)" in out
    assert shown("release", typed, "--no-input") == (0, f"Released {escaped}\n", "")
    status, out, err = shown("show", typed)
    assert (status, out) == (1, "")
    assert err.startswith("CommandError: Nobody holds ")
    assert escaped in err


@in_redis
@pytest.mark.long
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, POSIX], ids=["io", "posix"])
def test_what_the_output_can_not_show(environment: dict[str, str]) -> None:
    """A character that the output can't show is shown as an escape, in each action."""
    name = "caf\u00e9:\u65e5\u672c"
    take(name, 60, task="a.b", arguments="('x\u2026',)")
    escaped = "caf\\xe9:\\u65e5\\u672c"
    for action in ("list", f"show {name}"):
        ended = shell(f"$locks {action}", **environment)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"{escaped}\n" in ended.stdout
        assert "('x\\u2026',)" in ended.stdout
    ended = shell(f"$locks release {name} --no-input", **environment)
    assert (ended.returncode, ended.stdout) == (0, f"Released {escaped}\n")
    ended = shell(f"$locks show {name}", **environment)
    assert (ended.returncode, ended.stderr.startswith("CommandError: Nobody holds ")) == (1, True)


@in_redis
def test_json_that_is_not_whole_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store falls silent in the middle, what was printed can't be taken for all."""
    for number in range(3000):
        take(f"feed:{number}", 600)

    class Ends(io.StringIO):
        """Loses the server's connections when the first line was written."""

        def write(self, text: str) -> int:
            if "feed:" in text and not self.getvalue().count("feed:"):
                monkeypatch.setattr(wire, "ask", gone)
            return super().write(text)

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("the server has gone")

    store: Any = locate().store()
    wire, out = store._wire, Ends()
    with pytest.raises(CommandError, match="did not answer to list") as caught:
        call_command("celery_locks", "--json", stdout=out)
    assert caught.value.returncode == 2
    assert out.getvalue().startswith('[\n{"name": "feed:')
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(out.getvalue())


# whether the holder lives


def hold(name: str, lease: float) -> None:
    """Hold a lock, and renew it, until this process is ended."""
    with cache_lock(name, timeout=lease) as lock:
        tell(bool(lock))
        threading.Event().wait()


@in_redis
@pytest.mark.long
def test_a_holder_that_stands_still_is_overdue_and_one_that_dies_is_gone() -> None:
    """A real holder is shown with its process; stopped it is marked, resumed it no more is."""
    with start_in_process(hold, "feed:42", 8.0) as holder:
        assert holder.receive()
        assert f" pid {holder.pid} on {socket.gethostname()}\n" in run()
        assert "lives, or died in the last " in run("show", "feed:42")
        assert listed()[0]["overdue"] is False
        holder.pause()
        wait_for(lambda: "s!  " in run(), PATIENCE, "it was never overdue")
        assert listed()[0]["overdue"] is True
        assert "dead, stopped or cut off, most likely: its renewal is " in run("show", "feed:42")
        assert "and not since, so it may be dead" in refused("release", "feed:42")[0]
        holder.resume()
        wait_for(lambda: "s+  " in run(), PATIENCE, "it was not renewed again")
        holder.kill()
        wait_for(lambda: run() == "No lock is held.\n", PATIENCE, "the dead one's lease went on")


@pytest.mark.parametrize(
    ("lease", "left", "ago", "overdue"),
    [
        (30.0, 30.0, 0.0, False),
        (30.0, 14.1, 15.9, False),
        (30.0, 13.9, 16.1, True),
        (2.0, 0.1, 1.9, False),
        (30.0, 30.9, 0.0, False),
        (30.0, 299.0, None, None),
        (None, 20.0, None, None),
        (30.0, None, None, None),
    ],
    ids=["new", "half", "late", "short", "by a tick", "extended", "unknown", "store can't tell"],
)
@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_overdue(
    lease: float | None, left: float | None, ago: float | None, overdue: bool | None
) -> None:
    """A renewal is overdue when half of the lease has passed; unknown facts are left out."""
    holder = Holder("web1", 4711, 1.0, True, lease=lease)
    lock = HeldLock("feed:42", "token", left, None, holder)
    assert seconds_since_renewal(lock) == pytest.approx(ago)
    assert is_overdue(lock) is overdue
    alone = lock._replace(holder=holder._replace(renewed=False))
    assert seconds_since_renewal(alone) is None
    assert is_overdue(alone) is None


# show

#: The head of the page of a lock that no task holds.
NO_TASK: Final = (
    "feed:42\n"
    "    kind        run\n"
    "    task        -\n"
    "    arguments   -\n"
    "    task id     -\n"
    "    process     pid 4711 on web1\n"
    "    held since  <time> UTC by its clock, 10min ago\n"
)
PAGES: Final = {
    "renewed": (
        {"renewed": True, "lease": 7500.0, "task": "a.b", "task_id": "1-2", "arguments": "(1,)"},
        (
            "feed:42\n"
            "    kind        run\n"
            "    task        a.b\n"
            "    arguments   (1,)\n"
            "    task id     1-2\n"
            "    process     pid 4711 on web1\n"
            "    held since  <time> UTC by its clock, 10min ago\n"
            "    lease left  2h left of 2h, renewed 5min ago\n"
            "    holder      lives, or died in the last 5min\n"
            "    free        in 2h if the holder is dead, or when it is done\n"
        ),
    ),
    "overdue": (
        {"renewed": True, "lease": 27_000.0},
        (
            f"{NO_TASK}"
            "    lease left  2h left of 8h, renewed 6h ago\n"
            "    holder      dead, stopped or cut off, most likely: its renewal is 3h late\n"
            "    free        in 2h if the holder is dead, or when it is done\n"
        ),
    ),
    "extended": (
        {"renewed": True, "lease": 30.0},
        (
            f"{NO_TASK}"
            "    lease left  2h left, renewed\n"
            "    holder      lives if the lease begins again from time to time: look again\n"
            "    free        in 2h if the holder is dead, or when it is done\n"
        ),
    ),
    "not renewed": (
        {"lease": 7800.0},
        (
            f"{NO_TASK}"
            "    lease left  2h left of 2h, not renewed\n"
            "    holder      not known, because it does not renew this lease\n"
            "    free        in 2h at the latest\n"
        ),
    ),
    "message": (
        {"host": "", "pid": 0, "task": "a.b", "task_id": "1-2", "arguments": "()"},
        (
            "feed:42\n"
            "    kind        message\n"
            "    task        a.b\n"
            "    arguments   ()\n"
            "    task id     1-2\n"
            "    process     a message\n"
            "    held since  <time> UTC by its clock, 10min ago\n"
            "    lease left  2h left, not renewed\n"
            "    holder      no process: a message waits or runs, or its period lasts\n"
            "    free        in 2h at the latest\n"
        ),
    ),
    "unknown": (
        {"host": "", "pid": 0, "since": 0.0},
        (
            "feed:42\n"
            "    kind        run\n"
            "    task        -\n"
            "    arguments   -\n"
            "    task id     -\n"
            "    process     not known\n"
            "    held since  -\n"
            "    lease left  2h left, not renewed\n"
            "    holder      not known\n"
            "    free        in 2h at the latest\n"
        ),
    ),
}


@pytest.mark.parametrize("kind", PAGES)
def test_show(kind: str, store: str) -> None:
    """All that is known of a lock is shown, and of its holder's life no more than is known."""
    holder, page = PAGES[kind]
    take("feed:42", 7200, 600, **holder)
    fence = fence_of(store).strip()
    shown = f"{page}    fence       {fence}\n    place       1 of 1\n"
    assert masked(run("show", "feed:42")) == shown


def test_show_as_json() -> None:
    """show --json gives the object that the list gives."""
    take("feed:42", 7200, 600, renewed=True, lease=7500.0)
    shown = json.loads(run("show", "feed:42", "--json"))
    (row,) = listed()
    for key in ("age_s", "remaining_s", "renewed_s"):
        assert abs(shown.pop(key) - row.pop(key)) < 60
    assert shown == row


def test_show_of_what_nobody_holds() -> None:
    """A lock that is free is said to be, with status 1."""
    out, why = refused("show", "feed:42")
    assert out == ""
    assert why == (
        "Nobody holds feed:42. `manage.py celery_locks` lists the names of all that are held."
    )
    assert status_of_program("show", "feed:42") == 1
    assert status_of_program("show", "feed:42", "--json") == 1


@pytest.mark.parametrize("store", ["portable"], indirect=True)
def test_show_where_the_store_can_not_tell_what_is_left() -> None:
    """Without the rest of the lease it is not said when the lock is free, nor who lives."""
    with cache_lock("feed:42", timeout=60):
        page = run("show", "feed:42")
    assert "    lease left  ? left of 60.0s, renewed\n" in page
    assert "    holder      lives if the lease begins again from time to time: look again\n" in page
    assert "when its lease ends; this store can't tell when that is" in page


# release


def test_release_frees_by_name() -> None:
    """release frees the named locks, each once, and leaves the others."""
    for name in ("a", "b", "c"):
        take(name, 60)
    assert run("release", "a", "b", "a", "--no-input") == "Released a\nReleased b\n"
    assert names() == ["c"]


def test_release_of_a_task_or_prefix() -> None:
    """release frees all of a task, or all whose names begin with a text, and no others."""
    take("feed:1", 60, task="feeds.import")
    take("feed:2", 60, task="feeds.clean")
    take("report", 60, task="feeds.import")
    assert run("release", "--prefix", "feed:2", "--no-input") == "Released feed:2\n"
    told = run("release", "--task", "feeds.import", "--no-input")
    assert sorted(told.splitlines()) == ["Released feed:1", "Released report"]
    assert names() == []
    for way in (("--task", "feeds.import"), ("--prefix", "feed:")):
        out, why = refused("release", *way, "--no-input")
        assert (out, why) == ("", "No such lock is held, so there was nothing to release.")
        assert status_of_program("release", *way, "--no-input") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a", "--task", "x"),
        ("a", "--prefix", "a"),
        ("--task", "x", "--prefix", "a"),
        ("a", "--task", "x", "--prefix", "a"),
    ],
)
@in_redis
def test_locks_are_named_in_one_way(arguments: tuple[str, ...]) -> None:
    """release takes names, a task or a prefix: exactly one of them, else it frees nothing."""
    take("a", 60, task="x")
    assert refused("release", *arguments, "--no-input") == (
        "",
        "Say which locks to release in one way: by their NAMEs, by --task or by --prefix.",
    )
    assert status_of_program("release", *arguments, "--no-input") == 2
    assert status_of_program("--task", "x", "release", "--prefix", "a", "--no-input") == 2
    assert names() == ["a"]


@in_redis
def test_an_empty_prefix_frees_nothing() -> None:
    """A --prefix of an unset variable means no lock, and not every lock."""
    take("a", 60)
    for more in ("--no-input", "--dry-run"):
        out, why = refused("release", "--prefix", "", more)
        assert out == ""
        assert why.startswith("An empty --prefix would mean every lock")
        assert status_of_program("release", "--prefix", "", more) == 2
    assert names() == ["a"]


def test_a_renewed_lock_is_left_alone() -> None:
    """Without --force the lock of one that lives is kept, with the reason; others are freed."""
    take("busy", 7200, renewed=True, lease=7380.0)
    take("idle", 7200)
    out, why = refused("release", "busy", "idle", "gone", "--no-input")
    assert out == (
        "Left alone: busy\n"
        "    pid 4711 on web1 renewed it 3min ago, so it lives or died since; if it is\n"
        "    dead the lock is free in 2h. Freed now, a second run may start beside it.\n"
        "    Stop that process first, or add --force.\n"
        "Released idle\n"
        "Nobody holds gone\n"
    )
    assert why == "2 of 3 lock(s) were not released."
    assert names() == ["busy"]
    assert status_of_program("release", "busy", "--no-input") == 1
    assert run("release", "busy", "--force", "--no-input") == "Released busy\n"
    assert names() == []


def test_dry_run() -> None:
    """--dry-run says what would be freed and what would not, asks nothing and frees nothing."""
    take("busy", 60, renewed=True)
    take("idle", 60)
    assert run("release", "idle", "--dry-run") == "Would release idle\n"
    out, why = refused("release", "busy", "idle", "--dry-run")
    assert {line for line in out.splitlines() if line[0] != " "} == {
        "Left alone: busy",
        "Would release idle",
    }
    assert why == "1 of 2 lock(s) were not released."
    told = run("release", "busy", "idle", "--dry-run", "--force")
    assert told == "Would release busy\nWould release idle\n"
    assert set(names()) == {"busy", "idle"}


def test_release_as_json() -> None:
    """release --json says of each lock what became of it, and why it was left alone."""
    take("busy", 60, renewed=True)
    take("idle", 60)
    out, _ = refused("release", "busy", "idle", "gone", "--json", "--no-input")
    busy, *others = json.loads(out)
    assert others == [
        {"name": "idle", "outcome": "released", "reason": ""},
        {"name": "gone", "outcome": "not_held", "reason": ""},
    ]
    assert (busy["name"], busy["outcome"]) == ("busy", "renewed")
    assert busy["reason"].endswith("Stop that process first, or add --force")
    (would,) = json.loads(run("release", "busy", "--json", "--force", "--dry-run"))
    assert would == {"name": "busy", "outcome": "would_release", "reason": ""}


def test_without_a_terminal_nothing_is_freed() -> None:
    """Where nobody can be asked, release refuses and says how to do it all the same."""
    take("a", 60)
    assert refused("release", "a") == (
        "",
        (
            "This asks before it does anything, and there is no terminal to ask at: nothing was "
            "done. Add --no-input to do it without a question."
        ),
    )
    assert status_of_program("release", "a") == 1
    assert names() == ["a"]


@pytest.mark.parametrize("store", ["memcached", "portable"], indirect=True)
def test_a_cache_that_can_not_list_says_so() -> None:
    """Where locks can't be listed, that is said instead of an empty list; one is freed by name."""
    take("a", 60)
    for arguments in (
        (),
        ("list",),
        ("--json",),
        ("--all",),
        ("release", "--task", "x", "--no-input"),
        ("release", "--prefix", "a", "--no-input"),
    ):
        out, why = refused(*arguments)
        assert out == ""
        assert re.search(r"can't list its locks.*celery_locks release NAME", why)
        assert status_of_program(*arguments) == 2
    assert run("release", "a", "--no-input") == "Released a\n"
    assert find_lock("a") is None
    assert refused("release", "a", "--no-input") == (
        "Nobody holds a\n",
        "1 of 1 lock(s) were not released.",
    )


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("action", ["", "--json", "show a", "release a", "release --task x"])
def test_a_store_that_is_gone_is_said_so(action: str, settings: Settings) -> None:
    """A store that does not answer is status 2: neither "free" nor "held by another"."""
    settings.CACHES = {
        **settings.CACHES,
        "gone": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://127.0.0.1:{dead_port()}/0",
        },
    }
    arguments = (*action.split(), "--cache", "gone")
    out, why = refused(*arguments)
    assert out == ""
    assert "did not answer to " in why
    assert status_of_program(*arguments) == 2


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_an_alias_that_does_not_exist_is_said_so() -> None:
    """A wrong --cache is status 2, too: nothing was asked."""
    assert "which CACHES does not have" in refused("--cache", "defualt")[1]
    assert status_of_program("--cache", "defualt") == 2


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_memory_of_one_process_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody else's locks can be seen, that is said, beside the output."""
    assert status_of_program("--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert err == (
        "Locks live in this process's own memory: those of workers and web servers can't be seen "
        "from here.\n"
    )


# on a terminal


def find_lock_of(name: str) -> HeldLock:
    """Return a lock that is held."""
    lock = find_lock(name)
    assert lock is not None
    return lock


def test_places(store: str) -> None:
    """Each holder of a lock of several has a line and a name of its own; the last line counts."""
    holder, there = Holder("web1", 4711, time.time()), locate().store()
    for _ in range(3):
        there.acquire("api", uuid.uuid4().hex, 600, holder, limit=4)
    assert run("release", "api", "--no-input").startswith("Released api")
    listed = run().splitlines()
    assert "api: 2 of 4 places held." in listed
    places = [line.rpartition(", ")[2] for line in listed if "pid 4711 on web1, place" in line]
    assert sorted(places) == ["place 2 of 4", "place 3 of 4"]
    shown = run("show", "api:place:3")
    assert "    place       3 of 4\n" in shown
    rows = {row["name"]: (row["place"], row["limit"]) for row in json.loads(run("--json"))}
    assert rows == {"api:place:2": (2, 4), "api:place:3": (3, 4)}
    others = "Other places of it are held: api:place:2, api:place:3."
    assert f"Nobody holds api. {others}" in commands.refused("celery_locks", "show", "api")[1]
    out, _ = commands.refused("celery_locks", "release", "api", "--no-input")
    assert out == f"Nobody holds api\n    {others}\n"
    assert set(rows) == {lock.name for lock in iter_locks()}
    there.acquire("geo:place:17", uuid.uuid4().hex, 600, holder)
    assert run("show", "geo:place:17").count("1 of 1") == 1
    assert "Other places" not in commands.refused("celery_locks", "show", "geo")[1]


@pytest.mark.parametrize("store", KINDS[:-1], indirect=True)  # memory has a line more to say
def test_the_question_shows_what_it_is_about(store: str) -> None:
    """On a terminal release shows the locks, and why others stay, before it frees any."""
    take("busy", 7200, renewed=True)
    take("idle", 7200, 180, task="feeds.import", task_id="1-2", arguments="(1,)")

    def read(question: str) -> None:
        assert masked(question) == (
            "LOCK\n"
            "       HELD      LEFT  KIND     HOLDER\n"
            "    TASK AND ARGUMENTS\n"
            "    TASK ID\n"
            "idle\n"
            "       3min        2h  run      pid 4711 on web1\n"
            "    feeds.import (1,)\n"
            "    1-2\n"
            "Left alone: busy\n"
            "    pid 4711 on web1 renews it while it lives; if it is dead the lock is free in\n"
            "    2h. Freed now, a second run may start beside it. Stop that process first, or\n"
            "    add --force.\n"
            "The holders are not stopped: each finds out at its next renewal. Until then a\n"
            "second may run beside it.\n"
            "Release 1 lock(s)? [yes/no] "
        )
        assert set(names()) == {"busy", "idle"}

    told, why = answer("yes\n", "celery_locks", "release", "idle", "busy", meanwhile=read)
    assert "Released idle\n" in told
    assert why == "1 of 2 lock(s) were not released."
    assert names() == ["busy"]


@in_redis
def test_only_yes_is_yes() -> None:
    """Any other answer, or none, frees nothing."""
    take("idle", 60)
    for text in ("no\n", "y\n", "\n", "yes, all\n", "\x04"):
        told, why = answer(text, "celery_locks", "release", "idle")
        assert (text, why) == (text, REFUSED)
        assert "Released" not in told
        assert names() == ["idle"]
    assert answer(" YES \n", "celery_locks", "release", "idle")[1] == ""
    assert names() == []


@in_redis
def test_ctrl_c_at_the_question_frees_nothing() -> None:
    """SIGINT is a no, without a traceback."""
    take("idle", 60)
    with on_terminal("celery_locks", "release", "idle") as terminal:
        terminal.wait_for("[yes/no] ")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 1
        assert terminal.text.endswith(f"[yes/no] \nCommandError: {REFUSED}\n")
    assert names() == ["idle"]


@in_redis
def test_what_changes_hands_before_the_answer_stays() -> None:
    """Between the question and the answer somebody else got the lock: it is left alone."""
    first = take("idle", 60)
    with on_terminal("celery_locks", "release", "idle") as terminal:
        terminal.wait_for("[yes/no] ")
        assert locate().store().release("idle", first.token)
        second = take("idle", 60)
        terminal.type("yes\n")
        assert terminal.end() == 1
        assert terminal.text.endswith(
            "Left alone: idle\n"
            "    it ended meanwhile, or someone else holds it now.\n"
            "CommandError: 1 of 1 lock(s) were not released.\n"
        )
    assert find_lock_of("idle").token == second.token


@in_redis
def test_a_question_about_many_is_not_endless() -> None:
    """A question shows twenty locks and counts the others."""
    for number in range(25):
        take(f"feed:{number}", 600)

    def read(question: str) -> None:
        assert "\n... and 5 more.\n" in question
        assert question.count("\nfeed:") == 20
        assert "Release 25 lock(s)? " in question

    answer("yes\n", "celery_locks", "release", "--prefix", "feed:", meanwhile=read)
    assert names() == []


# help

HELPS: Final = {
    "show": (
        "usage: manage.py celery_locks show [-h] [--json] [--cache ALIAS] NAME\n"
        "\n"
        "Show all of one lock, and whether its holder lives.\n"
        "\n"
        "positional arguments:\n"
        "  NAME           its whole name; --json shows it as it is, where the list\n"
        "                 escapes or cuts it\n"
        "\n"
        "options:\n"
        "  -h, --help     show this help message and exit\n"
        "  --json         print JSON\n"
        "  --cache ALIAS  look into this cache (default: where the settings keep locks)\n"
    ),
    "release": (
        "usage: manage.py celery_locks release [-h] [--json] [--cache ALIAS]\n"
        "                                      [--task TASK] [--prefix TEXT] [--all]\n"
        "                                      [--force] [--dry-run] [--no-input]\n"
        "                                      [NAME ...]\n"
        "\n"
        "Free locks: those named, or all of a task, or all that begin with a text.\n"
        "Their holders are not stopped: a holder finds out at its next renewal, or when\n"
        "it calls ensure(). A lock that its holder renews is left alone.\n"
        "\n"
        "positional arguments:\n"
        "  NAME                  its whole name; --json shows it as it is, where the\n"
        "                        list escapes or cuts it\n"
        "\n"
        "options:\n"
        "  -h, --help            show this help message and exit\n"
        "  --json                print JSON\n"
        "  --cache ALIAS         look into this cache (default: where the settings keep\n"
        "                        locks)\n"
        "  --task TASK           those that runs or messages of this task hold\n"
        "  --prefix TEXT         those whose names begin with this\n"
        "  --all                 also the markers of copies of messages\n"
        "  --force               also those that their holders renew\n"
        "  --dry-run             only say which\n"
        "  --no-input, --noinput\n"
        "                        do not ask before\n"
    ),
    "list": (
        "usage: manage.py celery_locks list [-h] [--json] [--cache ALIAS] [--task TASK]\n"
        "                                   [--prefix TEXT] [--all]\n"
        "\n"
        "Show the locks that are held (default).\n"
        "\n"
        "options:\n"
        "  -h, --help     show this help message and exit\n"
        "  --json         print JSON\n"
        "  --cache ALIAS  look into this cache (default: where the settings keep locks)\n"
        "  --task TASK    those that runs or messages of this task hold\n"
        "  --prefix TEXT  those whose names begin with this\n"
        "  --all          also the markers of copies of messages\n"
    ),
}


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("action", [*HELPS, "doctor", ""])
def test_help(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help of the command and of each action fits 80 columns and says what each does."""
    monkeypatch.setenv("COLUMNS", "80")
    assert status_of_program(*action.split(), "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    if action in HELPS:
        assert text == HELPS[action]
    elif not action:
        assert text.endswith(
            "actions:\n"
            "  {list,show,release,doctor}\n"
            "    list                show the locks that are held (default)\n"
            "    show                show all of one lock, and whether its holder lives\n"
            "    release             free locks: those named, or all of a task, or all that\n"
            "                        begin with a text\n"
            "    doctor              test the lock store, and report what it really\n"
            "                        guarantees\n"
        )


# arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "described"),
    [
        ("('a',)", "{'full': True}", "('a',) {'full': True}"),
        ("('a',)", "{}", "('a',)"),
        ("()", "{'full': True}", "{'full': True}"),
        ("()", "{}", "()"),
        ("***", "***", "*** ***"),
        ("x" * 150, "y" * 150, "x" * 150 + " " + "y" * 48 + "…"),
        ("x" * 200, "{}", "x" * 200),
        ("x" * 201, "{}", "x" * 199 + "…"),
        (None, None, None),
        (["a"], "{}", None),
    ],
)
@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_arguments(args: Any, kwargs: Any, described: str | None, settings: Settings) -> None:
    """They are what the message shows, without empty parts, and no longer than 200 characters."""
    assert describe_arguments(args, kwargs) == described
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    assert describe_arguments(args, kwargs) is None


@pytest.mark.parametrize("store", KINDS[:-1], indirect=True)  # memory is this process's own
def test_arguments_that_are_not_to_be_shown(settings: Settings) -> None:
    """With SHOW_ARGUMENTS off, those that another process wrote are shown nowhere either."""
    take("feed:42", 60, task="a.b", arguments="('secret',)")
    assert "secret" in run()
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "SHOW_ARGUMENTS": False}
    outputs = [run(), run("--json"), run("show", "feed:42"), run("show", "feed:42", "--json")]
    assert not [text for text in outputs if "secret" in text]
    assert [lock.holder.arguments for lock in iter_locks()] == [None]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ('["n","web1",7,1.5,true,"a.b","1-2"]', ("a.b", None, None)),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)",30.0]', ("a.b", "(1,)", 30.0)),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)",30.0,3]', ("a.b", "(1,)", 30.0)),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)",30.0,3,{"new":1}]', ("a.b", "(1,)", 30.0)),
        ('["n","web1",7,1.5,true,"a.b","1-2",5,30.0]', None),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)","30"]', None),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)",NaN]', None),
        ('["n","web1",7,1.5,true,"a.b","1-2","(1,)",30.0,"3"]', None),
        ('["n","web1",7,1.5,true,"a.b"]', None),
    ],
    ids=[
        "older",
        "ours",
        "of 3",
        "newer",
        "no arguments",
        "no lease",
        "no number",
        "no limit",
        "too few",
    ],
)
@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_holders_of_other_versions(text: str, known: tuple[Any, ...] | None) -> None:
    """Holders of older and newer versions are read; a garbled one leaves a lock unknown."""
    lock = read_lock("key", "t" * 32 + text)
    if known is None:
        assert lock == HeldLock("key", "t" * 32)
    else:
        task, arguments, lease = known
        assert lock.name == "n"
        assert lock.holder == Holder("web1", 7, 1.5, True, task, "1-2", arguments, lease)
        assert lock.limit == (3 if "30.0,3" in text else 1)
