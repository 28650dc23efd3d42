"""
The threads that renew every lease held in this process.

A thread renews all leases of similar length in one store, so a slow store or a short lease
does not affect other leases. It extends all leases that are due in one request, on its own
connection. When no leases are left, it closes that connection, and ends soon after. A thread
that hangs in a request is replaced.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakSet

from ..emitting import emit_in_background
from ..events import LEASES_NOT_RENEWED, LEASES_NOT_RENEWED_BY_A_BUG
from ..exceptions import LockBackendError
from ..texts import get_logger
from .clock import clock
from .lease import Lease
from .store import LeaseStore, Renewal

logger = get_logger(__name__)
#: A failed renewal is retried when this part of the lease has passed since the failed request.
RETRY_AFTER: Final = 1 / 10
#: Shortest pause before a lease is looked at again that had another request under way, s.
SHORTEST_PAUSE: Final = 0.05
#: A thread stops waiting for an answer after this part of its shortest lease, if the store
#: supports that. Its longest lease is less than twice as long, so there is time for another try,
#: on a new connection, before any of the leases expires.
ANSWER_WITHIN: Final = 1 / 3
#: A thread that is still in its request after this part of its shortest lease is replaced: the
#: store has no limit, or its limit does not work. There is time for one more try.
HANGS_AFTER: Final = 2 / 5
#: Longest time that a holder waits for a renewal of its lease under way, s: it may have a
#: transaction open, and a thread with long leases is replaced late.
LONGEST_FINISH: Final = 5.0
#: After that many replacements without an answer, the pause before the next try grows no more.
LONGEST_BACKOFF: Final = 4
#: A lease is renewed up to this fraction of its length early, so that one request renews many.
BATCH_WINDOW: Final = 1 / 20
#: Longest time that a thread waits at once, s; the system's maximum is limited.
LONGEST_PAUSE: Final = 3600.0
#: How long a thread without leases waits for a new lease before it ends, s.
LINGER: Final = 10.0

#: A function that reports something, and its arguments.
Report = tuple[Any, ...]


#: A store, the part of the store that keeps the leases, and the power of two above their length.
LaneKey = tuple[LeaseStore, object, int]


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
        #: Leases that their holders are giving another length, which the threads leave alone: of
        #: two requests at once, it would not be known which one the store got last.
        self.extending: set[Lease[Any]] = set()
        self.lanes: dict[LaneKey, Lane] = {}

    def add(self, lease: Lease[Any]) -> None:
        """Renew ``lease`` from now on; call it again when the length of the lease has changed."""
        _, magnitude = math.frexp(lease.seconds)
        store = lease.store
        key = (store, store.part(lease.name) if store.has_parts else None, magnitude)
        with self.mutex:
            lane = self.lanes.get(key)
            if lease.lane is not None and lease.lane is not lane:
                self._leave(lease)  # may release the mutex for a while, so a lane may end
                lane = self.lanes.get(key)
            if lane is None:
                lane = self.lanes[key] = Lane(self, key)
            lease.lane = lane
            lane.add(lease)

    def remove(self, lease: Lease[Any]) -> None:
        """Stop renewing ``lease``; if it was its thread's last lease, close the connection."""
        with self.mutex:
            self._leave(lease)

    def extend(self, lease: Lease[Any], seconds: float) -> bool:
        """
        Ask the store for a lease of ``seconds`` from now; return whether it is still ours.

        It waits for no renewal, because a renewal's answer may take longer than the store's own.
        """
        before = lease.seconds
        with self.mutex:
            # Two requests for the same length may come in any order.
            if seconds != before:
                self.extending.add(lease)
            overlaps = self._is_renewing(lease)
        try:
            asked_at = clock.now()
            # If the answer is lost, the lease has the old or the new length: trust the shorter.
            lease.seconds = min(before, seconds)
            try:
                (outcome,) = lease.store.extend([Renewal(lease.name, lease.token, seconds)])
                extended = bool(outcome)
            except BaseException:
                # The lease may expire sooner than planned.
                lease.renew_at = min(lease.renew_at, asked_at + lease.seconds * RETRY_AFTER)
                raise
            with self.mutex:
                if extended and seconds != before:
                    lease.seconds = seconds
                    # If the store got the renewal under way last, the lease has the old length:
                    # trust the shorter until it is renewed.
                    lease.began(asked_at - max(0.0, seconds - before) * overlaps)
                elif extended and asked_at > lease.asked_at:
                    lease.began(asked_at)
            return extended
        finally:
            with self.mutex:
                self.extending.discard(lease)

    def forget(self, kind: type[LeaseStore]) -> None:
        """Stop renewing all leases in stores of a type, before their memory is cleared."""
        with self.mutex:
            for (store, *_), lane in list(self.lanes.items()):
                if isinstance(store, kind):
                    lane.clear()

    def _leave(self, lease: Lease[Any]) -> None:
        # After a fork, a lease may be the parent's, whose threads do not run in this process.
        if lease.lane is not None and lease.pid == os.getpid():
            lease.lane.discard(lease)

    def finish_renewal(self, lease: Lease[Any]) -> None:
        """Wait until the renewal of a removed lease has ended; a renewal that hangs is left."""
        with self.mutex:
            longest = min(lease.seconds * HANGS_AFTER, LONGEST_FINISH)
            self.changed.wait_for(lambda: not self._is_renewing(lease), longest)

    def _is_renewing(self, lease: Lease[Any]) -> bool:
        # Of any lane: the lease may have left the lane that is renewing it.
        return any(lease in leases for leases in self.renewing.values())


class Lane:
    """
    Leases of similar length in one store, or part of a store, and the thread that renews them.

    Callers of ``add``, ``discard`` and ``clear`` have to hold the renewer's mutex.
    """

    def __init__(self, renewer: Renewer, key: LaneKey) -> None:
        self._renewer, self._store, self._key = renewer, key[0], key
        self._mutex = renewer.mutex
        #: A condition on the same mutex; ``with`` is faster on the mutex than on a condition.
        self._wake = threading.Condition(self._mutex)
        #: Leases with an owner, which are renewed for as long as the owner's thread lives.
        self._owned: set[Lease[Any]] = set()
        #: Weak: a lease without an owner is renewed as long as anything refers to it.
        self._unowned: WeakSet[Lease[Any]] = WeakSet()
        self._thread: threading.Thread | None = None
        #: When the thread wakes up by itself, by :data:`clock`.
        self._wakes_at = math.inf
        #: Whether the thread is waiting, and so takes a turn as soon as it is notified.
        self._waits = False
        #: Whether the thread has its own connection to the store.
        self._is_connected = False
        #: Stands for the requests of one turn; None: the thread is in no request.
        self._turn: object = None
        #: How many threads in a row were replaced before this lane's, without an answer.
        self._replaced = 0

    def add(self, lease: Lease[Any]) -> None:
        """Start renewing a lease."""
        if self._is_connected and self._is_idle():
            self._renewer.changed.notify_all()  # the connection stays open: stop waiting for it
        if lease.owner is None:
            self._unowned.add(lease)
        else:
            self._owned.add(lease)
        if self._thread is None:
            self._wakes_at = lease.renew_at
            thread = threading.Thread(
                target=self._run, name="django_celery_safe leases", daemon=True
            )
            try:
                self._thread = thread
                thread.start()
            except BaseException:
                # The system has no thread left, or a signal handler raised during the start. If
                # the thread runs nevertheless, it ends at its first turn.
                self._thread = None
                raise
        elif lease.renew_at < self._wakes_at:
            self._wakes_at = lease.renew_at
            self._wake.notify_all()

    def discard(self, lease: Lease[Any]) -> None:
        """Stop renewing a lease; if it was the last one, have the thread close its connection."""
        self._drop(lease)
        if self._is_connected:
            self._close_if_idle()

    def clear(self) -> None:
        """Stop renewing all leases."""
        for lease in self._leases:
            self._drop(lease)
        self._close_if_idle()

    def _drop(self, lease: Lease[Any]) -> None:
        lease.lane = None
        if lease.owner is None:
            self._unowned.discard(lease)
        else:
            self._owned.discard(lease)

    @property
    def _leases(self) -> list[Lease[Any]]:
        # A list, which takes less time than to go through a WeakSet.
        return [*self._owned, *self._unowned]

    def _close_if_idle(self) -> None:
        if self._is_idle() and self._waits:
            self._wake.notify_all()
            # Wait, so that no connection is left after a release. A thread in the middle of a
            # request, which may be slow, closes its connection after the request.
            self._renewer.changed.wait_for(lambda: not self._is_idle(), timeout=1.0)

    def _is_idle(self) -> bool:
        """Return whether the thread is connected although it has no leases to renew."""
        return self._is_connected and not (self._owned or self._unowned)

    def _run(self) -> None:
        while True:
            try:
                if not self._take_turn():
                    return
            except BaseException:
                # Even a signal receiver's SystemExit: without this thread, locks would be lost.
                with suppress(BaseException):
                    logger.exception("The thread that renews locks met an error and goes on.")
                time.sleep(0.1)
                self._wakes_at = 0.0  # check all leases now

    def _take_turn(self) -> bool:
        """Wait, or renew the leases that are due; return False if the thread should end."""
        # A separate method: in the loop, local variables would keep leases alive in the wait.
        with self._mutex:
            if self._thread is not threading.current_thread():
                return False  # it was replaced, or a signal handler raised while it was started
            pause = self._wakes_at - clock.now()
            if pause > 0 and not self._is_idle():
                return self._wait(pause)
            due, reports, shortest = self._take_due()
            is_idle = self._is_idle()
        for report in reports:
            emit_in_background(*report)
        if is_idle:
            self._close()
        if due:
            with self._watched(shortest * HANGS_AFTER):
                self._renew(due, shortest * ANSWER_WITHIN)
        return True

    @contextmanager
    def _watched(self, longest: float) -> Iterator[None]:
        """Replace this thread if the block takes longer than ``longest`` seconds."""
        self._turn = turn = object()
        watch = clock.timer(longest, self._replace, [turn, longest])
        watch.daemon = True
        if self._store.may_hang:
            with suppress(RuntimeError):  # the system has no thread left, or Python shuts down
                watch.start()
        try:
            yield
        finally:
            watch.cancel()
            with self._mutex:
                self._turn = None
                replaced = self._thread is not threading.current_thread()
            if replaced:
                self._close()

    def _replace(self, turn: object, longest: float) -> None:
        """Hand the leases over to another thread, because this lane's hangs in a request."""
        with self._mutex:
            if self._turn is not turn:
                return
            # It ends when it gets an answer, or an error.
            self._thread = None
            self._renewer.renewing.pop(self, None)
            self._renewer.changed.notify_all()
            leases, now = self._leases, clock.now()
            del self._renewer.lanes[self._key]
            if not leases:
                return
            lane = self._renewer.lanes[self._key] = Lane(self._renewer, self._key)
            lane._replaced = self._replaced + 1
            for lease in leases:
                self._drop(lease)
                # At once while there is something to lose. If the store hangs on each new
                # connection, there must not be ever more of them.
                pause = 0.0 if lease.remaining else lease.seconds
                lease.renew_at = now + pause * min(self._replaced, LONGEST_BACKOFF)
                lease.lane = lane
                with suppress(RuntimeError):
                    lane.add(lease)
        reason = f"{self._store.where} did not answer within {longest:.3g} s"
        emit_in_background(_emit_failed, leases[0].name, len(leases), reason, None)

    def _wait(self, pause: float) -> bool:
        """Wait for a notification or a timeout; return False if the thread should end."""
        self._waits = True
        try:
            longest = LINGER if pause == math.inf else min(pause, LONGEST_PAUSE)
            woken = clock.wait(self._wake, longest)
        finally:
            self._waits = False
        if woken or self._owned or self._unowned or self._wakes_at < math.inf:
            return True
        # This thread holds the mutex, so a lease that is added later gets a new lane.
        if self._renewer.lanes.get(self._key) is self:
            del self._renewer.lanes[self._key]
        return False

    def _take_due(self) -> tuple[list[Lease[Any]], list[Report], float]:
        """
        Select the leases that are due, and plan when the thread wakes up again.

        Returns:
            The leases to renew now, the warnings to report, and the length of the shortest
            lease, s.
        """
        # A lease that was removed does not change the planned time: a loop that takes and frees
        # locks wakes this thread once in a third of a lease, not for every lock.
        now, wakes_at, shortest = clock.now(), math.inf, math.inf
        due: list[Lease[Any]] = []
        over: list[Lease[Any]] = []
        reports: list[Report] = []
        for lease in self._leases:
            seconds, owner = lease.seconds, lease.owner
            # Not min(): with a thousand leases, the calls would be noticeable.
            if seconds < shortest:
                shortest = seconds
            if lease.renew_at > now + seconds * BATCH_WINDOW:
                if lease.renew_at < wakes_at:
                    wakes_at = lease.renew_at
            elif owner is None or (end := owner.find_end()) is None:
                due.append(lease)
            else:
                over.append(lease)
                reports.append((_warn_stopped, lease.name, lease.remaining, end))
        for lease in over:
            self._drop(lease)
        self._wakes_at = wakes_at
        return due, reports, shortest

    def _renew(self, leases: list[Lease[Any]], within: float) -> None:
        renewer = self._renewer
        with self._mutex:
            # Skip leases that were removed in between: the holder may have locked the row.
            leases = [lease for lease in leases if lease.lane is self]
            # Skip leases with another request under way, of their holder or of another lane.
            busy = renewer.extending.union(*renewer.renewing.values())
            free = [lease for lease in leases if lease not in busy] if busy else leases
            renewer.renewing[self] = free
        try:
            outcomes = self._ask(free, within) if free else []
        finally:
            with self._mutex:
                renewer.renewing.pop(self, None)
                renewer.changed.notify_all()
        if not all(outcomes):
            for lease, extended in zip(free, outcomes, strict=True):
                if extended is False:
                    self._lost(lease)
        if len(free) < len(leases):
            later = clock.now()
            for lease in set(leases).difference(free):
                lease.renew_at = later + max(lease.remaining * RETRY_AFTER, SHORTEST_PAUSE)
        with self._mutex:
            self._wakes_at = min([self._wakes_at, *[lease.renew_at for lease in leases]])

    def _ask(self, leases: list[Lease[Any]], within: float) -> Sequence[bool | None]:
        """Extend leases in one request; return what the store does; on failure, []."""
        if self._store.connects_threads:
            with self._mutex:
                self._is_connected = True
        asked_at, lengths = clock.now(), [lease.seconds for lease in leases]
        try:
            self._store.leave_pool()
            outcomes = self._store.extend(leases, within)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any store's failure
            self._failed(leases, asked_at, error)
            return []
        with self._mutex:
            self._replaced = 0
            for lease, extended, seconds in zip(leases, outcomes, lengths, strict=True):
                # Not if its holder has given it another length, or a later request was answered.
                # That it was handed over does not matter: one request for many leases may last.
                if extended and lease.seconds == seconds and asked_at > lease.asked_at:
                    lease.began(asked_at)
                elif extended is None:
                    lease.renew_at = asked_at + seconds * RETRY_AFTER
        return outcomes

    def _failed(self, leases: list[Lease[Any]], asked_at: float, error: Exception) -> None:
        # Counted from the request, so the retry is immediate if the answer took long: there may
        # be no time to wait.
        with self._mutex:
            # A lease that was released during the request did not have to be renewed.
            ours = [lease for lease in leases if lease.lane is self]
            for lease in ours:
                lease.renew_at = asked_at + lease.seconds * RETRY_AFTER
        missed = [lease.name for lease in ours]
        if missed:
            # Not a foreseen error itself: its traceback would keep these leases alive and renewed.
            foreseen = isinstance(error, LockBackendError)
            emit_in_background(
                _emit_failed, missed[0], len(missed), str(error), None if foreseen else error
            )
        self._close()

    def _lost(self, lease: Lease[Any]) -> None:
        with self._mutex:
            # It was released during the request, so it was not lost.
            if lease.lane is not self:
                return
            self._drop(lease)
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
            # A connection that can't be closed is already broken.
            logger.debug("A lock store's connection could not be closed.", exc_info=True)
        with self._mutex:
            self._is_connected = False
            self._renewer.changed.notify_all()


# Not called on the renewing threads, because a log handler may be slow.
def _warn_stopped(name: str, remaining: float, end: str) -> None:
    logger.warning("Stopped renewing %r, whose lease ends in %.3g s: %s.", name, remaining, end)


def _emit_failed(name: str, count: int, reason: str, unforeseen: Exception | None) -> None:
    event = LEASES_NOT_RENEWED if unforeseen is None else LEASES_NOT_RENEWED_BY_A_BUG
    event.emit(Renewer, exc_info=unforeseen, name=name, reason=reason, leases=count)


#: The renewer of this process.
renewer: Final = Renewer()
os.register_at_fork(after_in_child=renewer.forget_parent)
