"""The pauses and log messages of a relay while its broker or database is gone."""

from __future__ import annotations

import math
import time
from typing import Final

from ..databases import is_lost_race
from ..texts import get_logger
from .broker import BrokerGone

#: The relay's logger, because it is the relay that waits.
logger = get_logger(f"{__package__}.relay")

#: Shortest and longest pause while the broker or the database is gone, s; each pause doubles.
SHORTEST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
#: Time between two log messages about the same outage, s.
MINUTE: Final = 60.0


class Trouble:
    """
    An outage of the broker or the database: how long to wait, and when to log it.

    Args:
        using: Alias of the database with the outbox.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        #: The last pause, s; 0: there is no outage.
        self._pause = 0.0
        self._reports_at = -math.inf

    def pause(self, error: Exception) -> float:
        """Return how long to wait now, s; log the error, once a minute, unless it lost a race."""
        if is_lost_race(error):
            logger.info("Others changed the outbox of %r at the same time: %s", self._using, error)
            return SHORTEST_PAUSE
        self._pause = min(max(2 * self._pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        if time.monotonic() >= self._reports_at:
            self._reports_at = time.monotonic() + MINUTE
            what = "broker" if isinstance(error, BrokerGone) else "database"
            logger.error(
                "The %s can't be reached, so the outbox of %r waits: %s", what, self._using, error
            )
        return self._pause

    def is_over(self) -> None:
        """Log that the outbox is relayed again, if there was an outage."""
        if self._pause:
            logger.warning("The outbox of %r is relayed again.", self._using)
        self._pause, self._reports_at = 0.0, -math.inf
