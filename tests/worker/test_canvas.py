"""
Duplicates and conflicts at each place of a canvas, on a real worker.

A duplicate is made by a message that waits for its countdown: it holds the lock of the
send and not that of the run, so a duplicate that ran would be seen.
"""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group, shared_task
from celery.canvas import Signature
from celery.exceptions import ChordError, Reject
from django.db import transaction

from django_celery_safe import SafeTask, find_lock, send_on_commit, single_instance
from tests.app.celery import app
from tests.app.tasks import add, note
from tests.concurrency.holders import held_by
from tests.conftest import app_on_redis
from tests.processes import CeleryWorker, Journal, wait_for
from tests.servers import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)

#: Seconds until a result must be there.
SOON = 40

#: Seconds that the first message waits, s: longer than all tests.
LATER = 3600


@shared_task(base=SafeTask)
@single_instance(key="{journal}", unique_until="end")
def once(journal: str) -> str:
    """Be sent once for each journal."""
    note.run(journal, "once")
    return "once"


@shared_task(base=SafeTask)
def keep(values: object, journal: str) -> object:
    """Return what the tasks before it returned."""
    return note.run(journal, "kept", values)


@pytest.fixture(scope="module", autouse=True)
def worker(redis_server: RedisServer) -> Iterator[CeleryWorker]:
    """One worker with two children for the module; locks, broker and results are in Redis."""
    with (
        app_on_redis(redis_server),
        CeleryWorker("tests.app", arguments=["--include", __name__]) as worker,
    ):
        yield worker


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """The journal of one test's tasks."""
    return Journal(tmp_path / "journal")


sent_either_way = pytest.mark.parametrize("on_commit", [False, True], ids=["now", "on commit"])


def send(signature: Signature[Any], on_commit: bool) -> Any:
    """Send a canvas now, or in a transaction."""
    if not on_commit:
        return signature.apply_async()
    with transaction.atomic():
        return send_on_commit(signature)


def effects_in(journal: Journal) -> list[str]:
    """Return what was done, sorted."""
    return sorted(entry["effect"] for entry in journal.entries())


def finish_all() -> None:
    """Wait until both children have done what was sent before."""
    for _ in range(2):
        group(add.s(number) for number in range(4))().get(timeout=SOON)


class Parts:
    """The members of a canvas."""

    def __init__(self, journal: Journal) -> None:
        self.path = str(journal.path)
        #: The duplicate, with an id that is known before.
        self.twin = once.si(self.path).set(task_id=str(uuid.uuid4()))

    def step(self, name: str) -> Signature[Any]:
        """Return a member that notes its name, and returns it."""
        return note.si(self.path, name, name)

    def keep(self) -> Signature[Any]:
        """Return a body that notes and returns what it gets."""
        return keep.s(self.path)


#: The canvas, what it returns, and what runs, once each.
PLACES: dict[str, tuple[Callable[[Parts], Signature[Any]], Any, str]] = {
    "chain, first": (lambda p: chain(p.twin, p.step("a"), p.step("b")), "b", "a b"),
    "chain, middle": (lambda p: chain(p.step("a"), p.twin, p.step("b")), "b", "a b"),
    "chain, last": (lambda p: chain(p.step("a"), p.step("b"), p.twin), None, "a b"),
    "group": (lambda p: group(p.step("a"), p.twin, p.step("b")), ["a", None, "b"], "a b"),
    "chord header": (lambda p: chord([p.step("a"), p.twin], p.keep()), ["a", None], "a kept"),
    "chord body": (lambda p: chord([p.step("a"), p.step("b")], p.twin), None, "a b"),
    "chain over a group": (
        lambda p: chain(p.step("a"), group(p.twin, p.step("b")), p.keep()),
        [None, "b"],
        "a b kept",
    ),
}


@sent_either_way
def test_a_canvas_goes_on_over_a_duplicate(on_commit: bool, tmp_path: Path) -> None:
    """At each place the duplicate returns None and does not run, everything else runs once."""
    journals = {place: Journal(tmp_path / place) for place in PLACES}
    first, results, twins = {}, {}, {}
    for place, (make, _, _) in PLACES.items():
        parts = Parts(journals[place])
        first[place] = once.apply_async((parts.path,), countdown=LATER).id
        results[place] = send(make(parts), on_commit)
        twins[place] = app.AsyncResult(parts.twin.options["task_id"])
    values = {place: result.get(timeout=SOON) for place, result in results.items()}
    assert values == {place: value for place, (_, value, _) in PLACES.items()}
    assert [twin.get(timeout=SOON) for twin in twins.values()] == [None] * len(PLACES)
    finish_all()
    ran = {place: effects_in(journal) for place, journal in journals.items()}
    assert ran == {place: ran.split() for place, (_, _, ran) in PLACES.items()}
    locks = {
        place: find_lock(f"sent:{once.name}:{journal.path}") for place, journal in journals.items()
    }
    assert {place: lock and lock.holder.task_id for place, lock in locks.items()} == first


# Conflicts at the run.


def step_of_call(journal: Journal, **options: Any) -> Signature[Any]:
    """Return a member that runs under a lock of its own, as its options say."""
    key = str(journal.path)
    return note.si(key, "locked", "locked").set(single_instance={"key": key, **options})


def test_a_canvas_goes_on_over_a_conflict(journal: Journal) -> None:
    """A run that is skipped gives None to the rest of a chain, and to the body of a chord."""
    parts = Parts(journal)
    locked = step_of_call(journal, on_conflict="skip")
    with held_by(f"{note.name}:{parts.path}", "other", 60):
        linked = chain(locked.clone(), parts.keep()).delay()
        joined = chord([locked.clone(), parts.step("a")], parts.keep()).delay()
        assert linked.get(timeout=SOON) is None
        assert joined.get(timeout=SOON) == [None, "a"]
        wait_for(lambda: linked.parent.state == "SUCCESS", SOON)  # stored after the next was sent
    finish_all()
    assert effects_in(journal) == ["a", "kept", "kept"]


def test_a_canvas_fails_on_a_conflict(journal: Journal) -> None:
    """If a run is rejected, its chain and its chord fail, and nothing hangs."""
    parts = Parts(journal)
    locked = step_of_call(journal, on_conflict="reject")
    with held_by(f"{note.name}:{parts.path}", "other", 60):
        linked = chain(locked.clone(), parts.keep()).delay()
        with pytest.raises(Reject):
            linked.get(timeout=SOON)
        assert linked.parent.state == "FAILURE"
        joined = chord([locked.clone(), parts.step("a")], parts.keep()).delay()
        with pytest.raises((ChordError, Reject)):
            joined.get(timeout=SOON)
        wait_for(lambda: joined.state == "FAILURE", SOON)
        wait_for(lambda: journal.count("a"), SOON)
        finish_all()
    assert effects_in(journal) == ["a"]
