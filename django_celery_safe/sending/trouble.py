"""The pauses and log messages of a relay whose broker or database is gone."""

from __future__ import annotations

import math
import time
from typing import Final

from ..texts import get_logger
from .broker import BrokerGone

#: It is the relay that waits, and says so.
logger = get_logger(f"{__package__}.relay")

#: Shortest and longest pause while the broker or the database is gone, s; it doubles.
SHORTEST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
#: How often a fault that lasts is logged, s.
MINUTE: Final = 60.0


class Trouble:
    """
    A broker or database that is gone: for how long to wait, and when to say so.

    Args:
        using: Alias of the database with the outbox.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        #: The last one, s; 0: all is well.
        self._pause = 0.0
        self._reports_at = -math.inf

    def pause(self, error: Exception) -> float:
        """Return how long to wait now, s; tell of the error, once a minute."""
        self._pause = min(max(2 * self._pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        if time.monotonic() >= self._reports_at:
            self._reports_at = time.monotonic() + MINUTE
            what = "broker" if isinstance(error, BrokerGone) else "database"
            logger.error(
                "The %s can't be reached, so the outbox of %r waits: %s", what, self._using, error
            )
        return self._pause

    def is_over(self) -> None:
        """Log that the broker answers again, if it had not."""
        if self._pause:
            logger.warning("The outbox of %r is relayed again.", self._using)
        self._pause, self._reports_at = 0.0, -math.inf
