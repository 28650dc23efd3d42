"""Tasks that are carried while everything around them is killed, and what checks them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.carried.oracle import ORACLE, Death, History, Row, Run
from tests.faults.carried.plan import Plan
from tests.faults.carried.scenario import VARIANTS, record
from tests.faults.lab import Lab

#: A run of some thirty seconds.
SHORT = Plan(
    tasks=120,
    child_kills=5,
    worker_kills=1,
    relay_kills=1,
    pauses=1,
    restarts=1,
    flushes=1,
    at_most=120,
)

#: One in which little goes wrong but what is broken on purpose.
CALM = replace(
    SHORT,
    tasks=60,
    child_kills=0,
    worker_kills=0,
    relay_kills=0,
    pauses=0,
    restarts=0,
    flushes=0,
    quiet=3.0,
)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{}, {"broker": "rabbitmq", "tasks": 60, "worker_kills": 0, "child_kills": 3}],
    ids=["redis", "rabbitmq"],
)
def test_each_task_is_done_whatever_is_killed_or_lost(changes: dict[str, Any], lab: Lab) -> None:
    """The broker forgets, processes die, and each committed task comes to its end once."""
    history = record(replace(SHORT, **changes), lab)
    assert ORACLE.check(history) == []
    assert len(history.committed) == history.plan.tasks


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        ("until-a-broker", {"child_kills": 4, "flushes": 1}),
        ("no-token", {"pauses": 3}),
        ("ignores-leases", {"tasks": 20}),
    ],
)
def test_each_fault_is_found(broken: str, changes: dict[str, int], lab: Lab) -> None:
    """Rows that end with the sending, ends without the token, and a relay that takes the living."""
    history = record(replace(CALM, broken=broken, **changes), lab)
    assert ORACLE.found(history) & set(VARIANTS[broken])


# Histories written by hand; times are small numbers.

#: The only task, which ran in process 7, a child of 2.
ID = "task-0"
ONLY = Run(ID, 7, 10, 0, 2, 20, "done")
#: Its first run, where there was another one.
FIRST = Run(ID, 6, 4, 0, 1)


def history_of(*runs: Run, **changes: Any) -> History:
    """Return the history of a task with these runs; unset: of one that went well."""
    plan = replace(CALM, tasks=1, seed=rolling_seed())
    history = History(plan, committed={ID}, ends={ID: 30})
    for one in runs or (ONLY,):
        history.runs[one.id].append(one)
    return replace(history, **changes)


def rolling_seed() -> int:
    """Return the first seed with which a plan of one task rolls something back."""
    return next(
        seed
        for seed in range(1000)
        if any(each.dropped for each in replace(CALM, tasks=1, seed=seed).transactions())
    )


def test_a_good_history_passes() -> None:
    """Where all went well, nothing is found."""
    assert ORACLE.check(history_of()) == []


@pytest.mark.parametrize(
    "history",
    [
        # Killed inside, and done by another.
        history_of(FIRST, ONLY, killed={6: 5}, deaths=[Death(ID, 6, 9, -1)]),
        # Killed after its end, before the row's.
        history_of(replace(FIRST, ended=5, ending="done"), ONLY, killed={6: 6}),
        # It stood still for longer than its lease.
        history_of(
            replace(FIRST, ended=25, ending="done"),
            ONLY,
            stood_still={6: [5]},
            deaths=[Death(ID, 6, 9, -1)],
        ),
        # Its worker ended.
        history_of(FIRST, ONLY, ended={1: 15}, deaths=[Death(ID, 6, 9, -1)]),
    ],
)
def test_what_a_kill_explains_passes(history: History) -> None:
    """A task may run again if its process died, or stood still."""
    assert ORACLE.check(history) == []


@pytest.mark.parametrize(
    ("history", "name"),
    [
        (history_of(FIRST), "lost tasks"),
        (history_of(left={ID: Row("sent", "")}), "unended rows"),
        (history_of(left={ID: Row("failed", "ValueError")}), "wrong failures"),
        (history_of(replace(ONLY, retries=1)), "wrong retries"),
        (history_of(ONLY, Run("dropped-0", 7, 40)), "ghosts"),
        (history_of(ends={ID: 5}), "runs after the end"),
        (history_of(ONLY, Run(ID, 7, 40, 0, 2, 50, "done")), "runs after the end"),
        (history_of(ends={ID: 15}), "ends by others"),
        (history_of(ends={ID: 5}), "ends by others"),
        (history_of(replace(FIRST, ended=5, ending="done"), ONLY), "needless runs"),
        # Killed, but not in or right after the run.
        (history_of(FIRST, replace(ONLY, pid=6), killed={6: 40}), "needless runs"),
        (history_of(FIRST, ONLY, killed={6: 15}), "two at once"),
        (history_of(deaths=[Death(ID, 6, 9, 0.5)], killed={6: 5}), "leases cut short"),
        (history_of(deaths=[Death(ID, 6, 9, -0.5)], killed={6: 10}), "needless deaths"),
        (history_of(committed=set()), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert name in ORACLE.found(history)


def test_an_empty_history_proves_nothing() -> None:
    """A run in which nothing happened is rejected."""
    missing = " ".join(violation.text for violation in ORACLE.check(History(SHORT)))
    for what in ("tasks", *SHORT.harms, "killed inside a task", "runs again"):
        assert f"{what}: 0" in missing


def test_the_figures_tell_how_long_a_task_waits_after_a_kill() -> None:
    """From the kill of a process inside of it, to its next beginning."""
    second = 10**9
    first, later = Run(ID, 6, second), Run(ID, 7, 5 * second, 0, 2, 6 * second, "done")
    history = history_of(first, later, killed={6: 2 * second}, harms=Counter())
    figures = ORACLE.count(history)
    assert figures["seconds from a kill to that, p50"] == 3
    assert figures["tasks begun again after a kill"] == 1
