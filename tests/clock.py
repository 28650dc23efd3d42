"""A clock of leases that the test advances by hand."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from django_celery_safe.leases.lease import LeaseStore, boottime
from django_celery_safe.leases.lease import clock as clock_of_leases
from django_celery_safe.leases.renewer import Lane, renewer

#: Threads wake up that much later than planned, s: sums of moments are rounded.
LATE = 1e-6


@dataclass(eq=False)
class _Wait:
    """A thread that waits for a condition until a moment."""

    condition: threading.Condition
    ends_at: float
    is_over: bool = False


class HeldClock:
    """
    A clock that stands still, until the test advances it or a thread sleeps by it.

    The threads that renew leases wake up at their time, and act while the clock stands still.
    """

    def __init__(self) -> None:
        self._time = float(math.ceil(boottime()))
        self._waits: list[_Wait] = []
        #: Moments, and the functions that are to be called then.
        self._timers: dict[object, tuple[float, Callable[[], object]]] = {}
        self._advancing = threading.RLock()

    def now(self) -> float:
        """Return the time."""
        return self._time

    def wait(self, condition: threading.Condition, seconds: float) -> bool:
        """Wait for a notification, or until the time is advanced by so many seconds."""
        wait = _Wait(condition, self._time + seconds)
        self._waits.append(wait)
        condition.wait()
        self._waits.remove(wait)
        return not wait.is_over

    def sleep(self, seconds: float) -> None:
        """Advance the time instead; let other threads do something now and then."""
        self.advance(seconds)
        time.sleep(0)

    def call_later(self, seconds: float, function: Callable[[], object]) -> Callable[[], object]:
        """Call a function when the time has been advanced by so many seconds."""
        timer = object()
        self._timers[timer] = (self._time + seconds, function)
        return partial(self._timers.pop, timer, None)

    def advance(self, seconds: float) -> None:
        """Let time pass: all threads act in between as soon as it is time for that."""
        with self._advancing:
            until = self._time + seconds
            self._settle()
            while (moment := self._find_next()) < until:
                self.jump(moment + LATE - self._time)
            self.jump(max(0.0, until - self._time))

    def jump(self, seconds: float, *, settle: bool = True) -> None:
        """Let time pass at once, as for a process that was stopped meanwhile."""
        # The mutex is held by threads from their look at the clock until they wait.
        with renewer.mutex:
            self._time += seconds
            for wait in self._waits:
                if wait.ends_at <= self._time:
                    wait.is_over = True
                    wait.condition.notify_all()
        for timer, (ends_at, function) in list(self._timers.items()):
            if ends_at <= self._time and self._timers.pop(timer, None):
                function()
        if settle:
            self._settle()

    def _find_next(self) -> float:
        """Return the next moment at which something is to happen."""
        with renewer.mutex:
            ends = [wait.ends_at for wait in self._waits if not wait.is_over]
            timers = [ends_at for ends_at, _ in self._timers.values()]
            return min([*ends, *timers], default=math.inf)

    def _settle(self) -> None:
        """Wait until all threads that have leases wait for the next renewal."""
        give_up_at = time.monotonic() + 100
        while not self._is_settled():
            assert time.monotonic() < give_up_at, "a renewal hangs: jump() without settle"
            time.sleep(0.0002)

    def _is_settled(self) -> bool:
        with renewer.mutex:
            return all(self._is_waiting(lane) for lane in renewer.lanes.values() if lane.leases)

    def _is_waiting(self, lane: Lane) -> bool:
        waits = [wait for wait in self._waits if wait.condition is lane._wake]
        return any(not wait.is_over and wait.ends_at <= lane._wakes_at + 2 * LATE for wait in waits)

    def look_again(self) -> None:
        """Let all threads that wait look at the time, because another clock is held or let go."""
        renewer.forget(LeaseStore)  # type: ignore[type-abstract] # of any store
        with renewer.mutex:
            for lane in renewer.lanes.values():
                lane._wakes_at = 0.0
                lane._wake.notify_all()


@contextmanager
def held_clock() -> Iterator[HeldClock]:
    """Hold the clock of this process during the block."""
    held = HeldClock()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("now", "wait", "sleep", "call_later"):
            patch.setattr(clock_of_leases, name, getattr(held, name))
        held.look_again()
        yield held
    held.look_again()


@pytest.fixture
def clock() -> Iterator[HeldClock]:
    """Time passes only as this test lets it: for leases in this process, and in its memory."""
    with held_clock() as clock:
        yield clock
