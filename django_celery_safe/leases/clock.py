"""The clock by which holders trust their leases."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any, Final

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


class Timer:
    """Calls a function after some seconds, unless cancelled; for half of threading.Timer's CPU."""

    def __init__(self, seconds: float, function: Callable[..., object], args: Any) -> None:
        self._seconds, self._function, self._args = seconds, function, args
        self._cancelled = _thread.allocate_lock()
        self._cancelled.acquire()

    def start(self) -> None:
        """
        Begin to wait, on a thread that keeps no process alive.

        Raises:
            RuntimeError: The system has no thread left, or Python shuts down.
        """
        _thread.start_new_thread(self._wait, ())

    def cancel(self) -> None:
        """Do not call the function, unless that has begun."""
        self._cancelled.release()

    def _wait(self) -> None:
        if not self._cancelled.acquire(timeout=self._seconds):
            self._function(*self._args)


@dataclass(slots=True)
class Clock:
    """
    The time of leases, and all waiting for it.

    Attributes:
        now: Return the time, s.
        wait: Wait for a notification of a condition, for some seconds at most; return whether
            it came.
        sleep: Wait for some seconds.
        timer: Return a timer, not started, for some seconds, a function and its arguments.
    """

    now: Callable[[], float] = boottime
    wait: Callable[[Condition, float], bool] = Condition.wait
    sleep: Callable[[float], None] = _sleep
    timer: Callable[..., Timer] = Timer


#: The clock of this process. A test may give it other functions, by which it lets time pass.
clock: Final = Clock()
