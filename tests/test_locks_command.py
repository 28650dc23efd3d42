"""manage.py celery_locks, on the stores that it has to work on."""

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import pytest
from pytest_django import Settings

from django_celery_safe import HeldLock, cache_lock, iter_locks
from django_celery_safe.leases.holder import Holder, describe_arguments
from django_celery_safe.locks.stores import get_store
from tests import commands
from tests.caches import cache_at
from tests.locks.renewals import get_lock, take_lock
from tests.processes import dead_port
from tests.terminal import answer

pytestmark = pytest.mark.usefixtures("store")

#: Arguments that try to steer the terminal: a colour, a bidirectional override, a new line.
HOSTILE: Final = "('\x1b[31m\u202e\r\n\x9b',)"
ESCAPED: Final = "('\\x1b[31m\\u202e\\r\\n\\x9b',)"


@pytest.fixture
def store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> None:
    """The locks of a test live in Redis, if it does not say where."""
    use_store(getattr(request, "param", "django-redis"))


in_memory: Final = pytest.mark.parametrize("store", ["local"], indirect=True)

run, listed, refused, status_of_program = commands.of("celery_locks")


def names(*arguments: str) -> list[str]:
    """Return the names of the locks that ``list`` shows, in its order."""
    return [row["name"] for row in listed(*arguments)]


def take(
    name: str, left: float, age: float = 0.0, *, by: Holder | None = None, **holder: Any
) -> HeldLock:
    """Hold a lock so that ``left`` seconds are left of a lease, as somebody else's."""
    if by is None:
        by = Holder("web1", 4711, time.time() - age)._replace(**holder)
    take_lock(name, uuid.uuid4().hex, left, by)
    return get_lock(name)


@pytest.mark.parametrize(
    "store",
    ["django-redis", "redis-cache", "local", pytest.param("database", marks=pytest.mark.sql)],
    indirect=True,
)
def test_each_store_that_lists_its_locks(store: str) -> None:
    """Locks are listed, chosen by task, shown and freed; others stay, and markers don't show."""
    take("feed:1", 600, task="feeds.import", arguments="('secret',)")
    take("feed:2", 600, task="feeds.clean")
    take("report", 600, task="feeds.import")
    take("feeds.import:ended:1-2:0.0", 600, host="", pid=0, task="feeds.import", task_id="1-2")
    assert set(names()) == {"feed:1", "feed:2", "report"}
    assert set(names("--task", "feeds.import")) == {"feed:1", "report"}
    assert json.loads(run("show", "feed:1", "--json"))["arguments"] == "('secret',)"
    assert run("release", "feed:2", "--no-input") == "Released feed:2.\n"
    told = run("release", "--task", "feeds.import", "--no-input")
    assert sorted(told.splitlines()) == ["Released feed:1.", "Released report."]
    assert run("list") == "No lock is held.\n"


def test_list() -> None:
    """A lock is shown with its times, its holder and what that does; a late renewal is marked."""
    task = {"task": "feeds.import", "task_id": "df318cdb-110b-49f6-8ce5-211dc16b2e31"}
    take("feed:1", 7200, 10_800, renewed=True, lease=7260.0, arguments="(1,)", **task)
    take("feed:2", 400_000, 72_000_000, renewed=True, lease=900_000.0)
    take("sent:1", 720_000, by=Holder("", 0, time.time() - 1_000_000, **task))
    first, *lines = run("list").splitlines()
    assert first == "HELD  LEFT  RENEWED  LOCK"
    message = f"    message, {task['task_id']}\n    feeds.import"
    for lock in (
        f"3h    2h    yes      feed:1\n    web1 pid 4711, {task['task_id']}\n    feeds.import (1,)",
        "833d  5d    overdue  feed:2\n    web1 pid 4711",
        f"12d   8d    no       sent:1\n{message}",
    ):
        assert lock in "\n".join(lines)
    for number in range(50):
        take(f"more:{number}", 600)
    assert run("list").endswith("\nOnly the first 50 are shown; --json has all.\n")
    assert len(listed()) == 53


def test_json() -> None:
    """--json has an object for each lock, as ``show`` does."""
    with cache_lock("feed:42", timeout=600) as lock:
        (row,) = listed()
        shown = json.loads(run("show", "feed:42", "--json"))
    assert [*row, "liveness"] == [*shown]
    assert (row["name"], row["kind"], row["task"]) == ("feed:42", "run", None)
    assert (row["host"], row["pid"]) == (socket.gethostname(), os.getpid())
    assert (row["lease_s"], row["renewed"], row["overdue"]) == (600.0, True, False)
    assert row["fence"] == lock.fence is not None
    assert row["since"].endswith("+00:00")
    assert 0 <= row["age_s"] < 600
    assert 0 < row["remaining_s"] <= 600


def test_places() -> None:
    """Each holder of a lock of several has a line and a name of its own."""
    holder = Holder("web1", 4711, time.time())
    for _ in range(2):
        take_lock("api", uuid.uuid4().hex, 600, holder, limit=4)
    rows = {row["name"]: (row["place"], row["limit"]) for row in listed()}
    assert rows == {"api": (1, 4), "api:place:2": (2, 4)}
    assert "    web1 pid 4711, place 2 of 4\n" in run("list")
    assert run("release", "api", "--no-input") == "Released api.\n"
    take_lock("geo:place:17", uuid.uuid4().hex, 600, holder)
    assert (listed()[-1]["place"], names()) == (1, ["api:place:2", "geo:place:17"])


def test_nothing_can_steer_the_terminal() -> None:
    """Control characters in any part of a lock are printed as escapes."""
    name = "feed:" + HOSTILE
    task = {"task": HOSTILE, "task_id": HOSTILE, "arguments": HOSTILE, "renewed": True}
    taken = take(name, 600, by=Holder(HOSTILE, 1, time.time())._replace(**task))
    outputs = [run("list"), run("show", name), run("list", "--json")]
    outputs += [*refused("release", name), *refused("show", HOSTILE)]
    for text in outputs:
        assert not set("\x1b\u202e\r\x9b") & set(text)
    assert all(text.count(ESCAPED) >= 3 for text in outputs[:2])
    assert str(taken.holder).isprintable()  # as the log tells of a release
    assert listed()[0]["name"] == name
    assert run("release", name, "--force", "--no-input") == f"Released feed:{ESCAPED}.\n"


#: A holder, and words that ``show`` says about whether it lives.
HOLDERS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"renewed": True, "lease": 79_200.0}, "renewed it 2h ago, so it lives or died since"),
    ({"renewed": True, "lease": 270_000.0}, "overdue: most likely its holder is dead, stopped"),
    ({"renewed": True, "lease": 30.0}, "renews it while it lives; when it last did is not"),
    ({"lease": 79_200.0}, "does not renew it, so nothing shows whether"),
    ({"host": "", "pid": 0, "task_id": "1-2"}, "the message waits or runs"),
]


def test_show() -> None:
    """All that is known of a lock is shown, and of its holder's life no more than is known."""
    for number, (holder, life) in enumerate(HOLDERS):
        take(f"feed:{number}", 72_000, 600, **holder)
        page = run("show", f"feed:{number}")
        assert life in " ".join(page.split())
        assert "remaining     20h\n" in page
    take("feed:42", 7200, 600, task="a.b", task_id="1-2", arguments="(1,)")
    assert [line.split() for line in run("show", "feed:42").splitlines()[:6]] == [
        *(["name", "feed:42"], ["kind", "run"], ["task", "a.b"], ["arguments", "(1,)"]),
        *(["task_id", "1-2"], ["host", "web1"]),
    ]
    assert refused("show", "feed:43") == ("", "Nobody holds feed:43.")
    assert status_of_program("show", "feed:43", "--json") == 1


@pytest.mark.parametrize("store", ["portable"], indirect=True)
def test_a_cache_that_can_not_list() -> None:
    """That is said instead of an empty list; a lock is shown and freed by its name."""
    take("a", 600)
    assert "remaining     -\n" in run("show", "a")
    for arguments in (("list",), ("list", "--json"), ("release", "--task", "a", "--no-input")):
        out, why = refused(*arguments)
        assert (out, bool(re.search(r"can't list its locks.*release NAME", why))) == ("", True)
        assert status_of_program(*arguments) == 2
    assert run("release", "a", "--no-input") == "Released a.\n"


def test_a_renewed_lock_is_left_alone() -> None:
    """Without --force the lock of one that lives is kept, with the reason; others are freed."""
    take("busy", 72_000, renewed=True, lease=79_200.0)
    take("idle", 7200)
    out, why = refused("release", "busy", "idle", "gone", "busy", "--no-input")
    lines = [line for line in out.splitlines() if line[0] != " "]
    assert lines == ["Left alone: busy", "Nobody holds gone.", "Released idle."]
    assert "Its holder renewed it 2h ago" in out
    assert why == "1 of 3 lock(s) were released."
    assert names() == ["busy"]
    assert run("release", "busy", "--force", "--no-input") == "Released busy.\n"


def test_release_refuses() -> None:
    """A choice that is none, or two, frees nothing."""
    take("a", 600, task="x")
    for arguments in ((), ("a", "--task", "x")):
        out, why = refused("release", *arguments, "--no-input")
        assert (out, why[:38]) == ("", "Give the NAMEs of the locks to release")
    assert refused("release", "--task", "y")[1] == "0 of 0 lock(s) were released."
    assert names() == ["a"]


@in_memory
def test_a_store_that_is_gone_or_of_one_process(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that does not answer is status 2; that others' locks can't be seen is said."""
    assert status_of_program("list", "--json") == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err[:20]) == ([], "Locks live in this p")
    settings.CACHES = cache_at(f"redis://127.0.0.1:{dead_port()}/0")
    for action in ("list --json", "show a", "release a"):
        out, why = refused(*action.split())
        assert (out, "did not answer to " in why) == ("", True)
        assert status_of_program(*action.split()) == 2


def test_release_asks() -> None:
    """It shows the locks; only yes is yes; one that changes hands meanwhile stays."""
    take("busy", 7200, renewed=True)
    first, _ = take("idle:0", 7200), take("idle:1", 7200)
    chosen = ("release", "idle:0", "idle:1", "busy")

    def read(question: str) -> None:
        assert "Left alone: busy\n" in question
        assert "  no       idle:0\n" in question
        assert "Release 2 lock(s)? The holders are not stopped" in question
        assert len(names()) == 3
        assert get_store().release(first.name, first.token)
        take(first.name, 600)

    for text in ("no", "y", ""):
        why = answer(text, "celery_locks", *chosen)[1]
        assert why == "The answer was not 'yes', so nothing was done. See --no-input."
    told, why = answer(" YES ", "celery_locks", *chosen, meanwhile=read)
    assert "Released idle:1.\n" in told
    assert "Left alone: idle:0\n    It ended meanwhile, or someone else holds it now.\n" in told
    assert (why, set(names())) == ("1 of 3 lock(s) were released.", {"busy", "idle:0"})


# holders


@in_memory
def test_arguments() -> None:
    """They are what the message shows, without empty parts, and no longer than 200 characters."""
    for args, kwargs, described in (
        ("('a',)", "{'full': True}", "('a',) {'full': True}"),
        ("('a',)", "{}", "('a',)"),
        ("x" * 150, "y" * 150, "x" * 150 + " " + "y" * 48 + "…"),
        (None, None, None),
    ):
        assert describe_arguments(args, kwargs) == described


def test_arguments_that_are_not_to_be_shown(settings: Settings) -> None:
    """With SHOW_ARGUMENTS off, those that another process wrote are shown nowhere either."""
    take("feed:42", 600, task="a.b", arguments="('secret',)")
    assert "secret" in run("list")
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    outputs = [run("list"), run("list", "--json"), run("show", "feed:42")]
    assert not [text for text in outputs if "secret" in text]
    assert [lock.holder.arguments for lock in iter_locks()] == [None]
