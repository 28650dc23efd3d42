"""The clock by which holders trust their leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

#: Return the time by a clock that is never set, s; all moments of a lease are by this clock.
#: Where the system can, it counts on while the machine is suspended: time.monotonic() stands
#: still, so a lease would be trusted after others have taken it.
boottime: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
