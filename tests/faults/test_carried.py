"""Tasks that are carried while everything around them is killed, and what checks them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.carried.history import Death, History, Row, Run
from tests.faults.carried.oracle import ORACLE
from tests.faults.carried.plan import Plan
from tests.faults.carried.scenario import VARIANTS, record
from tests.faults.lab import Lab

pytestmark = pytest.mark.nightly

#: A run of some thirty seconds; a busy machine may begin a killed task late.
SHORT = Plan(
    grace=60.0,
    tasks=120,
    child_kills=5,
    worker_kills=1,
    relay_kills=1,
    pauses=1,
    restarts=1,
    flushes=1,
    database_restarts=1,
    at_most=220,
)

#: Changes that make the plan smaller.
SMALLER = {"tasks": 60, "worker_kills": 0, "child_kills": 8}

#: A plan without faults, except for the part that is broken on purpose.
CALM = replace(
    SHORT,
    tasks=60,
    child_kills=0,
    worker_kills=0,
    relay_kills=0,
    pauses=0,
    restarts=0,
    flushes=0,
    database_restarts=0,
    quiet=3.0,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**SMALLER, "broker": "rabbitmq", "database": "pgbouncer"},
        {**SMALLER, "database": "mariadb"},
        {"broker": "filesystem", "tasks": 60, "child_kills": 3},
    ],
    ids=["redis", "rabbitmq and PgBouncer", "MariaDB", "filesystem"],
)
def test_each_task_is_done_whatever_is_killed_or_lost(changes: dict[str, Any], lab: Lab) -> None:
    """The broker forgets, processes die, and each committed task still ends once."""
    history = record(replace(SHORT, **changes), lab)
    assert ORACLE.check(history) == []
    assert len(history.committed) == history.plan.tasks


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        ("no-token", {"pauses": 3}),
        ("ignores-leases", {"tasks": 20}),
        ("done-first", {"child_kills": 4}),
        ("new-id", {"child_kills": 4}),
    ],
)
def test_each_fault_is_found(broken: str, changes: dict[str, int], lab: Lab) -> None:
    """
    The oracle finds each thing that a worker or a relay must not do.

    The faults: a row ends before the work or without its token, and a relay claims the task of
    a living process or re-sends it under a new id.
    """
    history = record(replace(CALM, broken=broken, **changes), lab)
    assert ORACLE.found(history) & set(VARIANTS[broken])


@pytest.mark.parametrize(
    ("sent", "loses"),
    [
        ("celery", True),
        ("acks-late", True),
        ("reject-lost", False),
        ("until-a-broker", True),
        ("until-done", False),
    ],
)
def test_who_loses_tasks_by_the_kill_of_a_child(sent: str, loses: bool, lab: Lab) -> None:
    """Lost tasks are counted; a lost task violates a promise only if it was carried."""
    patience = 5.0 if loses else CALM.patience
    history = record(replace(CALM, sent=sent, child_kills=6, patience=patience), lab)
    assert ORACLE.check(history) == []
    assert (ORACLE.count(history)["lost"] > 0) is loses


@pytest.mark.parametrize(
    "changes", [{"sent": "celery", "broken": "no-token"}, {"broker": "redis", "queue": "quorum"}]
)
def test_a_plan_that_says_two_things_is_refused(changes: dict[str, str]) -> None:
    """Only carried tasks can be broken, and only RabbitMQ has quorum queues."""
    assert replace(CALM, **changes).objection() is not None
    assert CALM.objection() is None


# Histories written by hand; times are small numbers.

#: The only task, which ran in process 7, a child of 2.
ID = "task-0"
ONLY = Run(ID, 7, 10, 0, 2, 20, "done")
#: Its first run, where there was another one.
FIRST = Run(ID, 6, 4, 0, 1)


def history_of(*runs: Run, **changes: Any) -> History:
    """Return the history of a task with these runs; without any, of a task that went well."""
    plan = replace(CALM, tasks=1, seed=rolling_seed())
    history = History(plan, committed={ID: 1}, ends={ID: 30})
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
    """The oracle finds nothing in a run where all went well."""
    assert ORACLE.check(history_of()) == []


@pytest.mark.parametrize(
    "history",
    [
        # Killed inside, and done by another.
        history_of(FIRST, ONLY, killed={6: [5]}, deaths=[Death(ID, 6, 9, -1)]),
        # Another process had its id before, and was killed too.
        history_of(FIRST, ONLY, killed={6: [2, 5]}, deaths=[Death(ID, 6, 9, -1)]),
        # Killed after its end, before the row's.
        history_of(replace(FIRST, ended=5, ending="done"), ONLY, killed={6: [6]}),
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


def test_the_figures_tell_what_was_done_twice() -> None:
    """Two runs to the end are counted as done twice; a run that ended in a retry is not."""
    again = replace(ONLY, pid=8, begun=25, ended=28)
    assert ORACLE.count(history_of(ONLY, again))["done twice"] == 1
    retried = replace(FIRST, ended=5, ending="retried")
    assert ORACLE.count(history_of(retried, ONLY))["done twice"] == 0


def test_tasks_of_others_may_be_lost() -> None:
    """They are counted and break no promise, but a task that began uncommitted does."""
    history = history_of(FIRST, ends={})
    history = replace(history, plan=replace(history.plan, sent="celery"))
    assert ORACLE.count(history)["lost"] == 1
    assert ORACLE.check(history) == []
    history.runs["dropped-0"] = [Run("dropped-0", 7, 40)]
    assert ORACLE.found(history) == {"ghosts"}


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
        (history_of(FIRST, replace(ONLY, pid=6), killed={6: [40]}), "needless runs"),
        (history_of(FIRST, ONLY, killed={6: [15]}), "two at once"),
        (history_of(deaths=[Death(ID, 6, 9, 0.5)], killed={6: [5]}), "leases cut short"),
        (history_of(deaths=[Death(ID, 6, 9, -0.5)], killed={6: [10]}), "needless deaths"),
        (history_of(committed={}), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """Each violation is found under its name."""
    assert name in ORACLE.found(history)


def test_an_empty_history_proves_nothing() -> None:
    """A run in which nothing happened is rejected."""
    missing = " ".join(violation.text for violation in ORACLE.check(History(SHORT)))
    for what in ("tasks", *SHORT.harms, "killed inside a task", "runs again"):
        assert f"{what}: 0" in missing


SECOND = 10**9
#: When the process of the first run is killed, and a late run of its task.
KILLED = {FIRST.pid: [10 * SECOND]}
LATE = replace(ONLY, begun=16 * SECOND, ended=17 * SECOND)


def history_after_a_kill(other: int, **changes: Any) -> History:
    """Return a history: a task begins 6 s after its kill, and another at ``other``, s."""
    another = Run("task-1", 8, other * SECOND, 0, ONLY.worker, LATE.ended, "done")
    committed = {ID: 1, "task-1": int((other - 0.5) * SECOND)}
    history = history_of(FIRST, LATE, another, killed=KILLED, committed=committed, **changes)
    return replace(history, plan=replace(history.plan, grace=2.0))


def test_a_task_that_an_idle_worker_begins_late_is_found() -> None:
    """The worker began another task, sent later, when it could have begun the killed one."""
    history = history_after_a_kill(14)
    assert "late recoveries" in ORACLE.found(history)
    assert ORACLE.count(history)["seconds from a kill to an idle worker, max"] == 6


@pytest.mark.parametrize(
    "history",
    [
        # The worker began nothing that was sent later, until it was too late.
        history_after_a_kill(13),
        history_after_a_kill(16),
        # The broker had been restarted, or lost its messages meanwhile.
        history_after_a_kill(14, struck=[(9 * SECOND, 11 * SECOND)]),
        history_after_a_kill(14, struck=[(12 * SECOND, 27 * SECOND)]),
    ],
)
def test_a_task_that_nobody_could_begin_in_time_passes(history: History) -> None:
    """A task may wait while the worker is busy, and while another fault has effects."""
    assert "late recoveries" not in ORACLE.found(history)
    assert ORACLE.count(history)["of these by an idle worker"] == 0


def test_the_figures_tell_how_long_a_task_waits_after_a_kill() -> None:
    """The wait lasts from the kill of a process inside the task to the task's next beginning."""
    first, later = Run(ID, 6, SECOND), Run(ID, 7, 5 * SECOND, 0, 2, 6 * SECOND, "done")
    history = history_of(first, later, killed={6: [2 * SECOND]}, harms=Counter())
    figures = ORACLE.count(history)
    assert figures["seconds from a kill to that, p50"] == 3
    assert figures["tasks begun again after a kill"] == 1
