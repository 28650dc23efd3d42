"""The plan of a run."""

from dataclasses import dataclass

from tests.faults.scenario import AnyPlan, option

#: Lease of the runs, s: for so long a killed one keeps its key from others.
LEASE = 2.0

#: After so many seconds the broker gives out again what was not acknowledged.
VISIBILITY_TIMEOUT = 4.0


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of a run; both tasks use all keys.

    Args:
        workers: How many there are.
        concurrency: Children of each.
        patience: How long it may take until all is done when everything is sent, s.
        at_most: The sends must be done after this time, s.
    """

    tasks: int = option(2000, "each is sent twice at once")
    keys: int = option(20, "how many the tasks share")
    pause: float = option(0.05, "mean time between two sends, s")
    worker_kills: int = option(2, "how often a whole worker is killed")
    workers: int = 2
    concurrency: int = 2
    patience: float = 90.0
    at_most: float = 1200.0
