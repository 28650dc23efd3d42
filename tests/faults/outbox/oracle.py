"""
Says whether every committed task arrived, none of another, and each had its effect once.

Each check is a function of the history that yields what violates it.
The rows of the transactions alone show which ones committed.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from django_celery_safe.sending.relay import BATCH
from tests.faults.oracle import Findings, Oracle, scarce
from tests.faults.outbox.plan import Plan, Witness
from tests.faults.outbox.points import PLACES

#: The end of a process that is killed at a random moment.
AT_RANDOM = "at random"


@dataclass
class History:
    """
    The events of a run.

    Attributes:
        begun: Numbers of the transactions that began.
        committed: Names in the rows that there are in the end, each with a task.
        arrived: How often each name came to the worker in a message of a transaction.
        followed: How often in a message that the worker sent: link of a chain, retry.
        effects: How often each name was welcomed.
        flagged: Names whose row says that they were.
        left: Rows of the outbox in the end.
        kills: How often a role was killed at a point.
        troubles: The faults of the broker, and how often each came.
        raised: The errors of sends.
    """

    plan: Plan
    begun: set[int] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    arrived: Counter[str] = field(default_factory=Counter)
    followed: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    flagged: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    raised: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, plan: Plan, witness: Witness, people: dict[str, bool], left: list[str]) -> Self:
        """
        Put together what the witnesses wrote.

        Args:
            people: The rows: names, and whether they are flagged.
        """
        history = cls(plan, committed=set(people), left=left)
        history.flagged = {name for name, flagged in people.items() if flagged}
        history.kills.update((kill["role"], kill["point"]) for kill in witness.kills().values())
        for entry in witness.journal.entries():
            history._add(entry)
        return history

    def _add(self, entry: dict[str, Any]) -> None:
        match entry["effect"]:
            case "begun":
                self.begun.add(entry["number"])
            case "arrived" if entry["source"] == "transaction":
                self.arrived[entry["name"]] += 1
            case "arrived":
                self.followed[entry["name"]] += 1
            case "greeted":
                self.effects[entry["name"]] += 1
            case "broker":
                self.troubles[entry["what"]] += 1
            case "raised":
                self.raised.append(entry["error"])

    @property
    def lost(self) -> set[str]:
        """Names of committed tasks that never came."""
        return self.committed - set(self.arrived) - set(self.followed)

    @property
    def duplicates(self) -> int:
        """How many messages came that had come before."""
        return self.arrived.total() - len(self.arrived)


def points_of(plan: Plan, role: str) -> list[str]:
    """Return the points at which a process of this role dies in a run of this plan."""
    if plan.is_plain:
        return ["after the commit", "inside the publication", "after the publication"]
    # Only kombu's Redis publishes a batch in one request.
    return [point for point in PLACES[role] if plan.broker == "redis" or "pipeline" not in point]


def lost_tasks(history: History) -> Findings:
    """Each task of a committed transaction arrives at least once."""
    for name in sorted(history.lost):
        yield f"{name} was committed and never arrived."


def ghosts(history: History) -> Findings:
    """No task of a rolled-back transaction arrives."""
    for name in sorted({*history.arrived, *history.followed} - history.committed):
        yield f"{name} arrived, and was never committed."


def too_many_duplicates(history: History) -> Findings:
    """For each kill at most one batch comes again."""
    limit = BATCH * history.kills.total()
    if history.duplicates > limit:
        yield f"{history.duplicates} messages came again; {limit} may."


def undone_effects(history: History) -> Findings:
    """A task that arrived is done, and its row says so."""
    for name in sorted(history.committed - history.lost):
        if not history.effects[name] or name not in history.flagged:
            yield f"{name}: done {history.effects[name]} times, flag {name in history.flagged}."


def repeated_effects(history: History) -> Findings:
    """Nothing is done twice."""
    for name, number in history.effects.items():
        if number > 1:
            yield f"{name} was done {number} times."


def leftovers(history: History) -> Findings:
    """The outbox is empty in the end."""
    for row in history.left:
        yield f"The outbox has {row}."


def errors(history: History) -> Findings:
    """No send raises."""
    yield from history.raised


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    plan = history.plan
    points = [(role, point) for role in plan.roles for point in points_of(plan, role)]
    wanted = {
        "transactions begun": plan.transactions,
        "transactions committed": 1,
        **{f"kills of {role}: {point}": plan.rounds for role, point in points},
        **{f"broker {what}": plan.troubles.count(what) * plan.rounds for what in plan.troubles},
    }
    return scarce(count(history), wanted)


def count(history: History) -> dict[str, float]:
    """Count what happened."""
    committed = {int(name.partition(".")[0]) for name in history.committed}
    kills = {
        f"kills of {role}: {point}": number
        for (role, point), number in sorted(history.kills.items())
    }
    return {
        "transactions begun": len(history.begun),
        "transactions committed": len(committed),
        "rolled back or killed": len(history.begun - committed),
        **kills,
        "kills": history.kills.total(),
        **{f"broker {what}": number for what, number in sorted(history.troubles.items())},
        "tasks committed": len(history.committed),
        "tasks arrived": len(history.committed - history.lost),
        "tasks lost": len(history.lost),
        "messages that came again": history.duplicates,
        "effects": history.effects.total(),
        "left in the outbox": len(history.left),
    }


CHECKS = [
    lost_tasks, ghosts, too_many_duplicates, undone_effects, repeated_effects, leftovers, errors,
    too_little,
]  # fmt: skip
ORACLE = Oracle(count, CHECKS)
