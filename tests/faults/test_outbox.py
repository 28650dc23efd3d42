"""Transactions that send through the outbox while everything is killed, and what checks them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.lab import Lab
from tests.faults.outbox.oracle import ORACLE, History
from tests.faults.outbox.plan import SENDER, Plan
from tests.faults.outbox.scenario import record

pytestmark = pytest.mark.nightly

#: A run of some ten seconds in which each process is killed once at each point.
SHORT = Plan(
    transactions=40,
    rounds=1,
    random_kills=1,
    troubles=("killed",),
    pause=0.2,
    patience=60,
    quiet=30,
    at_most=150,
)

ON_RABBITMQ = replace(SHORT, broker="rabbitmq", random_kills=0, troubles=("stopped",))

#: The same where tasks are lost on purpose, with a short wait for them.
LOSING = replace(SHORT, troubles=(), quiet=4)

#: One in which nothing goes wrong but what is broken on purpose.
CALM = replace(LOSING, rounds=0, random_kills=0, patience=3, pause=0.02)


@pytest.mark.parametrize("plan", [SHORT, ON_RABBITMQ], ids=["redis", "rabbitmq"])
def test_the_outbox_loses_nothing_whatever_is_killed(plan: Plan, lab: Lab) -> None:
    """Each committed task arrives, none of a rolled-back transaction, and each is done once."""
    history = record(plan, lab)
    assert ORACLE.check(history) == []
    assert history.plan.transactions <= len(history.begun)


def test_without_an_outbox_kills_after_the_commit_lose_tasks(lab: Lab) -> None:
    """Plain ``delay_on_commit`` loses at least the tasks of who died between commit and send."""
    history = record(replace(LOSING, broken="plain"), lab)
    assert history.kills["sender", "after the commit"] == 1
    assert ORACLE.found(history) == {"lost tasks"}
    assert ORACLE.count(history)["left in the outbox"] == 0


def test_a_relay_that_remembers_the_last_id_is_found(lab: Lab) -> None:
    """It never sends what was inserted before, and committed after, what it has sent."""
    history = record(replace(CALM, broken="last-id", transactions=80, pause=0.1), lab)
    assert {"lost tasks", "leftovers"} <= ORACLE.found(history)


def test_a_relay_that_deletes_before_it_sends_is_found(lab: Lab) -> None:
    """A relay that deletes first loses its messages when it is killed, and the outbox is empty."""
    history = record(replace(LOSING, broken="delete-first"), lab)
    assert "lost tasks" in ORACLE.found(history)
    assert history.left == []


def test_a_retry_that_waits_for_the_commit_is_found(lab: Lab) -> None:
    """The rollback that Retry causes drops its message: it arrived, and is never done."""
    history = record(replace(CALM, broken="deferred-retry"), lab)
    assert "undone effects" in ORACLE.found(history)
    assert history.lost == set()


def good(**changes: Any) -> History:
    """Return the history of two tasks of one transaction, with changes."""
    both = {"0.0", "0.1"}
    history = History(
        replace(CALM, transactions=1, broken="plain"),
        begun={0},
        committed=both,
        arrived=Counter(both),
        effects=Counter(both),
        flagged=both,
    )
    return replace(history, **changes)


def test_a_good_history_passes() -> None:
    """Where all went well, nothing is found."""
    assert ORACLE.check(good()) == []
    assert ORACLE.check(good(arrived=Counter(["0.0"]), followed=Counter(["0.1"]))) == []


KILLED = Counter({("sender", "at random"): 1})


#: A plan whose kills there were, but no trouble of the broker.
TROUBLED = replace(CALM, transactions=1, broken="plain", rounds=1, troubles=("stopped",))
AT_EACH_POINT = Counter((SENDER, point) for point in TROUBLED.points(SENDER))


@pytest.mark.parametrize(
    ("history", "name"),
    [
        (good(arrived=Counter(["0.0"])), "lost tasks"),
        (good(arrived=Counter(["0.0", "0.1", "1.0"])), "ghosts"),
        (good(followed=Counter(["1.0"])), "ghosts"),
        (good(arrived=Counter({"0.0": 1, "0.1": 2})), "too many duplicates"),
        (good(arrived=Counter({"0.0": 1, "0.1": 102}), kills=KILLED), "too many duplicates"),
        (good(effects=Counter(["0.0"])), "undone effects"),
        (good(flagged={"0.0"}), "undone effects"),
        (good(effects=Counter({"0.0": 1, "0.1": 2})), "repeated effects"),
        (good(left=["tests.app.tasks.note"]), "leftovers"),
        (good(raised=["Traceback"]), "errors"),
        (good(begun=set()), "too little"),
        (good(plan=replace(CALM, transactions=1, rounds=1)), "too little"),
        (good(plan=TROUBLED, kills=AT_EACH_POINT), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert ORACLE.found(history) == {name}


def test_one_batch_may_come_again_for_each_kill() -> None:
    """A hundred duplicates are what one kill may cause."""
    again = Counter({"0.0": 1, "0.1": 101})
    assert ORACLE.check(good(arrived=again, kills=KILLED)) == []
