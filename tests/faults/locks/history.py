"""The history of a run: its records, what was done to it, and what follows from both."""

from dataclasses import dataclass, field
from functools import cached_property

from tests.faults.locks.holdings import Holding, holdings_of
from tests.faults.locks.plan import Plan
from tests.faults.locks.records import MemoryLoss, Pause, Record, is_operation


@dataclass
class History:
    """
    Everything that is known about one run.

    Args:
        records: In the order in which each process wrote them.
        grace: By how much a lock may stay taken after the last lease that is known
            of, s: for a waiter to whom it was handed, and for a renewal that was
            sent late by a process that stood still.
    """

    records: list[Record]
    plan: Plan
    grace: float = 2.0
    pauses: list[Pause] = field(default_factory=list)
    losses: list[MemoryLoss] = field(default_factory=list)

    @cached_property
    def holdings(self) -> list[Holding]:
        """Every acquisition."""
        return holdings_of(self.records)

    @property
    def operations(self) -> int:
        """How many requests to the store were answered."""
        return sum(is_operation(record) for record in self.records)

    def explains(self, holding: Holding, since: int, until: int) -> bool:
        """Whether a lease from before a loss of memory explains what was from then till then."""
        return any(
            loss.since <= since
            and until <= loss.gone + holding.longest
            and holding.acquired.sent < loss.gone
            for loss in self.losses
        )
