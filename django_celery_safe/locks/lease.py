"""
The thread that renews every lease held in this process.

One for each process, started when the first renewed lock is acquired. It asks
each store once for all leases that are due, in a connection of its own, and
closes that connection when the process holds nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

from ..exceptions import LockBackendError
from ..signals import aside, emit, lock_backend_failed
from ..texts import get_logger
from .stores.base import HeldLock, LeaseStore, Renewal

logger = get_logger(__name__)

#: A lease is renewed when this part of it has passed.
RENEW_AFTER: Final = 1 / 3
#: After a failed renewal it is tried again when this part of the lease has passed.
RETRY_AFTER: Final = 1 / 10
#: An answer that takes longer than this part of the shortest lease is given up, where the
#: store can: the other leases, and those in other stores, wait for it.
ANSWER_WITHIN: Final = 1 / 6
#: Leases that are due within this part of themselves are renewed along with others.
ALONG: Final = 1 / 20
#: Longest that the thread waits at a time, s; a system can't wait for centuries.
LONGEST_PAUSE: Final = 3600.0


#: The kind of store that a holder knows its lease to be in.
S = TypeVar("S", bound=LeaseStore)


class Lease(Generic[S]):
    """
    What a holder knows about its own lease.

    Args:
        store: Where the lock lives.
        name: The lock's name.
        token: Which acquisition this is.
        seconds: Length of the lease.
        asked_at: When the last request that began a lease was sent, by the
            monotonic clock. The lease is trusted for ``seconds`` from then on, less
            what the store may end it ``early``: it can only have got the request later.
        renew_until: When the thread stops to renew it, monotonic; inf: never.
        on_lost: Called, with the lease and the new holder's lock or None, by the
            thread that finds the lease to be no longer ours. It must not refer to
            the lock: a lease nobody refers to is not renewed.
    """

    __slots__ = (
        "__weakref__",
        "asked_at",
        "lost",
        "name",
        "on_lost",
        "pid",
        "renew_at",
        "renew_until",
        "seconds",
        "store",
        "token",
    )

    def __init__(
        self,
        store: S,
        name: str,
        token: str,
        seconds: float,
        asked_at: float,
        renew_until: float,
        on_lost: Callable[[Lease[Any], HeldLock | None], None],
    ) -> None:
        self.store = store
        self.name = name
        self.token = token
        self.seconds = seconds
        self.renew_until = renew_until
        self.on_lost = on_lost
        self.pid = os.getpid()
        self.lost = False
        self.began(asked_at)

    def began(self, asked_at: float) -> None:
        """Note that the store let the lease begin anew, as asked at ``asked_at``."""
        self.asked_at = asked_at
        self.renew_at = asked_at + self.seconds * RENEW_AFTER

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted; 0 when it is over, lost or another process's."""
        if self.lost or self.pid != os.getpid():
            return 0.0
        return max(0.0, self.asked_at + self.seconds - self.store.early - time.monotonic())

    def patience(self) -> Callable[[], float]:
        """
        Return what tells for how many seconds the holder may still try to note its end.

        As long as nobody else can begin, and for one length of the lease at the most: it
        may be renewed all the while.
        """
        ends_at = time.monotonic() + self.seconds
        return lambda: min(self.remaining, ends_at - time.monotonic())

    def extend(self, seconds: float) -> bool:
        """Ask the store for a lease of ``seconds`` from now; tell whether it is still ours."""
        with renewer().standing_off(self):
            asked_at = time.monotonic()
            # If the answer gets lost, the lease is of either length: trust the shorter.
            self.seconds = min(self.seconds, seconds)
            try:
                (extended,) = self.store.extend([Renewal(self.name, self.token, seconds)])
            except BaseException:
                # It may be over sooner than planned.
                self.renew_at = min(self.renew_at, asked_at + self.seconds * RETRY_AFTER)
                raise
            if extended:
                self.seconds = seconds
                self.began(asked_at)
            return extended


class Renewer:
    """Renews leases, on a thread that it starts when it has some."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        #: Of the same mutex; ``with`` is quicker on a lock than on a condition.
        self._changed = threading.Condition(self._mutex)
        # Weak: a lock that nobody can release any more (an error hit between its
        # acquisition and its `with` block) must not be renewed for ever.
        self._leases: WeakSet[Lease[Any]] = WeakSet()
        self._thread: threading.Thread | None = None
        #: When the thread looks again by itself, monotonic.
        self._wakes_at = math.inf
        #: Leases whose ends the thread is moving, and those that their holders are: of two
        #: such requests at once nobody knows which the store got last.
        self._renewing: set[Lease[Any]] = set()
        self._extending: set[Lease[Any]] = set()
        #: Stores to which the thread has opened connections of its own.
        self._opened: set[LeaseStore] = set()

    def add(self, lease: Lease[Any]) -> None:
        """Renew ``lease`` from now on, also when its length has changed."""
        with self._mutex:
            self._leases.add(lease)
            if self._thread is None:
                self._wakes_at = lease.renew_at
                thread = threading.Thread(
                    target=self._run, name="django_celery_safe leases", daemon=True
                )
                thread.start()
                # Not before: the system may have no thread left, and it never ends.
                self._thread = thread
            elif lease.renew_at < self._wakes_at:
                self._wakes_at = lease.renew_at
                self._changed.notify_all()

    def remove(self, lease: Lease[Any]) -> None:
        """Renew ``lease`` no more; with the last one of a store, the connection is closed."""
        with self._mutex:
            self._leases.discard(lease)
            if not self._is_idle(lease.store):
                return
            self._changed.notify_all()
            # So that "released" means that nothing of ours is connected; a store
            # that hangs must not hold up the caller.
            self._changed.wait_for(lambda: not self._is_idle(lease.store), timeout=1.0)

    @contextmanager
    def standing_off(self, lease: Lease[Any]) -> Iterator[None]:
        """Leave the lease alone while its holder asks the store to move its end."""
        try:
            with self._mutex:
                self._changed.wait_for(lambda: lease not in self._renewing)
                self._extending.add(lease)
            yield
        finally:
            with self._mutex:
                self._extending.discard(lease)

    def _is_idle(self, store: LeaseStore) -> bool:
        """Tell whether the thread is connected to a store in which nothing is held."""
        return store in self._opened and all(lease.store is not store for lease in self._leases)

    def _run(self) -> None:
        while True:
            try:
                self._take_turn()
            except BaseException:
                # Even a receiver's SystemExit: without this thread every lock would be lost.
                with suppress(BaseException):
                    logger.exception("The thread that renews locks met an error and goes on.")
                time.sleep(0.1)
                self._wakes_at = 0.0  # look at all of them

    def _take_turn(self) -> None:
        # A method of its own: what it knows of leases would keep them while it waits.
        with self._mutex:
            idle = {store for store in self._opened if self._is_idle(store)}
            pause = self._wakes_at - time.monotonic()
            if pause > 0 and not idle:
                self._changed.wait(None if pause == math.inf else min(pause, LONGEST_PAUSE))
                return
            due, over, shortest = self._take_due()
        self._close(idle)
        self._leave(over)
        for store, leases in due.items():
            self._renew(store, leases, shortest * ANSWER_WITHIN)

    def _take_due(self) -> tuple[dict[LeaseStore, list[Lease[Any]]], list[Lease[Any]], float]:
        """
        Plan when to look again.

        Returns:
            What to renew now, what to renew no more, and the shortest of all leases, s.
        """
        # The plan made by a lease stays when it is gone: who takes and frees locks in a
        # loop wakes this thread once in a third of a lease, not each time.
        now, wakes_at, shortest = time.monotonic(), math.inf, math.inf
        due: dict[LeaseStore, list[Lease[Any]]] = {}
        over: list[Lease[Any]] = []
        for lease in self._leases:
            # Not min(): a thousand calls of it would be felt.
            if lease.seconds < shortest:
                shortest = lease.seconds
            if lease.renew_at > now + lease.seconds * ALONG:
                if lease.renew_at < wakes_at:
                    wakes_at = lease.renew_at
            elif lease.renew_until <= now:
                over.append(lease)
            else:
                due.setdefault(lease.store, []).append(lease)
        self._leases.difference_update(over)
        self._wakes_at = wakes_at
        return due, over, shortest

    def _renew(self, store: LeaseStore, leases: list[Lease[Any]], within: float) -> None:
        with self._mutex:
            # One that was removed since the plan was made may be locked by its holder.
            leases = [lease for lease in leases if lease in self._leases]
            # One that its holder extends just now is renewed by that.
            free = [lease for lease in leases if lease not in self._extending]
            self._renewing.update(free)
        try:
            outcomes = self._ask(store, free, within) if free else []
        finally:
            with self._mutex:
                self._renewing.clear()
                self._changed.notify_all()
        for lease, extended in zip(free, outcomes, strict=False):
            if not extended:
                self._lost(lease)
        if len(free) < len(leases):
            later = time.monotonic()
            for lease in set(leases).difference(free):
                lease.renew_at = later + lease.seconds * RETRY_AFTER
        with self._mutex:
            self._wakes_at = min([self._wakes_at, *[lease.renew_at for lease in leases]])

    def _leave(self, over: list[Lease[Any]]) -> None:
        for lease in over:
            logger.warning(
                "The lease of %r is renewed no more and ends in %.3g s: its task still runs, "
                "beyond its time limit.",
                lease.name,
                lease.remaining,
            )

    def _ask(self, store: LeaseStore, leases: list[Lease[Any]], within: float) -> list[bool]:
        """Extend leases in one request; return for each whether it is still ours, or nothing."""
        if store.connects_threads:
            with self._mutex:
                self._opened.add(store)
        asked_at = time.monotonic()
        try:
            store.leave_pool()
            outcomes = store.extend(leases, within)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any store's failure
            self._failed(store, leases, error)
            return []
        for lease, extended in zip(leases, outcomes, strict=True):
            if extended:
                lease.asked_at = asked_at
                lease.renew_at = asked_at + lease.seconds * RENEW_AFTER
        return outcomes

    def _failed(self, store: LeaseStore, leases: list[Lease[Any]], error: Exception) -> None:
        now = time.monotonic()
        for lease in leases:
            lease.renew_at = now + lease.seconds * RETRY_AFTER
        # Not the error itself, whose traceback would keep these leases, and renew them.
        foreseen = isinstance(error, LockBackendError)
        aside(_tell_failed, leases[0].name, len(leases), str(error), None if foreseen else error)
        self._close({store})

    def _lost(self, lease: Lease[Any]) -> None:
        with self._mutex:
            # Released while the request was under way: then it is no loss.
            if lease not in self._leases:
                return
            self._leases.discard(lease)
            lease.lost = True
        try:
            now_held = lease.store.peek(lease.name)
        except Exception:  # noqa: BLE001 - only to name the new holder
            now_held = None
        aside(lease.on_lost, lease, now_held)

    def _close(self, stores: set[LeaseStore]) -> None:
        for store in stores:
            try:
                store.close()
            except Exception:
                # What can't be closed is gone already.
                logger.debug("A lock store's connection could not be closed.", exc_info=True)
        with self._mutex:
            self._opened -= stores
            self._changed.notify_all()


def _tell_failed(name: str, count: int, reason: str, unforeseen: Exception | None) -> None:
    emit(
        lock_backend_failed,
        logger,
        logging.WARNING if unforeseen is None else logging.ERROR,
        "%d lease(s) could not be renewed and will be tried again: %s",
        count,
        reason,
        sender=Renewer,
        exc_info=unforeseen,
        name=name,
        reason=reason,
    )


_renewer = Renewer()


def renewer() -> Renewer:
    """Return this process's renewer."""
    return _renewer


def _forget_parent() -> None:
    # The parent's leases, its thread and its mutex are not this process's.
    global _renewer
    _renewer = Renewer()


os.register_at_fork(after_in_child=_forget_parent)
