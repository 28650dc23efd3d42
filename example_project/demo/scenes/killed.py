"""A child process killed in the middle of an import: its message comes back and is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import StringIO
from socket import gethostname
from time import monotonic
from typing import Any, Final

from django.conf import settings
from django.core.management import call_command
from rich.text import Text

from demo.errors import DemoError
from demo.journal import Run
from demo.promises import Promise, counted
from demo.surroundings import Surroundings
from feeds.models import Entry
from feeds.tasks import import_feed

from .imports import entry_count

FEED: Final = "slow-trains.atom"
#: Longest wait for one step of this scene, s.
STEP_WITHIN: Final = 30.0
#: How much later than the lease's end the import may begin again, s: the
#: worker has to notice the loss, and to start another child.
GRACE: Final = 5.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Kill the process that ``celery_locks`` names, while it waits for the feed server.

    The broker gives the message back at once. It meets the dead holder's lock,
    which bears its own task id, so it is not skipped: it comes back when the
    lease is over.
    """
    around.display.scene("A worker's child process killed in the middle of an import")
    around.feeds.hold(FEED)
    sent = import_feed.delay(around.feeds.url(FEED))
    fetches = around.feeds.fetches(FEED)
    _wait(around, "import begun", lambda: fetches.active == 1)
    holder = _holder(sent.id)
    around.display.note(Text("$ manage.py celery_locks\n" + _celery_locks(), "dim"))

    child = around.worker.child(holder["pid"])
    child.kill()
    killed_at = monotonic()
    around.display.note(f"  SIGKILL to process {child.pid}")
    _wait(around, "fetch cut off", lambda: fetches.cut_off == 1)
    around.feeds.release(FEED)
    _wait(around, "import done after all", lambda: _is_done(around, sent.id))
    _wait(around, "locks given back", lambda: not _held())
    yield from _compare(around, sent.id, holder, fetches.latest_at - killed_at)


def _wait(around: Surroundings, what: str, condition: Callable[[], bool]) -> None:
    around.display.progress(what, 0, 1)
    around.worker.wait_until(condition, what, seconds=STEP_WITHIN)
    around.display.progress(what, 1, 1)


def _celery_locks(*arguments: str) -> str:
    """Return what ``manage.py celery_locks`` prints."""
    printed = StringIO()
    call_command("celery_locks", *arguments, stdout=printed)
    return printed.getvalue()


def _held() -> list[dict[str, Any]]:
    """Return all locks: those of runs, and those of messages, which belong to no process."""
    locks: list[dict[str, Any]] = json.loads(_celery_locks("--json"))
    return locks


def _holder(task_id: str) -> dict[str, Any]:
    for lock in _held():
        if lock["task_id"] == task_id and lock["pid"] is not None:
            return lock
    raise DemoError(f"celery_locks shows no lock of task {task_id}: {_held()}")


def _runs(around: Surroundings, task_id: str) -> list[Run]:
    return [run for run in around.journal.runs(import_feed.name) if run.task_id == task_id]


def _is_done(around: Surroundings, task_id: str) -> bool:
    runs = _runs(around, task_id)
    for run in runs:
        if run.state == "FAILURE":
            raise DemoError(f"The import failed: {run.returned}")
    return any(run.state == "SUCCESS" for run in runs)


def _compare(
    around: Surroundings, task_id: str, holder: dict[str, Any], pause: float
) -> Iterator[Promise]:
    url = around.feeds.url(FEED)
    fetches = around.feeds.fetches(FEED)
    returned = [run.returned for run in _runs(around, task_id) if run.state == "SUCCESS"]
    lease = settings.DJANGO_CELERY_SAFE["LOCK_TIMEOUT"]
    yield Promise(
        "celery_locks names the holder of a running import",
        expected="host, process, task",
        seen="host, process, task" if holder["host"] == gethostname() else str(holder),
        kept=holder["host"] == gethostname(),
    )
    yield counted("Imports cut off by the kill", 1, fetches.cut_off)
    yield Promise(
        "The killed import is delivered again and done, not skipped",
        expected="done",
        seen=", ".join("done" if value == url else "skipped" for value in returned),
        kept=returned == [url],
    )
    yield Promise(
        f"It begins again after the dead holder's lease ({lease:g} s)",
        expected=f"at most {lease + GRACE:g} s later",
        seen=f"{pause:.1f} s later",
        kept=0 < pause <= lease + GRACE,
    )
    yield counted("Most fetches of its feed at the same time", 1, fetches.most_at_once)
    saved = Entry.objects.filter(feed__url=url).count()
    yield counted("Entries of its feed in the database", entry_count(FEED), saved)
    yield counted("Locks still held at the end", 0, len(_held()))
