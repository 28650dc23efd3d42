"""
The lock that a message holds from its sending on, where a task has ``unique_until``.

It is called as the lock of the run, with ``sent:`` before it, and its token travels in
the message, so that any process that has the message can free exactly that lock. While
the message waits (in a queue, for its ETA, for its retry) nobody is there to renew it,
and its lease is
``sent_timeout``; while it runs, the lease is that of the run's own lock, and renewed
along with it, so that a killed worker leaves neither.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from .. import conf
from ..exceptions import CelerySafeError, LockBackendError, WrongTransaction
from ..locks import HeldLock
from ..locks.stores import locate
from ..locks.stores.base import Acquired, Holder, Renewal, Store
from ..signals import emit, lock_backend_failed
from ..texts import get_logger
from .header import Header, find_header

logger = get_logger(__name__)


@dataclass(slots=True)
class SentLock:
    """
    The lock that a message holds since it was sent, and what becomes of it in a run.

    Attributes:
        timeout: Its lease while the message waits, s.
        in_run: Whether the run is under way that decides about it at its end.
        passed_on: Lease, s, with which it went on to another message of the run's
            task, such as its retry; None: it did not.
        settled: Whether this message has no more to do with it.
    """

    name: str
    token: str
    timeout: float
    cache: str | conf.Unset
    in_run: bool = False
    passed_on: float | None = None
    settled: bool = False

    def is_in(self, store: Store) -> bool:
        """Tell whether it is kept in the very store of the run's lock."""
        try:
            return self._store() is store
        except CelerySafeError:
            return False

    def lease(self, eta: object = None, expires: object = None) -> float:
        """
        Return for how many seconds from now a waiting message holds it; 0: it has expired.

        Args:
            eta, expires: The message's: seconds from now, ISO text or datetime, or None.
        """
        seconds = self.timeout + max(0.0, seconds_until(eta) or 0.0)
        left = seconds_until(expires)
        return seconds if left is None else max(0.0, min(seconds, left))

    def move(self, seconds: float) -> None:
        """Let it end in ``seconds``, 0: now; if the store does not answer, by its lease."""
        try:
            store = self._store()
            store.move(self.renewal(store, seconds))
        except CelerySafeError as error:
            emit(
                lock_backend_failed,
                logger,
                logging.WARNING,
                "The lock %r could not be freed or extended and ends by its lease: %s",
                self.name,
                error,
                sender=SentLock,
                name=self.name,
                reason=str(error),
            )
        self.settled = True

    def renewal(self, store: Store, seconds: float) -> Renewal:
        """Return the request to let it end in ``seconds``, as near to that as the store can."""
        return Renewal(self.name, self.token, store.nearest_lease(seconds) if seconds else 0.0)

    def claim(
        self, task: str, task_id: str, seconds: float, arguments: str | None = None
    ) -> HeldLock | None:
        """
        Take it for a message that is to be published now.

        Args:
            task, task_id, arguments: What its holder keeps of the message.
            seconds: Its lease.

        Returns:
            None if it is the message's now; else the lock of whoever holds it.

        Raises:
            LockBackendError: The store did not answer; nothing must be published.
            WrongTransaction: It lives in a database that has a transaction open.
        """
        store = self._store()
        seconds = store.nearest_lease(seconds)
        # No process: whether the sender still lives says nothing about the message.
        holder = Holder(since=time.time(), task=task, task_id=task_id, arguments=arguments)
        try:
            outcome = store.acquire(self.name, self.token, seconds, holder)
        except WrongTransaction as error:
            raise WrongTransaction(
                f"Task {task} has unique_until, and its lock lives in {store.where}, which has a "
                f"transaction open that would hide it from others. Send the task when that "
                f"commits: {task}.delay_on_commit(...)."
            ) from error
        except BaseException as error:
            # It may have got the request, and its lease is long.
            if isinstance(error, LockBackendError) or not isinstance(error, CelerySafeError):
                with suppress(CelerySafeError):
                    store.release(self.name, self.token)
            raise
        return None if isinstance(outcome, Acquired) else outcome

    def pass_on(self, seconds: float) -> None:
        """
        Let it go with the run's message, which is sent again.

        The end of the run sees to that; when it is over, as it is for what
        ``autoretry_for`` sends, it is seen to here.
        """
        self.passed_on = seconds
        if not self.in_run and not self.settled:
            self.move(seconds)

    def take_back(self) -> None:
        """Note that the message could not be sent again: the end of the run frees its lock."""
        self.passed_on = None
        self.settled = self.settled and self.in_run

    def after(self, task: Any, error: BaseException | None) -> float | None:
        """
        Return in how many seconds it ends when a run ended with ``error``, or well.

        0: now. None: it is left alone, since the message may come again and
        nothing here can tell.
        """
        if self.passed_on is not None:
            return self.passed_on
        if is_requeued(error) and task.acks_late:
            return self.lease()
        if error is not None and (not isinstance(error, Exception) or _is_retried(task, error)):
            return None
        return 0.0

    def _store(self) -> Store:
        return locate(self.cache).store()


def find_lock_of(task: str | None, header: Header) -> SentLock | None:
    """Return the lock that a message's header tells of; None if it holds none."""
    if task is None or "sent" not in header or "key" not in header or "duplicate" in header:
        return None
    timeout = header.get("sent_timeout")
    if timeout is None:
        timeout = conf.lease_seconds(conf.get("SENT_TIMEOUT"), "SENT_TIMEOUT")
    cache = header.get("cache", conf.UNSET)
    name = f"sent:{header.get('lock', task)}:{header['key']}"
    return SentLock(name, header["sent"], timeout, cache)


def find_sent(request: Any) -> SentLock | None:
    """Return the lock of the message that runs, one object for each run; None: it has none."""
    if not request.headers:
        return None
    found: SentLock | None = request.__dict__.get("celery_safe_sent")
    if found is None:
        found = find_lock_of(request.task, find_header(request))
        request.celery_safe_sent = found
    return found


def is_requeued(error: BaseException | None) -> bool:
    """Tell whether a run ended with the wish to get its message again."""
    return isinstance(error, Reject) and bool(getattr(error, "requeue", False))


def _is_retried(task: Any, error: BaseException) -> bool:
    """Tell whether ``autoretry_for``, which wraps the run from outside, takes up the error."""
    if not hasattr(task, "_orig_run") or isinstance(error, Ignore | Retry):
        return False
    not_for = tuple(getattr(task, "dont_autoretry_for", ()))
    return isinstance(error, tuple(task.autoretry_for)) and not isinstance(error, not_for)


def seconds_until(moment: object) -> float | None:
    """Return the time until then, s; None for what is no moment. A number is seconds already."""
    if isinstance(moment, int | float):
        return float(moment)
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            return None  # no time at all; what takes the message says so
    if not isinstance(moment, datetime):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)  # as Celery's worker does
    return (moment - datetime.now(UTC)).total_seconds()
