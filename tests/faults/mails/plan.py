"""The plan of a run, and the files in which its processes record what happens."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, get_args

from django_celery_safe.idempotency.flags import Guarantee
from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import Witness as AnyWitness
from tests.faults.scenario import option
from tests.processes import Journal

#: Longest wait of Django for an answer of the mail server, s.
EMAIL_TIMEOUT: Final = 2.0

#: After so many seconds the broker gives out again what was not acknowledged.
VISIBILITY_TIMEOUT: Final = 3.0


class Behaviour(StrEnum):
    """The mail server's treatment of one connection."""

    ACCEPT = "accepted"
    REFUSE_CONNECTION = "refused at connect"
    REFUSE_RECIPIENT = "refused at RCPT"
    HANG = "hung"
    #: This connection is dropped, and the next ones find nobody who listens.
    GO_AWAY = "went away"
    DROP_MAIL = "dropped after DATA"
    DROP_ANSWER = "taken, and the answer dropped"
    #: The mail is taken and announced, and the answer comes late.
    HOLD_ANSWER = "taken, and the answer held back"
    #: The answer goes out, and the mail is announced.
    ANNOUNCE = "taken, answered and announced"


#: How often each comes in so many connections.
DECK: Final = {
    Behaviour.ACCEPT: 9,
    Behaviour.REFUSE_CONNECTION: 1,
    Behaviour.REFUSE_RECIPIENT: 1,
    Behaviour.HANG: 1,
    Behaviour.GO_AWAY: 1,
    Behaviour.DROP_MAIL: 1,
    Behaviour.DROP_ANSWER: 2,
    Behaviour.HOLD_ANSWER: 2,
    Behaviour.ANNOUNCE: 2,
}


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        pause: Mean time between the sends for two users, s.
        deck: How often the mail server does each thing in so many connections.
        between_kills: Shortest and longest time between two kills at random, s.
        workers: How many there are.
        concurrency: Children of each.
        at_most: All must be done after this time, s.
    """

    guarantee: str = option("at_least_once", "of do_once", get_args(Guarantee))
    users: int = option(200, "one e-mail each")
    copies: int = option(2, "how often each user's task is sent, at once")
    pause: float = 0.1
    deck: tuple[tuple[Behaviour, int], ...] = tuple(DECK.items())
    between_kills: tuple[float, float] = (0.3, 0.9)
    workers: int = 2
    concurrency: int = 3
    at_most: float = 300.0

    def behaviour(self, connection: int) -> Behaviour:
        """Return what the mail server does with its n-th connection, from 0."""
        cards = [behaviour for behaviour, number in self.deck for _ in range(number)]
        deal, place = divmod(connection, len(cards))
        random.Random(f"{self.seed}:{deal}").shuffle(cards)
        return cards[place]


class Witness(AnyWitness):
    """Three journals, one for each who records."""

    @property
    def server(self) -> Journal:
        """The mail server's journal; it alone writes here."""
        return self.open("server")

    @property
    def tasks(self) -> Journal:
        """The beginnings and ends of tasks."""
        return self.open("tasks")

    @property
    def kills(self) -> Journal:
        """The children that were killed, and how each was chosen."""
        return self.open("kills")
