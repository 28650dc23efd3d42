"""Runs of stages while everything around them is killed, and what checks them."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from tests.faults.brokers import FolderBroker
from tests.faults.lab import Lab
from tests.faults.stages.folder import Transport
from tests.faults.stages.oracle import ORACLE, Execution, History, Repair, Run, Step
from tests.faults.stages.plan import Plan
from tests.faults.stages.scenario import record

pytestmark = pytest.mark.nightly

#: A run of some ten seconds.
SHORT = Plan(
    runs=6,
    stages=3,
    steps=4,
    durations=((0.3, 1),),
    pause=0.2,
    between_kills=(0.3, 0.6),
    child_kills=3,
    worker_kills=0,
    restarts=0,
    quiet=3.5,
    at_most=220,
)

#: A plan without faults, except for the part that is broken on purpose.
CALM = replace(
    SHORT,
    runs=5,
    steps=6,
    durations=((0.01, 1),),
    beat=0.3,
    pause=0.01,
    child_kills=0,
    quiet=2,
)


def test_workers_that_begin_at_once_in_one_folder(tmp_path: Path) -> None:
    """Each finds the table of queues whole, whoever of them makes it."""
    options = FolderBroker(tmp_path / "broker").settings()["CELERY_BROKER_TRANSPORT_OPTIONS"]
    together = threading.Barrier(4)

    def bind(number: int) -> None:
        with Connection(transport=Transport, transport_options=options) as connection:
            together.wait(20)
            connection.channel()._queue_bind(f"exchange{number}", "key", "", "celery")

    for number in range(20):
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(bind, number) for _ in range(4)]:
                done.result(30)


@pytest.mark.parametrize(
    "changes",
    [{}, {"broker": "filesystem", "database": "sqlite-immediate"}],
    ids=["servers", "no servers"],
)
def test_each_stage_begins_once_whoever_is_killed(changes: dict[str, Any], lab: Lab) -> None:
    """
    Children are killed and messages come twice, and after one sweep all runs succeed.

    The same holds on SQLite and a folder, which lose a killed worker's messages.
    """
    history = record(replace(SHORT, **changes), lab)
    assert ORACLE.check(history) == []
    assert ORACLE.count(history)["steps"] == SHORT.runs * SHORT.stages * SHORT.steps


def test_an_engine_without_the_lock_is_found(lab: Lab) -> None:
    """An engine that only counts ended steps begins a stage twice, or never."""
    history = record(replace(CALM, broken="counter"), lab)
    assert ORACLE.found(history) & {"stages begun", "unrepaired stages"}


# Histories written by hand; times are small numbers.

#: One run of two stages with one step each: both ran in process 7, one after the other.
FIRST, SECOND = Execution(1, 7, 10, 0, 20), Execution(2, 7, 30, 1, 40)


def history_of(*executions: Execution, **changes: Any) -> History:
    """Return the history of a run with these executions; without any, of one that went well."""
    history = History(
        replace(CALM, runs=1, stages=2, steps=1),
        runs={1: Run("succeeded", frozenset({"0.0", "1.0"}))},
        steps={
            1: Step(1, 0, 0, "a", "succeeded", 2, has_end=True),
            2: Step(1, 1, 0, "b", "succeeded", 2, has_end=True),
        },
        messages=Counter("ab"),
        successes=Counter("ab"),
        stages_told=Counter([(1, 0), (1, 1)]),
        successes_told=Counter([1, 2]),
        kills=Counter({"children": 1, "inside": 1}),
        again=1,
    )
    for one in executions or (FIRST, SECOND):
        history.executions[one.step].append(one)
    return replace(history, **changes)


def row(pk: int, **changes: Any) -> dict[int, Step]:
    """Return the rows of the two steps, with changes in one."""
    steps = history_of().steps
    return {**steps, pk: steps[pk]._replace(**changes)}


def test_a_good_history_passes() -> None:
    """Where all went well, nothing is found."""
    assert ORACLE.check(history_of()) == []


@pytest.mark.parametrize(
    "history",
    [
        # Killed inside, and done again by its message.
        history_of(Execution(1, 6, 5), FIRST, SECOND, killed={6: 6}),
        # Killed after its end, before the commit.
        history_of(Execution(1, 6, 5, 0, 6), FIRST, SECOND, killed={6: 7}),
        # Paused for longer than its lease.
        history_of(Execution(1, 6, 5, 0, 25), FIRST, SECOND, lost={(6, 1)}),
        # Sent again by the sweep.
        history_of(messages=Counter("aab"), repairs=[Repair(1, "a", "its process died")]),
        # Killed after the commit, before the signals.
        history_of(
            FIRST,
            replace(SECOND, pid=8),
            killed={7: 25},
            stages_told=Counter([(1, 0)]),
            successes_told=Counter([2]),
        ),
    ],
)
def test_what_a_kill_explains_passes(history: History) -> None:
    """A step may run again if its process died, and a signal may be missing then."""
    assert ORACLE.check(history) == []


@pytest.mark.parametrize(
    ("history", "name"),
    [
        (history_of(runs={1: Run("running", frozenset())}), "stuck runs"),
        (history_of(runs={1: Run("succeeded", frozenset({"1.0"}))}), "lost params"),
        (history_of(FIRST, replace(SECOND, known=0)), "lost params"),
        (history_of(FIRST, replace(SECOND, begun=15)), "early steps"),
        (history_of(replace(FIRST, ended=None), SECOND, killed={7: 50}), "early steps"),
        (history_of(messages=Counter("abb")), "stages begun"),
        (history_of(messages=Counter("a")), "stages begun"),
        (history_of(repairs=[Repair(1, "b", "its process died")]), "stages begun"),
        (history_of(stages_told=Counter([(1, 0), (1, 1), (1, 1)])), "stages begun"),
        (history_of(stages_told=Counter([(1, 0)])), "untold"),
        (history_of(successes_told=Counter([1])), "untold"),
        # Killed, but not in or right after the step.
        (history_of(killed={7: 25}, successes_told=Counter([2])), "untold"),
        (history_of(repairs=[Repair(1, "", "its stage was complete")]), "unrepaired stages"),
        (history_of(successes=Counter("abb")), "steps succeeded"),
        (history_of(successes_told=Counter([1, 2, 2])), "steps succeeded"),
        (history_of(steps=row(2, status="running")), "steps succeeded"),
        (history_of(steps=row(2, has_end=False)), "steps succeeded"),
        (history_of(steps=row(2, starts=0)), "steps succeeded"),
        (history_of(Execution(1, 6, 5, 0, 6), FIRST, SECOND), "needless executions"),
        (history_of(Execution(1, 6, 5, 0, 6), FIRST, SECOND, killed={6: 4}), "needless executions"),
        (history_of(Execution(1, 6, 5, 0, 15), FIRST, SECOND, killed={6: 16}), "two at once"),
        (history_of(Execution(1, 6, 5), FIRST, SECOND, killed={6: 15}), "two at once"),
        (history_of(left=["a task"]), "leftovers"),
        (history_of(kills=Counter({"children": 1})), "too little"),
        (history_of(kills=Counter({"inside": 1})), "too little"),
        (history_of(messages=Counter({"a": 400, "b": 1})), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert name in ORACLE.found(history)


def test_an_empty_history_proves_nothing() -> None:
    """A run in which nothing happened is rejected."""
    plan = replace(SHORT, worker_kills=1, restarts=1)
    missing = " ".join(violation.text for violation in ORACLE.check(History(plan)))
    for what in ("runs", "steps", "children killed", "workers killed", "broker restarted"):
        assert f"{what}: 0" in missing
