"""The clock by which holders trust their leases."""

import time
from typing import Final

#: Linux's monotonic clock that also counts while the machine is suspended; None: there is none.
BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def boottime() -> float:
    """
    Return the time by a clock that is never set, s; all moments of a lease are by this clock.

    A suspended machine holds no lease: time.monotonic() would stand still, and the lease be
    trusted after others have taken it.
    """
    return time.monotonic() if BOOTTIME is None else time.clock_gettime(BOOTTIME)
