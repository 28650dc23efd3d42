"""Transactions that send through the outbox while everything is killed, and what checks them."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.conftest import require
from tests.crashes import __main__ as command
from tests.crashes.checker import History, check, count
from tests.crashes.plan import BrokerName, Plan
from tests.crashes.recorder import LastingRedis, record
from tests.servers import RabbitMQServer, RedisServer, ServerPool

#: A run of some ten seconds in which each process is killed once at each point.
SHORT = Plan(
    transactions=40,
    rounds=1,
    random_kills=1,
    troubles=("killed",),
    pause=0.2,
    patience=20,
    quiet=4,
    at_most=40,
)

ON_RABBITMQ = replace(SHORT, broker="rabbitmq", random_kills=0, troubles=("stopped",))

#: One in which nothing goes wrong but what is broken on purpose.
CALM = replace(SHORT, rounds=0, random_kills=0, troubles=(), patience=3, quiet=2, pause=0.02)

Run: TypeAlias = Callable[[Plan], History]


@pytest.fixture
def run(redis_server: RedisServer, postgres_alias: str, tmp_path: Path) -> Iterator[Run]:
    """Record a run on a broker of its own, which is stopped and killed."""
    kinds: dict[BrokerName, Any] = {"redis": LastingRedis, "rabbitmq": RabbitMQServer}
    with ServerPool() as brokers:
        yield lambda plan: record(
            plan, require(brokers, kinds[plan.broker]), redis_server, postgres_alias, tmp_path
        )


def found(history: History) -> set[str]:
    """Return the names of the checks that found something wrong."""
    return {violation.check for violation in check(history)}


@pytest.mark.long
@pytest.mark.parametrize("plan", [SHORT, ON_RABBITMQ], ids=["redis", "rabbitmq"])
def test_the_outbox_loses_nothing_whatever_is_killed(plan: Plan, run: Run) -> None:
    """Each committed task arrives, none of a rolled-back transaction, and each is done once."""
    history = run(plan)
    assert check(history) == []
    assert history.plan.transactions <= len(history.begun)


@pytest.mark.long
def test_without_an_outbox_kills_after_the_commit_lose_tasks(run: Run) -> None:
    """Plain ``delay_on_commit`` loses at least the tasks of who died between commit and send."""
    history = run(replace(SHORT, plain=True, troubles=()))
    assert history.kills["sender", "after the commit"] == 1
    assert found(history) == {"lost tasks"}
    assert count(history)["left in the outbox"] == 0


@pytest.mark.long
def test_a_relay_that_remembers_the_last_id_is_found(run: Run) -> None:
    """It never sends what was inserted before, and committed after, what it has sent."""
    history = run(replace(CALM, fault="last-id", transactions=80, pause=0.1))
    assert {"lost tasks", "leftovers"} <= found(history)


@pytest.mark.long
def test_a_relay_that_deletes_before_it_sends_is_found(run: Run) -> None:
    """What it had deleted when it was killed is lost, and the outbox is empty."""
    history = run(replace(SHORT, fault="delete-first", troubles=()))
    assert "lost tasks" in found(history)
    assert history.left == []


@pytest.mark.long
def test_a_retry_that_waits_for_the_commit_is_found(run: Run) -> None:
    """The rollback that Retry causes drops its message: it arrived, and is never done."""
    history = run(replace(CALM, fault="deferred-retry"))
    assert "undone effects" in found(history)
    assert history.lost == set()


def good(**changes: Any) -> History:
    """Return the history of two tasks of one transaction, with changes."""
    both = {"0.0", "0.1"}
    history = History(
        replace(CALM, transactions=1, plain=True),
        begun={0},
        committed=both,
        arrived=Counter(both),
        effects=Counter(both),
        flagged=both,
    )
    return replace(history, **changes)


def test_a_good_history_passes() -> None:
    """Where all went well, nothing is found."""
    assert check(good()) == []
    assert check(good(arrived=Counter(["0.0"]), followed=Counter(["0.1"]))) == []


KILLED = Counter({("sender", "at random"): 1})


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
        (good(plan=replace(CALM, transactions=1, troubles=("stopped",))), "too little"),
    ],
)
def test_each_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert found(history) == {name}


def test_one_batch_may_come_again_for_each_kill() -> None:
    """A hundred duplicates are what one kill may cause."""
    again = Counter({"0.0": 1, "0.1": 101})
    assert check(good(arrived=again, kills=KILLED)) == []


def test_the_command_refuses_a_broken_relay_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``--plain`` has no relay that could be broken."""
    with pytest.raises(SystemExit):
        command.parse(["--plain", "--fault", "last-id"])
    assert "--plain has none" in capsys.readouterr().err
