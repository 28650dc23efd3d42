"""Single-instance tasks whose processes are killed all the time, and what checks them."""

from dataclasses import replace
from typing import Any

import pytest

from django_celery_safe import HeldLock
from tests.faults.lab import Lab
from tests.faults.tasks.oracle import ORACLE, History, Run, Send, Try
from tests.faults.tasks.plan import Plan
from tests.faults.tasks.scenario import record

pytestmark = pytest.mark.nightly

#: A run of some twenty seconds.
SHORT = Plan(tasks=250, keys=5, pause=0.03, worker_kills=1, patience=40)


def test_single_instance_tasks_keep_their_promises(lab: Lab) -> None:
    """
    Retried, killed and sent twice, tasks run alone, and none is lost.

    The last work sent for each key is done, and no lock is left.
    """
    history = record(SHORT, lab)
    assert ORACLE.check(history) == []
    assert len(history.sends) == 2 * SHORT.tasks


# Histories written by hand; times are small numbers.


def send(name: str, asked: int, until: str, duplicate_of: str | None = None) -> Send:
    """Return a send that took 1."""
    return Send(name, until, "key", asked, asked + 1, duplicate_of)


def story_of(until: str, **changes: Any) -> History:
    """
    Return the history of one task, sent twice at once, with changes.

    It is taken up at 10, runs from 11 to 20 and is over at 22.
    """
    history = History(
        sends=[send("a", 0, until), send("b", 0, until, duplicate_of="a")],
        tries=[Try("a", 10, pid=1)],
        runs=[Run("a", 11, 20, "done")],
        over={"a": 22},
        entries=1,
    )
    return replace(history, **changes)


def found(history: History) -> set[str]:
    """Return the names of the checks that found something wrong."""
    return ORACLE.found(history) - {"too little"}


@pytest.fixture(params=["start", "end"])
def until(request: pytest.FixtureRequest) -> str:
    """Each value of ``unique_until``."""
    value: str = request.param
    return value


def test_an_undisturbed_task_is_in_order(until: str) -> None:
    """A task that runs once, sent twice at once, breaks no promise."""
    assert found(story_of(until)) == set()


def test_an_overlap_is_found(until: str) -> None:
    """No run may find another inside."""
    entry = {"number": 2, "section": "key", "at_ns": 15}
    assert found(story_of(until, overlaps=[entry])) == {"two at once"}


@pytest.mark.parametrize("runs", [[], [Run("a", 11, 20, "retried")]])
def test_a_lost_task_is_found(until: str, runs: list[Run]) -> None:
    """A published task must run, and run again if it is retried."""
    assert "lost tasks" in found(story_of(until, runs=runs))


def test_work_that_nobody_saw_is_found() -> None:
    """Until the start, a run must begin after the last send; until the end, it need not."""
    late = {"sends": [send("a", 0, "start"), send("b", 12, "start", duplicate_of="a")]}
    assert found(story_of("start", **late)) == {"undone work", "swallowed sends"}
    late = {"sends": [send("a", 0, "end"), send("b", 12, "end", duplicate_of="a")]}
    assert found(story_of("end", **late)) == set()


def test_a_duplicate_of_what_is_over_is_found() -> None:
    """Until the end, a send is not a duplicate of a task whose locks have been given back."""
    sends = [send("a", 0, "end"), send("b", 23, "end", duplicate_of="a")]
    assert found(story_of("end", sends=sends)) == {"swallowed sends"}


def test_a_duplicate_of_nothing_is_found(until: str) -> None:
    """The task that a duplicate names must have been published."""
    sends = [send("a", 0, until), send("b", 0, until, duplicate_of="c")]
    assert found(story_of(until, sends=sends)) == {"swallowed sends"}


@pytest.mark.parametrize(("value", "free"), [("start", 10), ("end", 20)])
def test_a_second_message_is_found(value: str, free: int) -> None:
    """Nothing is published while the one before is to start, or to end, unless it was killed."""
    for asked, wrong in [(free - 2, {"sent twice"}), (free, set())]:
        history = story_of(
            value,
            sends=[send("a", 0, value), send("b", asked, value)],
            tries=[Try("a", 10, pid=1), Try("b", 25, pid=2)],
            runs=[Run("a", 11, 20, "done"), Run("b", 26, 30, "done")],
            over={"a": 22, "b": 32},
        )
        assert found(history) == wrong
        killed = replace(history, killed={1: "child"})
        assert found(killed) == (wrong if value == "start" else set())


def test_a_message_of_a_duplicate_is_found(until: str) -> None:
    """A duplicate is not published."""
    tries = [Try("a", 10, pid=1), Try("b", 30, pid=1)]
    assert found(story_of(until, tries=tries)) == {"ghosts"}


def test_what_is_left_is_found(until: str) -> None:
    """In the end there is neither a message nor a lock."""
    assert found(story_of(until, messages=["a"])) == {"leftovers"}
    lock = HeldLock("sent:task:key", "token", 3599.0)
    assert found(story_of(until, locks=[lock])) == {"leftovers"}


def test_an_empty_history_proves_nothing() -> None:
    """A run in which nothing happened is rejected, with what is missing."""
    missing = " ".join(violation.text for violation in ORACLE.check(History()))
    for name in ("published", "runs retried", "children killed", "stepped aside"):
        assert f"{name}: 0" in missing
