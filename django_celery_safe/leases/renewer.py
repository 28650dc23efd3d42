"""
The threads that renew every lease held in this process.

One for all leases of about one length in one store, so that a store that is slow, or a
lease that is short, costs no other lease anything. A thread asks for all leases that are
due at once, in a connection of its own. It closes that connection when nothing is held
there, and ends soon after.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakSet

from ..emitting import emit_in_background
from ..events import LEASES_NOT_RENEWED, LEASES_NOT_RENEWED_BY_A_BUG
from ..exceptions import LockBackendError
from ..texts import get_logger
from .lease import RENEW_AFTER, Lease
from .store import LeaseStore, Renewal

logger = get_logger(__name__)
#: After a failed renewal it is tried again when this part of the lease has passed since.
RETRY_AFTER: Final = 1 / 10
#: A thread gives up an answer after this part of the shortest of its leases, where the store
#: can. The longest is less than twice as long, so there is time for another try, on a new
#: connection, before any of them ends.
ANSWER_WITHIN: Final = 1 / 3
#: A lease is renewed up to this fraction of its length early, so that one request renews many.
BATCH_WINDOW: Final = 1 / 20
#: Longest that a thread waits at a time, s; a system can't wait for centuries.
LONGEST_PAUSE: Final = 3600.0
#: How long a thread that has no lease waits for another one before it ends, s.
LINGER: Final = 10.0

#: A function that reports something, and its arguments.
Report = tuple[Any, ...]


class Renewer:
    """Renews leases, on threads that it starts when they have some."""

    def __init__(self) -> None:
        self.forget_parent()

    def forget_parent(self) -> None:
        """Begin with nothing: the leases, threads and mutex of a parent are not this process's."""
        #: The only mutex of all threads that renew; none holds it while it asks a store.
        self.mutex = threading.RLock()
        #: For whoever waits until a thread has done something.
        self.changed = threading.Condition(self.mutex)
        #: Leases whose ends a thread is moving, and those that their holders are: of two
        #: such requests at once nobody knows which the store got last.
        self.renewing: set[Lease[Any]] = set()
        self.extending: set[Lease[Any]] = set()
        self.lanes: dict[tuple[LeaseStore, int], Lane] = {}

    def add(self, lease: Lease[Any]) -> None:
        """Renew ``lease`` from now on, also when its length has changed."""
        # The power of two above its length.
        _, magnitude = math.frexp(lease.seconds)
        key = (lease.store, magnitude)
        with self.mutex:
            if lease.lane is not self.lanes.get(key):
                self._leave(lease)  # gives the mutex away for a while, so a lane may end
            lane = self.lanes.get(key)
            if lane is None:
                lane = self.lanes[key] = Lane(self, *key)
            lease.lane = lane
            lane.add(lease)

    def remove(self, lease: Lease[Any]) -> None:
        """Renew ``lease`` no more; with the last one of its thread, the connection is closed."""
        with self.mutex:
            self._leave(lease)

    def extend(self, lease: Lease[Any], seconds: float) -> bool:
        """Ask the store for a lease of ``seconds`` from now; return whether it is still ours."""
        with self.renewal_paused(lease):
            asked_at = time.monotonic()
            # If the answer gets lost, the lease is of either length: trust the shorter.
            lease.seconds = min(lease.seconds, seconds)
            try:
                extended: bool
                (extended,) = lease.store.extend([Renewal(lease.name, lease.token, seconds)])
            except BaseException:
                # It may be over sooner than planned.
                lease.renew_at = min(lease.renew_at, asked_at + lease.seconds * RETRY_AFTER)
                raise
            if extended:
                lease.seconds = seconds
                lease.began(asked_at)
            return extended

    def forget(self, kind: type[LeaseStore]) -> None:
        """Renew nothing any more in stores of a kind, whose memory is to be cleared."""
        with self.mutex:
            for (store, _), lane in list(self.lanes.items()):
                if isinstance(store, kind):
                    lane.clear()

    def _leave(self, lease: Lease[Any]) -> None:
        # After a fork a lease may be one of the parent, whose threads are not here.
        if lease.lane is not None and lease.pid == os.getpid():
            lease.lane.discard(lease)

    @contextmanager
    def renewal_paused(self, lease: Lease[Any]) -> Iterator[None]:
        """Leave the lease alone while its holder asks the store to move its end."""
        try:
            with self.mutex:
                self.changed.wait_for(lambda: lease not in self.renewing)
                self.extending.add(lease)
            yield
        finally:
            with self.mutex:
                self.extending.discard(lease)


class Lane:
    """
    Leases of about one length in one store, and the thread that renews them.

    ``add``, ``discard`` and ``clear`` are for whoever holds the renewer's mutex.
    """

    def __init__(self, renewer: Renewer, store: LeaseStore, magnitude: int) -> None:
        self._renewer, self._store, self._magnitude = renewer, store, magnitude
        self._mutex = renewer.mutex
        #: Of the same mutex; ``with`` is quicker on a lock than on a condition.
        self._wake = threading.Condition(self._mutex)
        #: Weak: a lease that has no owner is renewed while somebody refers to it.
        self._leases: WeakSet[Lease[Any]] = WeakSet()
        #: Those that have one, which are renewed for as long as the owner's thread lives.
        self._owned: set[Lease[Any]] = set()
        self._thread: threading.Thread | None = None
        #: When the thread looks again by itself, monotonic.
        self._wakes_at = math.inf
        #: Whether the thread waits, so that it takes a turn as soon as it is woken.
        self._waits = False
        #: Whether the thread has a connection of its own to the store.
        self._is_connected = False

    def add(self, lease: Lease[Any]) -> None:
        """Renew a lease from now on."""
        was_idle = self._is_idle()
        self._leases.add(lease)
        if lease.owner is not None:
            self._owned.add(lease)
        if was_idle:
            self._renewer.changed.notify_all()  # nobody waits for the connection to be closed
        if self._thread is None:
            self._wakes_at = lease.renew_at
            thread = threading.Thread(
                target=self._run, name="django_celery_safe leases", daemon=True
            )
            # Before it starts: a signal may interrupt this after the start.
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self._thread = None
                raise
        elif lease.renew_at < self._wakes_at:
            self._wakes_at = lease.renew_at
            self._wake.notify_all()

    def discard(self, lease: Lease[Any]) -> None:
        """Renew a lease no more; with the last one, let the thread close its connection."""
        self._leases.discard(lease)
        self._owned.discard(lease)
        self._close_if_idle()

    def clear(self) -> None:
        """Renew no lease any more."""
        self._leases.clear()
        self._owned.clear()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_idle() and self._waits:
            self._wake.notify_all()
            # So that "released" means that nothing of ours is connected. A thread that is
            # asking the store, which may be slow, closes the connection after that.
            self._renewer.changed.wait_for(lambda: not self._is_idle(), timeout=1.0)

    def _is_idle(self) -> bool:
        """Return whether the thread is connected to a store in which it has nothing to renew."""
        return self._is_connected and not self._leases

    def _run(self) -> None:
        while True:
            try:
                if not self._take_turn():
                    return
            except BaseException:
                # Even a receiver's SystemExit: without this thread its locks would be lost.
                with suppress(BaseException):
                    logger.exception("The thread that renews locks met an error and goes on.")
                time.sleep(0.1)
                self._wakes_at = 0.0  # look at all of them

    def _take_turn(self) -> bool:
        """Wait, or renew what is due; return False when the thread is to end."""
        # A method of its own: what it knows of leases would keep them while it waits.
        with self._mutex:
            pause = self._wakes_at - time.monotonic()
            if pause > 0 and not self._is_idle():
                return self._wait(pause)
            due, reports, shortest = self._take_due()
            is_idle = self._is_idle()
        for report in reports:
            emit_in_background(*report)
        if is_idle:
            self._close()
        if due:
            self._renew(due, shortest * ANSWER_WITHIN)
        return True

    def _wait(self, pause: float) -> bool:
        """Wait to be woken, or for a while; return False if there is nothing to wait for."""
        self._waits = True
        try:
            woken = self._wake.wait(LINGER if pause == math.inf else min(pause, LONGEST_PAUSE))
        finally:
            self._waits = False
        if woken or self._leases or self._wakes_at < math.inf:
            return True
        # The mutex is held: whoever adds a lease after this makes another lane.
        key = (self._store, self._magnitude)
        if self._renewer.lanes.get(key) is self:
            del self._renewer.lanes[key]
        return False

    def _take_due(self) -> tuple[list[Lease[Any]], list[Report], float]:
        """
        Plan when to look again.

        Returns:
            What to renew now, what to report, and the shortest of all leases, s.
        """
        # The plan made by a lease stays when it is gone: who takes and frees locks in a
        # loop wakes this thread once in a third of a lease, not each time.
        now, wakes_at, shortest = time.monotonic(), math.inf, math.inf
        due: list[Lease[Any]] = []
        over: list[Lease[Any]] = []
        reports: list[Report] = []
        for lease in self._leases:
            # Not min(): a thousand calls of it would be felt.
            if lease.seconds < shortest:
                shortest = lease.seconds
            if lease.renew_at > now + lease.seconds * BATCH_WINDOW:
                if lease.renew_at < wakes_at:
                    wakes_at = lease.renew_at
            else:
                end = _find_end(lease, now)
                (due if end is None else over).append(lease)
                if end is not None:
                    reports.append((_tell_over, lease.name, lease.remaining, end))
                elif lease.owner is not None and lease.owner.is_forgotten():
                    reports.append((_warn_forgotten, lease.name, lease.owner.scope))
        self._leases.difference_update(over)
        self._owned.difference_update(over)
        self._wakes_at = wakes_at
        return due, reports, shortest

    def _renew(self, leases: list[Lease[Any]], within: float) -> None:
        renewer = self._renewer
        with self._mutex:
            # One that was removed since the plan was made may be locked by its holder.
            leases = [lease for lease in leases if lease in self._leases]
            # One that its holder extends just now is renewed by that.
            free = [lease for lease in leases if lease not in renewer.extending]
            renewer.renewing.update(free)
        try:
            outcomes = self._ask(free, within) if free else []
        finally:
            with self._mutex:
                renewer.renewing.difference_update(free)
                renewer.changed.notify_all()
        for lease, extended in zip(free, outcomes, strict=False):
            if not extended:
                self._lost(lease)
        if len(free) < len(leases):
            later = time.monotonic()
            for lease in set(leases).difference(free):
                lease.renew_at = later + lease.seconds * RETRY_AFTER
        with self._mutex:
            self._wakes_at = min([self._wakes_at, *[lease.renew_at for lease in leases]])

    def _ask(self, leases: list[Lease[Any]], within: float) -> list[bool]:
        """Extend leases in one request; return for each whether it is still ours, or nothing."""
        if self._store.connects_threads:
            with self._mutex:
                self._is_connected = True
        asked_at = time.monotonic()
        try:
            self._store.leave_pool()
            outcomes = self._store.extend(leases, within)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any store's failure
            self._failed(leases, asked_at, error)
            return []
        for lease, extended in zip(leases, outcomes, strict=True):
            if extended:
                lease.asked_at = asked_at
                lease.renew_at = asked_at + lease.seconds * RENEW_AFTER
        return outcomes

    def _failed(self, leases: list[Lease[Any]], asked_at: float, error: Exception) -> None:
        # At once if the answer took long: there may be time for no more than that.
        for lease in leases:
            lease.renew_at = asked_at + lease.seconds * RETRY_AFTER
        # Not the error itself, whose traceback would keep these leases, and renew them.
        foreseen = isinstance(error, LockBackendError)
        emit_in_background(
            _emit_failed, leases[0].name, len(leases), str(error), None if foreseen else error
        )
        self._close()

    def _lost(self, lease: Lease[Any]) -> None:
        with self._mutex:
            # Released while the request was under way: then it is no loss.
            if lease not in self._leases:
                return
            self._leases.discard(lease)
            self._owned.discard(lease)
            lease.lost = True
        try:
            now_held = lease.store.peek(lease.name)
        except Exception:  # noqa: BLE001 - only to name the new holder
            now_held = None
        emit_in_background(lease.on_lost, lease, now_held)

    def _close(self) -> None:
        try:
            self._store.close()
        except Exception:
            # What can't be closed is gone already.
            logger.debug("A lock store's connection could not be closed.", exc_info=True)
        with self._mutex:
            self._is_connected = False
            self._renewer.changed.notify_all()


def _find_end(lease: Lease[Any], now: float) -> str | None:
    """Return why a lease must not be renewed any more, as a clause; None: it must be renewed."""
    if lease.renew_until <= now:
        return "its task still runs, beyond its time limit"
    return None if lease.owner is None else lease.owner.find_end()


# Not by the threads that renew: a log handler may be slow.
def _tell_over(name: str, remaining: float, end: str) -> None:
    logger.warning("Stopped renewing %r, whose lease ends in %.3g s: %s.", name, remaining, end)


def _warn_forgotten(name: str, scope: str) -> None:
    logger.warning(
        "The lock %r is held, but the object that acquired it is gone, so nothing can release it: "
        "it is renewed until its %s ends. Keep what cache_lock() returns and release it, or write "
        "`with cache_lock(...) as lock:`.",
        name,
        scope,
    )


def _emit_failed(name: str, count: int, reason: str, unforeseen: Exception | None) -> None:
    event = LEASES_NOT_RENEWED if unforeseen is None else LEASES_NOT_RENEWED_BY_A_BUG
    event.emit(Renewer, exc_info=unforeseen, name=name, reason=reason, leases=count)


#: This process's.
renewer: Final = Renewer()
os.register_at_fork(after_in_child=renewer.forget_parent)
