"""Tasks that kill their processes, among others, and what checks that they are given up."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.lab import Lab
from tests.faults.poison.oracle import ORACLE, History
from tests.faults.poison.plan import Plan
from tests.faults.poison.scenario import VARIANTS, record

pytestmark = pytest.mark.nightly

#: A run of some twenty seconds.
SHORT = Plan(tasks=40, poison=2, quiet=4.0)


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
@pytest.mark.parametrize("kind", ["until-done", "plain"])
def test_a_task_that_kills_is_given_up_and_the_others_are_done(
    broker: str, kind: str, lab: Lab
) -> None:
    """Each poisonous one fails after so many deaths, and each other one is run once."""
    assert ORACLE.check(record(replace(SHORT, broker=broker, tasks_kind=kind), lab)) == []


def test_a_missing_limit_is_found(lab: Lab) -> None:
    """Without ``MAX_DEATHS`` one task kills one process after the other."""
    history = record(replace(SHORT, broken="no-limit", poison=1), lab)
    assert ORACLE.found(history) & set(VARIANTS["no-limit"])


# Histories written by hand.

#: The one of two tasks that kills.
PLAN = Plan(tasks=2, poison=1)
(KILLS,) = PLAN.poisonous
OTHER = 1 - KILLS


def history_of(**changes: Any) -> History:
    """Return a history; unset: one that went well."""
    good = History(
        PLAN,
        begun=Counter({KILLS: PLAN.max_deaths, OTHER: 1}),
        done=Counter({OTHER: 1}),
        failed={KILLS: ["TaskPoisoned"]},
        rows=Counter({("failed", "TaskPoisoned"): 1}),
    )
    return replace(good, **changes)


def test_a_good_history_passes() -> None:
    """Where all went well, nothing is found; plain tasks have no rows."""
    assert ORACLE.check(history_of()) == []
    plain = replace(PLAN, tasks_kind="plain")
    assert ORACLE.check(history_of(plan=plain, rows=Counter())) == []


@pytest.mark.parametrize(
    ("history", "name"),
    [
        (history_of(done=Counter()), "lost tasks"),
        (history_of(begun=Counter({KILLS: 3, OTHER: 2})), "needless runs"),
        (history_of(begun=Counter({KILLS: 4, OTHER: 1})), "wrong deaths"),
        (history_of(failed={}), "wrong failures"),
        (history_of(failed={KILLS: ["TaskPoisoned"] * 2}), "wrong failures"),
        (history_of(failed={KILLS: ["TaskPoisoned"], OTHER: ["KeyError"]}), "wrong failures"),
        (history_of(rows=Counter({("running", ""): 1})), "wrong rows"),
        (History(PLAN), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert name in ORACLE.found(history)


@pytest.mark.parametrize(
    ("history", "seconds", "is_over"),
    [
        (history_of(), PLAN.quiet + 1, True),
        (history_of(), PLAN.quiet - 1, False),
        (history_of(failed={}), PLAN.quiet + 1, False),
        (history_of(failed={}), PLAN.patience + 1, True),
        (history_of(failed={}, begun=Counter({KILLS: 7})), 0, True),
    ],
)
def test_a_run_is_over_when_nothing_can_come(
    history: History, seconds: float, is_over: bool
) -> None:
    """All have ended, or nothing has moved for long, or it would go on for ever."""
    assert history.is_over(seconds) is is_over
