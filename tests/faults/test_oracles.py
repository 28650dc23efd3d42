"""The oracles, on histories written by hand: each check finds its violation, and no other."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from django_celery_safe import HeldLock
from django_celery_safe.leases.holder import place_name
from tests.faults.carried import history as carried
from tests.faults.carried.plan import Plan as CarriedPlan
from tests.faults.locks import history as locks
from tests.faults.locks.plan import Plan as LocksPlan
from tests.faults.locks.records import NO, YES, Record
from tests.faults.outbox import oracle as outbox
from tests.faults.outbox.plan import Plan as OutboxPlan
from tests.faults.resumable import oracle as resumable
from tests.faults.scenarios import SCENARIOS
from tests.faults.stages import oracle as stages
from tests.faults.stages.plan import Plan as StagesPlan
from tests.faults.tasks import oracle as tasks

pytestmark = pytest.mark.nightly

ORACLES = {scenario.name: scenario.oracle for scenario in SCENARIOS}

#: Locks; times are in ms.


def at(moment: float) -> int:
    """Return a moment in ns."""
    return round(moment * 1e6)


def acquire(token: str, sent: float, lease: float, fence: int = 0, place: int = 1) -> Record:
    """Return an acquisition whose answer took 1 ms, trusted until ``sent + lease``."""
    answer = (YES, token, fence or int(sent) + 1, lease / 1000, at(lease - 1))
    return Record(0, "acquire", place_name("a", place), at(sent), at(sent + 1), *answer)


def act(action: str, token: str, sent: float, outcome: str = YES, **more: Any) -> Record:
    """Return something that a holder did within 1 ms."""
    return Record(0, action, "a", at(sent), at(sent + 1), outcome, token, **more)


def locks_of(*records: Record) -> Any:
    """Return a history of locks."""
    return locks.History(list(records), LocksPlan(processes=2), grace=0.05)


FIRST, SECOND = acquire("x", 0, 100), acquire("y", 60, 100)
REFUSED = Record(1, "acquire", "a", at(72), at(73), NO, seconds=0.1)
OLDER = [acquire("x", 0, 10, 5), acquire("y", 20, 10, 6), act("write", "y", 22, fence=6, number=1)]
OLDER.append(act("write", "x", 24, fence=5, number=2))

#: Tasks; times are small numbers, here and below.


def sent(name: str, asked: int, until: str, duplicate_of: str | None = None) -> tasks.Send:
    """Return a send that took 1."""
    return tasks.Send(name, until, "key", asked, asked + 1, duplicate_of)


def task(**changes: Any) -> Any:
    """Return the history of one task, sent twice at once, that ran from 11 to 20."""
    history = tasks.History(
        sends=[sent("a", 0, "end"), sent("b", 0, "end", duplicate_of="a")],
        tries=[tasks.Try("a", 10, pid=1)],
        runs=[tasks.Run("a", 11, 20, "done")],
        over={"a": 22},
        entries=1,
    )
    return replace(history, **changes)


TWICE: dict[str, Any] = {
    "sends": [sent("a", 0, "end"), sent("b", 18, "end")],
    "tries": [tasks.Try("a", 10, pid=1), tasks.Try("b", 25, pid=2)],
    "runs": [tasks.Run("a", 11, 20, "done"), tasks.Run("b", 26, 30, "done")],
}
LATE = [sent("a", 0, "start"), sent("b", 12, "start", duplicate_of="a")]

#: The outbox.


def outboxed(**changes: Any) -> Any:
    """Return the history of two tasks of one transaction."""
    both = {"0.0", "0.1"}
    history = outbox.History(
        OutboxPlan(transactions=1, broken="plain", rounds=0, troubles=()),
        begun={0},
        committed=both,
        arrived=Counter(both),
        effects=Counter(both),
        flagged=both,
    )
    return replace(history, **changes)


#: Stages: one run of two with one step each; both ran in process 7, one after the other.
ONE, TWO = stages.Execution(1, 7, 10, 0, 20), stages.Execution(2, 7, 30, 1, 40)


def staged(*executions: stages.Execution, **changes: Any) -> Any:
    """Return the history of a run with these executions; without any, of one that went well."""
    plan = StagesPlan(runs=1, stages=2, steps=1, child_kills=0, worker_kills=0, restarts=0)
    history = stages.History(
        plan,
        runs={1: stages.Run("succeeded", frozenset({"0.0", "1.0"}))},
        steps={
            1: stages.Step(1, 0, 0, "a", "succeeded", has_end=True),
            2: stages.Step(1, 1, 0, "b", "succeeded", has_end=True),
        },
        messages=Counter("ab"),
        successes=Counter("ab"),
        harms=Counter(["children killed", "killed inside a step", "again"]),
    )
    for one in executions or (ONE, TWO):
        history.executions[one.step].append(one)
    return replace(history, **changes)


#: Two more executions of the first step, in two processes that had the same id.
AGAIN, LATER = stages.Execution(1, 6, 5, 0, 6), stages.Execution(1, 6, 8)

#: Carried: the only task, which ran in process 7, a child of 2; and a first run of it in 6.
ID = "task-0"
ONLY, BEFORE = carried.Run(ID, 7, 10, 0, 2, 20, "done"), carried.Run(ID, 6, 4, 0, 1)
HARMS: dict[str, Any] = dict.fromkeys(
    ("child_kills", "worker_kills", "relay_kills", "pauses", "restarts", "flushes"), 0
)
S = 10**9
LATE_RUN = replace(ONLY, begun=16 * S, ended=17 * S)
OTHER_RUN = carried.Run("task-1", 8, 14 * S, 0, ONLY.worker, 17 * S, "done")


def carry(*runs: carried.Run, **changes: Any) -> Any:
    """Return the history of a task with these runs; without any, of a task that went well."""
    # With this seed something is rolled back.
    plan = CarriedPlan(tasks=1, seed=14, database_restarts=0, **HARMS)
    history = carried.History(plan, committed={ID: 1}, ends={ID: 30})
    for one in runs or (ONLY,):
        history.runs[one.id].append(one)
    return replace(history, **changes)


#: Resumable: three rows, each written to once.
WALKED = resumable.History(
    resumable.Plan(child_kills=1, worker_kills=0, shutdowns=1),
    written=Counter({1: 3}),
    harms=Counter(["children killed", "workers shut down", "killed inside a task"]),
    obeyed=[0.5],
)


BAD: dict[str, dict[str, Any]] = {
    "locks": {
        "two holders": locks_of(FIRST, acquire("y", 98, 100)),
        "too many holders": locks_of(FIRST, acquire("y", 10, 100, place=2)),
        "broken promises": locks_of(FIRST, act("ensure", "x", 50, "LockLost")),
        "unordered fences": locks_of(acquire("x", 0, 10, 5), acquire("y", 20, 10, 4)),
        "older writes": locks_of(*OLDER),
        "refusals without a holder": locks_of(acquire("x", 0, 20), REFUSED),
        "incomplete answers": locks_of(FIRST._replace(token=None)),
        "too little": locks.History([], LocksPlan(processes=2, nemesis="restart")),
    },
    "tasks": {
        "two at once": task(overlaps=[{"section": "key", "at_ns": 15}]),
        "lost tasks": task(runs=[tasks.Run("a", 11, 20, "retried")]),
        "undone work": task(sends=[*LATE, sent("c", 12, "start")]),
        "swallowed sends": task(sends=[sent("a", 0, "end"), sent("b", 23, "end", "a")]),
        "sent twice": task(**TWICE),
        "ghosts": task(tries=[tasks.Try("a", 10, pid=1), tasks.Try("b", 30, pid=1)]),
        "leftovers": task(locks=[HeldLock("sent:task:key", "token", 3599.0)]),
        "too little": tasks.History(),
    },
    "outbox": {
        "lost tasks": outboxed(arrived=Counter(["0.0"])),
        "ghosts": outboxed(arrived=Counter(["0.0", "0.1", "1.0"])),
        "too many duplicates": outboxed(arrived=Counter({"0.0": 1, "0.1": 2})),
        "undone effects": outboxed(flagged={"0.0"}),
        "repeated effects": outboxed(effects=Counter({"0.0": 1, "0.1": 2})),
        "leftovers": outboxed(left=["tests.app.tasks.note"]),
        "errors": outboxed(raised=["Traceback"]),
        "too little": outboxed(plan=OutboxPlan(transactions=1, rounds=1, troubles=())),
    },
    "stages": {
        "stuck runs": staged(runs={1: stages.Run("running", frozenset())}),
        "lost params": staged(ONE, replace(TWO, known=0)),
        "early steps": staged(ONE, replace(TWO, begun=15)),
        "stages begun": staged(messages=Counter("abb")),
        "steps succeeded": staged(successes=Counter("abb")),
        "needless executions": staged(AGAIN, ONE, TWO, killed={6: [4]}),
        "two at once": staged(replace(AGAIN, ended=None), ONE, TWO, killed={6: [15]}),
        "leftovers": staged(AGAIN, LATER, ONE, TWO, killed={6: [7, 9]}, left=["a task"]),
        "too little": staged(harms=Counter()),
    },
    "carried": {
        "lost tasks": carry(BEFORE, killed={6: [5]}, ends={}),
        "unended rows": carry(left={ID: carried.Row("sent", "")}),
        "wrong failures": carry(left={ID: carried.Row("failed", "ValueError")}),
        "wrong retries": carry(replace(ONLY, retries=1)),
        "ghosts": carry(ONLY, carried.Run("dropped-0", 7, 40)),
        "runs after the end": carry(ONLY, carried.Run(ID, 7, 40, 0, 2, 50, "done")),
        "ends by others": carry(ends={ID: 15}),
        "needless runs": carry(BEFORE, replace(ONLY, pid=6), killed={6: [40]}),
        "two at once": carry(BEFORE, ONLY, killed={6: [15]}),
        "leases cut short": carry(deaths=[carried.Death(ID, 6, 9, 0.5)], killed={6: [5]}),
        "needless deaths": carry(deaths=[carried.Death(ID, 6, 9, -0.5)], killed={6: [10]}),
        # It begins 6 s after its kill, and its worker had time for another before.
        "late recoveries": carry(
            *(BEFORE, LATE_RUN, OTHER_RUN),
            committed={ID: 1, "task-1": int(13.5 * S)},
            ends={ID: 18 * S, "task-1": 18 * S},
            killed={6: [10 * S]},
            deaths=[carried.Death(ID, 6, 15 * S, -1)],
        ),
        "too little": carry(committed={}, runs={}, ends={}),
    },
    "resumable": {
        "rows written twice": replace(WALKED, written=Counter({1: 2, 2: 1})),
        "rows left out": replace(WALKED, written=Counter({1: 2, 0: 1})),
        "unended tasks": replace(WALKED, left=Counter(["sent"])),
        "slow shutdowns": replace(WALKED, obeyed=[0.5, 9.0]),
        "too little": replace(WALKED, harms=Counter()),
    },
}

#: Violations that come along with another one.
WITH_OTHERS = {
    ("tasks", "undone work"): {"swallowed sends", "lost tasks"},
    ("carried", "runs after the end"): {"needless runs"},
    ("carried", "needless runs"): {"two at once"},
}


@pytest.mark.parametrize("name", BAD)
def test_each_check_finds_its_violation(name: str) -> None:
    """
    A history with one thing wrong is found by that thing's name, and each check has one.

    A deliberate fault is to be found by checks that there are.
    """
    checks = {check.__name__.replace("_", " ") for check in ORACLES[name].checks}
    assert checks == set(BAD[name])
    for check, history in BAD[name].items():
        found = {each.check for each in ORACLES[name].check(history)}
        assert check in found, check
        assert found - {check, "too little"} == WITH_OTHERS.get((name, check), set()), check
    variants = {one.name: one.variants for one in SCENARIOS}[name]
    assert {found for names in variants.values() for found in names} <= checks
