"""
The threads that renew every lease held in this process.

A thread renews all leases in one store, those that are due in one request, on its own connection.
When no leases are left, it closes that connection, and ends soon after. A thread that hangs in a
request is replaced.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from .. import process
from ..emitting import emit_in_background
from ..events import LEASES_NOT_RENEWED, LEASES_NOT_RENEWED_BY_A_BUG
from ..exceptions import LockBackendError
from ..texts import get_logger
from .lease import RENEW_AFTER, Lease, LeaseStore, Renewal, clock

logger = get_logger(__name__)
#: A failed renewal is retried when this part of the lease has passed since the failed request.
RETRY_AFTER: Final = 1 / 10
#: A thread waits for an answer for this part of its shortest lease at most, if the store can.
ANSWER_WITHIN: Final = 1 / 3
#: A thread that is still in its request after this part of its shortest lease is replaced.
HANGS_AFTER: Final = 2 / 5
#: Pause before a replacement renews leases that are over, in leases.
BACKOFF: Final = 2
#: A lease is renewed up to this fraction of its length early, so that one request renews many.
BATCH_WINDOW: Final = 1 / 20
#: How long a thread without leases waits for a new lease before it ends, s.
LINGER: Final = 10.0
#: Longest time that a holder waits for a renewal of its lease under way, s.
LONGEST_FINISH: Final = 5.0


#: A store, and the binary order of magnitude of the leases.
LaneKey: TypeAlias = tuple[LeaseStore, int]


class Renewer:
    """Renews leases, on threads that it starts when they are needed."""

    def __init__(self) -> None:
        self.forget_parent()

    def forget_parent(self) -> None:
        """Start empty: a parent's leases, threads and mutex do not belong to this process."""
        #: The mutex of all renewing threads; no thread holds it during a request to a store.
        self.mutex = threading.RLock()
        #: Notified when a lane has finished a request or its connection state has changed.
        self.changed = threading.Condition(self.mutex)
        #: Leases that a lane's thread is renewing at the moment.
        self.renewing: dict[Lane, list[Lease[Any]]] = {}
        self.lanes: dict[LaneKey, Lane] = {}

    def add(self, lease: Lease[Any]) -> None:
        """
        Renew ``lease`` from now on, unless no object can release its lock.

        Call it again when the length of the lease has changed.
        """
        if lease.lock is None:
            return
        key = lease.store, math.frexp(lease.seconds)[1]
        if lease.renew_at == math.inf:
            lease.renew_at = lease.asked_at + lease.seconds * RENEW_AFTER
        with self.mutex:
            before = None if lease.lane is None else self.drop(lease)
            lane = self.lanes.get(key)
            if lane is None:
                lane = self.lanes[key] = Lane(self, key)
            lease.lane = lane
            lane.add(lease)
            if before is not None:
                before.close_if_idle()

    def remove(self, lease: Lease[Any]) -> None:
        """Stop renewing ``lease``; if it was its thread's last lease, close the connection."""
        with self.mutex:
            lane = self.drop(lease)
            if lane is not None and lane.is_connected:
                lane.close_if_idle()

    def drop(self, lease: Lease[Any]) -> Lane | None:
        """Take a lease from its lane, and return the lane; None: it has none in this process."""
        lane = lease.lane
        # After a fork, a lease may be the parent's, whose threads do not run in this process.
        if lane is None or lease.pid != process.pid:
            return None
        lane.leases.discard(lease)  # first: a signal handler may raise on any line
        lease.lane = None
        return lane

    def extend(self, lease: Lease[Any], seconds: float) -> bool:
        """
        Ask the store for a lease of ``seconds`` from now; return whether it is still ours.

        If the length changes, it waits for a renewal under way, unless that hangs, and the lease
        is not renewed until it is added again.
        """
        before, lane, hangs = lease.seconds, None, False
        if seconds != before:
            with self.mutex:
                lane = self.drop(lease)
            # Of two requests for different lengths, the store may get either one last.
            hangs = not self.finish_renewal(lease)
        asked_at = clock.now()
        # If the answer is lost, the lease has the old or the new length: trust the shorter.
        lease.seconds = min(before, seconds)
        try:
            (outcome,) = lease.store.extend([Renewal(lease.name, lease.token, seconds)])
        except BaseException:
            # The lease may expire sooner than planned.
            lease.renew_at = min(lease.renew_at, asked_at + lease.seconds * RETRY_AFTER)
            raise
        with self.mutex:
            if outcome and asked_at >= lease.asked_at:
                lease.seconds = seconds
                lease.began(asked_at)
                if hangs:  # trust the shorter length until its thread was replaced
                    lease.asked_at -= max(0.0, seconds - before)
                    lease.renew_at = min(lease.renew_at, asked_at + before * RENEW_AFTER)
            elif not outcome and lane is not None:
                lane.close_if_idle()
        return bool(outcome)

    def forget(self, kind: type[LeaseStore]) -> None:
        """Stop renewing all leases in stores of a type, before their memory is cleared."""
        with self.mutex:
            for lease in [lease for lane in self.lanes.values() for lease in lane.leases]:
                if isinstance(lease.store, kind):
                    self.remove(lease)

    def finish_renewal(self, lease: Lease[Any]) -> bool:
        """Wait until the renewal of a removed lease has ended; return False if it hangs."""

        def is_over() -> bool:
            # In any lane: the lease has left the lane that is renewing it.
            return not any(lease in leases for leases in self.renewing.values())

        with self.mutex:
            return self.changed.wait_for(is_over, min(lease.seconds * HANGS_AFTER, LONGEST_FINISH))


class Lane:
    """
    Leases of similar length in one store, and the thread that renews them.

    Whoever calls ``add`` or ``close_if_idle``, or changes ``leases``, holds the renewer's mutex.
    """

    def __init__(self, renewer: Renewer, key: LaneKey) -> None:
        self._renewer, self._store, self._key = renewer, key[0], key
        self._mutex = renewer.mutex
        #: A condition on the same mutex; ``with`` is faster on the mutex than on a condition.
        self._wake = threading.Condition(self._mutex)
        self.leases: set[Lease[Any]] = set()
        self._thread: threading.Thread | None = None
        #: When the thread wakes up by itself, by :data:`clock`.
        self._wakes_at = math.inf
        #: Whether the thread has its own connection to the store.
        self.is_connected = False
        #: Stands for the requests of one turn; None: the thread is in no request.
        self._turn: object = None

    def add(self, lease: Lease[Any]) -> None:
        """Start renewing a lease."""
        if self.is_connected and not self.leases:
            self._renewer.changed.notify_all()  # the connection stays open: stop waiting for it
        self.leases.add(lease)
        if self._thread is None:
            self._wakes_at = lease.renew_at
            thread = threading.Thread(
                target=self._run, name="django_celery_safe leases", daemon=True
            )
            try:
                self._thread = thread
                thread.start()
            except BaseException:
                # No thread is left, or a signal handler raised: if it runs, it ends at once.
                self._thread = None
                raise
        elif lease.renew_at < self._wakes_at:
            self._wakes_at = lease.renew_at
            self._wake.notify_all()

    def close_if_idle(self) -> None:
        """Have the thread close its connection, if no leases are left."""
        if self._is_idle() and self not in self._renewer.renewing:
            self._wake.notify_all()
            # Wait, so that no connection is left after a release.
            self._renewer.changed.wait_for(lambda: not self._is_idle(), timeout=1.0)

    def _is_idle(self) -> bool:
        return self.is_connected and not self.leases

    def _run(self) -> None:
        while True:
            try:
                if not self._take_turn():
                    if self._thread is not threading.current_thread():
                        self._close()  # that of a replaced thread
                    return
            except BaseException:
                # Without this thread, locks would be lost.
                with suppress(BaseException):
                    logger.exception("The thread that renews locks met an error and goes on.")
                time.sleep(0.1)
                self._wakes_at = 0.0  # check all leases now

    def _take_turn(self) -> bool:
        """Wait, or renew the leases that are due; return False if the thread should end."""
        with self._mutex:
            if self._thread is not threading.current_thread():
                return False  # it was replaced, or a signal handler raised while it was started
            pause = self._wakes_at - clock.now()
            if pause > 0 and not self._is_idle():
                if clock.wait(self._wake, min(pause, LINGER)) or self.leases:
                    return True
                if self._wakes_at == math.inf and self._renewer.lanes.get(self._key) is self:
                    # This thread holds the mutex: a lease that is added later gets a new lane.
                    del self._renewer.lanes[self._key]
                return self._wakes_at < math.inf
            due, shortest = self._take_due()
        if self._is_idle():
            self._close()
        if due:
            self._renew_watched(due, shortest)
        return True

    def _renew_watched(self, leases: Sequence[Lease[Any]], shortest: float) -> None:
        """Extend leases; another thread replaces this one if the request hangs."""
        longest, cancel = shortest * HANGS_AFTER, None
        self._turn = turn = object()
        if self._store.may_hang:
            with suppress(RuntimeError):  # the system has no thread left, or Python shuts down
                cancel = clock.call_later(longest, partial(self._replace, turn, longest))
        try:
            self._renew(leases, shortest * ANSWER_WITHIN)
        finally:
            self._turn = None
            if cancel is not None:
                cancel()

    def _replace(self, turn: object, longest: float) -> None:
        """Hand the leases over to another thread, because this lane's hangs in a request."""
        with self._mutex:
            if self._turn is not turn:
                return
            # It ends when it gets an answer, or an error.
            self._thread = None
            self._renewer.renewing.pop(self, None)
            self._renewer.changed.notify_all()
            del self._renewer.lanes[self._key]
            if not self.leases:
                return
            lane = self._renewer.lanes[self._key] = Lane(self._renewer, self._key)
            leases, self.leases, now = self.leases, set(), clock.now()
            for lease in leases:
                # At once while there is something to lose; later, if the store hangs on each new
                # connection, there must not be too many of them.
                lease.renew_at = now if lease.remaining else now + lease.seconds * BACKOFF
                lease.lane = lane
                with suppress(RuntimeError):
                    lane.add(lease)
        reason = f"{self._store.where} did not answer within {longest:.3g} s"
        _report_failed([lease.name for lease in leases], reason)

    def _take_due(self) -> tuple[list[Lease[Any]], float]:
        """Return the leases to renew now and the shortest lease, s; plan the next wake-up."""
        # A removed lease does not change the planned time: a loop that takes and frees locks
        # wakes this thread once in a third of a lease, not for every lock.
        now, wakes_at, shortest = clock.now(), math.inf, math.inf
        due: list[Lease[Any]] = []
        for lease in list(self.leases):
            seconds = lease.seconds
            # Not min(): with a thousand leases, the calls would be noticeable.
            if seconds < shortest:
                shortest = seconds
            if lease.renew_at > now + seconds * BATCH_WINDOW:
                if lease.renew_at < wakes_at:
                    wakes_at = lease.renew_at
            elif (end := lease.find_end()) is None:
                due.append(lease)
            else:
                self._renewer.drop(lease)
                text = "Stopped renewing %r, whose lease ends in %.3g s: %s."
                emit_in_background(logger.warning, text, lease.name, lease.remaining, end)
        self._wakes_at = wakes_at
        return due, shortest

    def _renew(self, leases: Sequence[Lease[Any]], within: float) -> None:
        """Extend leases in one request."""
        with self._mutex:
            # Skip leases that were removed in between: the holder may have locked the row.
            leases = [lease for lease in leases if lease.lane is self]
            asked = [(lease.name, lease.token, lease.seconds) for lease in leases]
            along = filter(None, [lease.along for lease in leases])
            self._renewer.renewing[self] = leases
            self.is_connected |= self._store.connects_threads
        asked_at, failure = clock.now(), None
        outcomes: Sequence[bool | None] = [None] * len(leases)
        try:
            if leases:
                self._store.leave_pool()
                outcomes = self._store.extend([*asked, *along], within)[: len(leases)]
        except BaseException as error:  # noqa: BLE001 - the thread must outlive any store's failure
            failure = error
        missed, lost = list[str](), list[Lease[Any]]()
        with self._mutex:
            self._renewer.renewing.pop(self, None)
            self._renewer.changed.notify_all()
            for lease, (_, _, length), extended in zip(leases, asked, outcomes, strict=True):
                if extended:
                    # Not if its holder gave it another length, or a later request was answered.
                    if lease.seconds == length and asked_at > lease.asked_at:
                        # As began() does: a thousand calls would be noticeable.
                        lease.asked_at, lease.renew_at = asked_at, asked_at + length * RENEW_AFTER
                elif lease.lane is not self:
                    pass  # a lease that was released meanwhile is not lost
                elif extended is None:
                    # Counted from the request, so the retry is immediate if the answer took long.
                    lease.renew_at = asked_at + lease.seconds * RETRY_AFTER
                    missed.append(lease.name)
                else:
                    self._renewer.drop(lease)
                    lease.lost = True
                    lost.append(lease)
            self._wakes_at = min([self._wakes_at, *[lease.renew_at for lease in leases]])
        for lease in lost:
            _report_lost(lease)
        if failure is not None:
            if missed:
                _report_failed(missed, str(failure), failure)
            self._close()

    def _close(self) -> None:
        try:
            self._store.close()
        except Exception:
            # A connection that can't be closed is already broken.
            logger.debug("A lock store's connection could not be closed.", exc_info=True)
        with self._mutex:
            self.is_connected = False
            self._renewer.changed.notify_all()


# What the threads report: another one emits it, because a log handler may be slow.


def _report_lost(lease: Lease[Any]) -> None:
    """Report a lease that the store says is not ours, and who holds it now."""
    try:
        now_held = lease.store.peek(lease.name)
    except Exception:  # noqa: BLE001 - only to name the new holder
        now_held = None
    emit_in_background(lease.on_lost, lease, now_held)


def _report_failed(names: Sequence[str], reason: str, error: BaseException | None = None) -> None:
    """Report leases that could not be renewed, because of an ``error`` or of a silent store."""
    foreseen = error is None or isinstance(error, LockBackendError)
    event = LEASES_NOT_RENEWED if foreseen else LEASES_NOT_RENEWED_BY_A_BUG
    emit = partial(event.emit, Renewer, exc_info=None if foreseen else error)
    emit_in_background(partial(emit, name=names[0], reason=reason, leases=len(names)))


#: The renewer of this process.
renewer: Final = Renewer()
os.register_at_fork(after_in_child=renewer.forget_parent)
