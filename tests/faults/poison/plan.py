"""The plan of a run."""

import random
from dataclasses import dataclass
from functools import cached_property

from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import option


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        max_deaths: How many processes may die in a task.
        concurrency: Children of the worker.
        quiet: When all tasks have ended and nothing has moved for so long, s, nothing will.
        patience: The same while there are tasks that have not ended.
        at_most: All must have been sent after this time, s.
    """

    broker: str = option("redis", "what carries the messages", ("redis", "rabbitmq"))
    tasks_kind: str = option(
        "until-done", "carried until done, or acknowledged late", ("until-done", "plain")
    )
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
