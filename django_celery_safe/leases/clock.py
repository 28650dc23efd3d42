"""The clock by which holders trust their leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition, Timer
from typing import Final

#: Return the time by a clock that is never set, s; all moments of a lease are by this clock.
#: Where the system can, it counts on while the machine is suspended: time.monotonic() stands
#: still, so a lease would be trusted after others have taken it.
boottime: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # looked up at each call: gevent may replace it after this import


@dataclass(slots=True)
class Clock:
    """
    The time of leases, and all waiting for it.

    Attributes:
        now: Return the time, s.
        wait: Wait for a notification of a condition, for some seconds at most; return whether
            it came.
        sleep: Wait for some seconds.
        timer: Return a thread, not started, that calls a function after some seconds.
    """

    now: Callable[[], float] = boottime
    wait: Callable[[Condition, float], bool] = Condition.wait
    sleep: Callable[[float], None] = _sleep
    timer: Callable[..., Timer] = Timer


#: The clock of this process. A test may give it other functions, by which it lets time pass.
clock: Final = Clock()
