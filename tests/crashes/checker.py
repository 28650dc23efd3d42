"""
Says whether every committed task arrived, none of another, and each had its effect once.

Each check is a function of the history that yields what violates it; ``check`` runs all.
Which transactions committed is known from their rows alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from django_celery_safe.sending.relay import BATCH
from tests.crashes.plan import Plan, Witness

#: What nobody's plan knows the number of.
AT_RANDOM = "at random"


class Violation(NamedTuple):
    """What was violated, and how."""

    check: str
    text: str


@dataclass
class History:
    """
    What happened.

    Attributes:
        begun: Numbers of the transactions that began.
        committed: Names in the rows that there are in the end, each with a task.
        arrived: How often each name came to the worker in a message of a transaction.
        followed: How often in a message that the worker sent: link of a chain, retry.
        effects: How often each name was welcomed.
        flagged: Names whose row says that they were.
        left: Rows of the outbox in the end.
        kills: How often a role was killed at a point.
        troubles: What happened to the broker, and how often.
        raised: What sends raised.
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


Check = Callable[[History], Iterator[Violation]]


def check(history: History) -> list[Violation]:
    """Run every check; return all violations."""
    return [violation for each in CHECKS for violation in each(history)]


def lost_tasks(history: History) -> Iterator[Violation]:
    """Each task of a committed transaction arrives at least once."""
    for name in sorted(history.lost):
        yield Violation("lost tasks", f"{name} was committed and never arrived.")


def ghosts(history: History) -> Iterator[Violation]:
    """No task of a rolled-back transaction arrives."""
    for name in sorted({*history.arrived, *history.followed} - history.committed):
        yield Violation("ghosts", f"{name} arrived, and was never committed.")


def too_many_duplicates(history: History) -> Iterator[Violation]:
    """For each kill at most one batch comes again."""
    limit = BATCH * history.kills.total()
    if history.duplicates > limit:
        text = f"{history.duplicates} messages came again; {limit} may."
        yield Violation("too many duplicates", text)


def undone_effects(history: History) -> Iterator[Violation]:
    """What arrived is done, and its row says so."""
    for name in sorted(history.committed - history.lost):
        if not history.effects[name] or name not in history.flagged:
            text = f"{name}: done {history.effects[name]} times, flag {name in history.flagged}."
            yield Violation("undone effects", text)


def repeated_effects(history: History) -> Iterator[Violation]:
    """Nothing is done twice."""
    for name, number in history.effects.items():
        if number > 1:
            yield Violation("repeated effects", f"{name} was done {number} times.")


def leftovers(history: History) -> Iterator[Violation]:
    """The outbox is empty in the end."""
    for row in history.left:
        yield Violation("leftovers", f"The outbox has {row}.")


def errors(history: History) -> Iterator[Violation]:
    """No send raises."""
    for error in history.raised:
        yield Violation("errors", error)


def too_little(history: History) -> Iterator[Violation]:
    """Enough has happened for the other checks to mean something."""
    plan = history.plan
    if len(history.begun) < plan.transactions:
        yield Violation("too little", f"Only {len(history.begun)} transactions began.")
    if not history.committed:
        yield Violation("too little", "No transaction committed.")
    for role in plan.roles:
        for point in plan.points(role):
            number = history.kills[role, point]
            if number < plan.rounds:
                yield Violation("too little", f"The {role} was killed {number} times {point}.")
    for what, number in Counter(plan.troubles).items():
        if history.troubles[what] < number:
            yield Violation("too little", f"The broker was not {what} {number} times.")


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
        "the same for each kill": round(history.duplicates / max(1, history.kills.total()), 2),
        "effects": history.effects.total(),
        "left in the outbox": len(history.left),
    }


CHECKS: Iterable[Check] = (
    lost_tasks,
    ghosts,
    too_many_duplicates,
    undone_effects,
    repeated_effects,
    leftovers,
    errors,
    too_little,
)
