"""The plan of a run, and the files in which its processes record what happens."""

import random
from dataclasses import dataclass
from typing import Any, Final

from tests.faults.scenario import Witness as AnyWitness
from tests.faults.scenario import WorkersPlan, draw_duration, option

#: The sends of a transaction, and how often of a hundred times.
KINDS: Final = {
    "one": 36,
    "three": 16,
    "unique": 12,
    "retried": 8,
    "chain": 6,
    "group": 6,
    "chord": 6,
    "half rolled back": 4,
    "rolled back": 6,
}

#: Longest time, s, that a transaction stays open after its sends, and how often of a
#: hundred times; the last are open for longer than a relay leaves new rows alone.
LINGERING: Final = {0.0: 70, 0.3: 28, 3.0: 2}

#: Roles of processes that are killed.
SENDER, CUT_OFF, RELAY = "sender", "sender without broker", "relay"

#: The troubles of the broker, one in each round. Redis has what it got on the disk before it
#: answers, and RabbitMQ before it confirms.
TROUBLES: Final = ("stopped", "killed", "paused")


@dataclass(frozen=True, kw_only=True)
class Plan(WorkersPlan):
    """
    The plan of one recording.

    Args:
        troubles: The trouble of the broker in each round, in this order.
        pause: Mean time between two transactions of one thread, s.
        patience: How long it may take until the outbox is empty when the last kill is over, s.
        quiet: The worker is done when it has done all, or nothing new for so long, s.
        at_most: The kills must be done after this time, s.
    """

    transactions: int = option(300, "how many at least; there are more if the kills take longer")
    rounds: int = option(3, "kills at each point")
    random_kills: int = option(10, "of each process, at any moment")
    troubles: tuple[str, ...] = TROUBLES
    pause: float = 0.15
    patience: float = 30.0
    quiet: float = 10.0
    at_most: float = 600.0
    workers: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether tasks are sent by ``delay_on_commit`` without an outbox."""
        return self.broken == "plain"

    @property
    def roles(self) -> list[str]:
        """The roles: with an outbox also two relays and a sender whose broker refuses it."""
        return [SENDER] if self.is_plain else [SENDER, CUT_OFF, RELAY, RELAY]

    def transaction(self, number: int) -> tuple[str, float]:
        """Return the kind of a transaction, and for how long it stays open after its sends, s."""
        chance = random.Random(f"{self.seed}:{number}")
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        return kind, draw_duration(chance, LINGERING)


class Witness(AnyWitness):
    """The journal has what was begun, killed, delivered and done."""

    @property
    def is_over(self) -> bool:
        """Whether senders are to end."""
        return (self.folder / "end").exists()

    def end(self) -> None:
        """Let senders end after their transaction."""
        (self.folder / "end").touch()

    def record_kill(self, role: str, point: str, pid: int) -> None:
        """Record that a process is killed; the first entry of a process counts."""
        self.journal.write("killed", role=role, point=point, child=pid)

    def kills(self) -> dict[int, dict[str, Any]]:
        """Return role and point of each process that was killed."""
        kills: dict[int, dict[str, Any]] = {}
        for entry in self.journal.entries("killed"):
            kills.setdefault(entry["child"], entry)
        return kills
