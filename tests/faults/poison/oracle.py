"""Says whether tasks that kill their processes were given up, and all others were done."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, get_args

from django_celery_safe.models import OutboxMessage
from tests.faults.brokers import BrokerName
from tests.faults.oracle import Findings, Oracle, scarce
from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import Witness, option
from tests.servers.databases import SERVERS


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        max_deaths: How many processes may die in a task.
        concurrency: Children of the worker.
        quiet: When all tasks have ended and nothing has moved for so long, s, nothing will.
        patience: The same while there are tasks that have not ended.
        at_most: All must have been sent after this time, s, and ended after it once more.
    """

    broker: str = option("redis", "what carries the messages", get_args(BrokerName))
    database: str = option("postgres", "what has the outbox", SERVERS)
    tasks: int = option(1_000, "how many there are")
    poison: int = option(5, "how many of them kill their process each time")
    max_deaths: int = 3
    concurrency: int = 2
    quiet: float = 5.0
    patience: float = 60.0
    at_most: float = 600.0

    @cached_property
    def poisonous(self) -> set[int]:
        """The tasks that kill their processes."""
        return set(random.Random(self.seed).sample(range(self.tasks), self.poison))


@dataclass
class History:
    """
    The events of one recording, by the numbers of the tasks.

    Attributes:
        begun: How often each was begun.
        done: How often each came to its end.
        failed: The types of the errors that each failed with.
        rows: The states of the rows that are left, and of the errors in them.
    """

    plan: Plan
    begun: Counter[int] = field(default_factory=Counter)
    done: Counter[int] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0

    @classmethod
    def read(cls, plan: Plan, witness: Witness, alias: str, seconds: float = 0.0) -> Self:
        """Put together what the witness wrote, and the rows."""
        history = cls(plan, seconds=seconds)
        history.begun = witness.journal.tally("task", "begun")
        history.done = witness.journal.tally("task", "done")
        for entry in witness.journal.entries("failed"):
            history.failed[entry["task"]].append(entry["error"])
        rows = OutboxMessage.objects.using(alias)
        history.rows = Counter((row.state, row.error_type) for row in rows)
        return history

    @property
    def healthy(self) -> set[int]:
        """The tasks that kill nobody."""
        return set(range(self.plan.tasks)) - self.plan.poisonous

    def is_over(self, seconds: float) -> bool:
        """Return whether there is nothing to wait for when nothing has moved for so long."""
        if self.begun and max(self.begun.values()) > 2 * self.plan.max_deaths:
            return True  # it would go on for ever
        have_ended = len(self.done) + len(self.failed) >= self.plan.tasks
        return seconds > (self.plan.quiet if have_ended else self.plan.patience)


def lost_tasks(history: History) -> Findings:
    """Each task that kills nobody is done."""
    for number in sorted(history.healthy - set(history.done)):
        yield f"Task {number} was begun {history.begun[number]} times and never done."


def needless_runs(history: History) -> Findings:
    """A task that kills nobody is begun once."""
    for number in sorted(history.healthy):
        if history.begun[number] > 1:
            yield f"Task {number} was begun {history.begun[number]} times."


def wrong_deaths(history: History) -> Findings:
    """A task that kills its process is begun as often as processes may die in it."""
    for number in sorted(history.plan.poisonous):
        if history.begun[number] != history.plan.max_deaths:
            yield f"Task {number}, which kills, was begun {history.begun[number]} times."


def wrong_failures(history: History) -> Findings:
    """Tasks that kill their processes fail as poisoned, once, and no other task fails."""
    for number in sorted(history.plan.poisonous | set(history.failed)):
        wanted = ["TaskPoisoned"] if number in history.plan.poisonous else []
        if history.failed.get(number, []) != wanted:
            yield f"Task {number} failed with {history.failed.get(number)}, not {wanted}."


def wrong_rows(history: History) -> Findings:
    """The rows that are left are those of carried tasks that were given up."""
    wanted = Counter({("failed", "TaskPoisoned"): history.plan.poison})
    if history.rows != wanted:
        yield f"There are rows: {dict(history.rows)}."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    yield from scarce(count(history), {"tasks": 1, "processes killed": 1})


def count(history: History) -> dict[str, float]:
    """Count what happened."""
    return {
        "tasks": len(history.begun),
        "done": len(history.done),
        "failed": len(history.failed),
        "processes killed": sum(history.begun[number] for number in history.plan.poisonous),
        "seconds until all had ended": round(history.seconds, 1),
    }


ORACLE = Oracle(
    count,
    [lost_tasks, needless_runs, wrong_deaths, wrong_failures, wrong_rows, too_little],
)
