"""The lock of one run, which takes the lock of its message along."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from celery.app.task import Context

from ..locks import CacheLock, HeldLock
from ..locks.lease import Lease, renewer
from ..locks.stores.base import Acquired, Holder, Renewal, Store
from ..signals import emit, sent_lock_lost
from ..texts import get_logger
from .copies import ComesBack, ended_for, met_note, met_token
from .options import Options
from .sent import SentLock, is_requeued

logger = get_logger(__name__)


class RunLock(CacheLock):
    """
    A lock whose acquisition and release move the message's lock too, in the same requests.

    Args:
        message: The message that the task runs for; None: there is none.
        sent: The lock that the message holds since it was sent; None: it holds none.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        task: Any,
        message: Context | None,
        sent: SentLock | None,
    ) -> None:
        super().__init__(name, timeout=options.timeout, renew=options.renew, cache=options.cache)
        self._task = task
        self._sent = sent
        #: What a copy of the message may have noted, to be told of the end; "": nothing,
        #: since no broker delivers again what is acknowledged.
        self._note = met_note(task, message) if message is not None and task.acks_late else ""
        self._ended = False
        self._until_start = options.unique_until == "start"
        #: The message's lock while the run renews it.
        self._sent_lease: Lease[Store] | None = None
        #: In how many seconds the message's lock ends when the run does; None: left alone.
        self._sent_after: float | None = None
        if sent is not None:
            sent.in_run = True

    @contextmanager
    def stepping_aside(self) -> Iterator[None]:
        """Move the message's lock when what is done instead of the run is done."""
        try:
            yield
        except BaseException as error:
            self._step_aside(error)
            raise
        self._step_aside(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._lease is not None:
                # Killed, or put back: then the message comes again, or only its copy does.
                killed = not isinstance(error, Exception | None)
                comes_again = killed or isinstance(error, ComesBack) or is_requeued(error)
                self._ended = bool(self._note) and not comes_again
                if self._sent is not None:
                    self._end_run(self._sent, error)
        finally:
            super().__exit__(kind, error, traceback)

    def _step_aside(self, error: BaseException | None) -> None:
        if self._sent is not None:
            self._end_run(self._sent, error)
            if self._sent_after is not None:
                self._sent.move(self._sent_after)

    def _end_run(self, sent: SentLock, error: BaseException | None) -> None:
        """Decide what becomes of the message's lock when the run's is released."""
        sent.in_run = False
        if not sent.settled:
            self._sent_after = sent.after(self._task, error)
        if self._sent_lease is not None:
            renewer().remove(self._sent_lease)
            self._sent_lease = None

    def _try_acquire(self, store: Store, seconds: float, patience: float | None) -> bool:
        acquired = super()._try_acquire(store, seconds, patience)
        lease = self._lease
        if not acquired or lease is None or self._sent is None:
            return acquired
        if self._until_start:
            if self._moves_sent(store):
                self._sent.settled = True
            else:
                self._sent.move(0)
        elif self._moves_sent(store):
            self._sent_lease = Lease(
                store,
                self._sent.name,
                self._sent.token,
                self._sent_seconds(seconds),
                lease.asked_at,
                lease.renew_until,
                _note_sent_lost,
            )
            renewer().add(self._sent_lease)
        return acquired

    def _ask_to_acquire(
        self, store: Store, token: str, seconds: float, holder: Holder, patience: float | None
    ) -> Acquired | HeldLock:
        sent = self._sent
        if sent is None or not self._moves_sent(store):
            return super()._ask_to_acquire(store, token, seconds, holder, patience)
        along = sent.renewal(store, 0.0 if self._until_start else self._sent_seconds(seconds))
        return store.acquire_along([along], self.name, token, seconds, holder, patience)

    def _ask_to_release(self, lease: Lease[Store]) -> bool:
        store, others = lease.store, []
        if self._ended:
            lasts = store.nearest_lease(ended_for(self._task))
            others.append(Renewal(self._note, met_token(lease.token), lasts))
        sent, after = self._sent, self._sent_after
        moved = None if after is None else sent
        along = None if moved is None or not moved.is_in(store) else moved
        if along is not None and after is not None:
            others.append(along.renewal(store, after))
        if others:
            released = store.release_along(others, self.name, lease.token, lease.remaining)
        else:
            released = super()._ask_to_release(lease)
        if along is not None:
            # Not before: what is interrupted here is freed when the run's end is told.
            along.settled = True
        elif moved is not None and after is not None:
            moved.move(after)
        return released

    def _moves_sent(self, store: Store) -> bool:
        """Tell whether the message's lock is moved when the run's is acquired."""
        if self._sent is None or not self._sent.is_in(store):
            return False
        return self._until_start or (self._renew and store.renews())

    def _sent_seconds(self, seconds: float) -> float:
        """Return the lease of the message's lock while the run is renewed."""
        return seconds if self._sent is None else min(seconds, self._sent.timeout)


def _note_sent_lost(lease: Lease[Store], now_held: HeldLock | None) -> None:
    lease.lost = True
    emit(
        sent_lock_lost,
        logger,
        logging.INFO,
        "The lock %r ended while its task runs, so the same may be sent again: its lease was over, "
        "or it was freed.",
        lease.name,
        sender=SentLock,
        name=lease.name,
        holder="" if now_held is None else str(now_held.holder),
    )
