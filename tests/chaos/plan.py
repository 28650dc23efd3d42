"""What a run is to do, as plain data that goes to every process."""

from dataclasses import dataclass
from pathlib import Path

from tests.processes import Gauge, Journal

#: Lease of the runs, s: for so long a killed one keeps its key from others.
LEASE = 2.0

#: After so many seconds the broker gives out again what was not acknowledged.
VISIBILITY_TIMEOUT = 4.0


@dataclass(frozen=True)
class Plan:
    """
    What to record.

    Args:
        tasks: How many are sent, each by both senders at once.
        keys: How many there are; both tasks use all.
        seed: What is sent, and who is killed; not what runs do, nor when.
        pause: Mean time between two sends, s.
        worker_kills: How often a whole worker is killed, and started again.
        workers: How many there are.
        concurrency: Children of each.
        patience: How long it may take until all is done when everything is sent, s.
        at_most: The sends must be done after this time, s.
    """

    tasks: int
    keys: int = 20
    seed: int = 0
    pause: float = 0.05
    worker_kills: int = 2
    workers: int = 2
    concurrency: int = 2
    patience: float = 90.0
    at_most: float = 1200.0


@dataclass(frozen=True)
class Witness:
    """Files that tell what really happened, found by their folder in any process."""

    folder: Path

    @property
    def gauge(self) -> Gauge:
        """How many runs of one task and key went on at once."""
        return Gauge(self.folder / "gauge")

    def inside(self) -> set[int]:
        """Return the processes in which something runs, or ran when they were killed."""
        tickets = (self.folder / "gauge").glob("*/*")
        return {int(ticket.name.partition(".")[0]) for ticket in tickets}

    @property
    def journal(self) -> Journal:
        """What was sent, run and killed; see ``checker.History``."""
        return Journal(self.folder / "journal.jsonl")
