"""
The lock that a message holds from its sending on, where a task has ``unique_until``.

Its name is that of the run's lock with ``sent:`` in front, and its token travels in
the message, so that any process that has the message can free exactly that lock. While
the message waits (in a queue, for its ETA, for its retry) nobody is there to renew it,
and its lease is
``sent_timeout``; while it runs, the lease is that of the run's own lock, and renewed
along with it, so that a killed worker leaves neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery.app.task import Context
from celery.exceptions import Ignore, Retry

from .. import conf
from ..delivery.copies import MessageGoesOn, is_requeued
from ..delivery.header import Header, declare_field, get_header, is_flag, is_text, is_token
from ..events import SENT_LOCK_LOST, SENT_LOCK_NOT_MOVED
from ..exceptions import CelerySafeError, ConfigurationError, LockBackendError, WrongTransaction
from ..leases.holder import Holder, holder_text, time_limit
from ..leases.lease import Lease
from ..leases.renewer import renewer
from ..leases.store import Renewal
from ..locks import HeldLock
from ..locks.stores import get_store
from ..locks.stores.base import Acquired, Store
from .options import Options


def _is_lease(value: object) -> bool:
    try:
        conf.lease_seconds(value, "sent_timeout")
    except ConfigurationError:
        return False
    return True


#: Token of the lock that the message holds since it was sent.
declare_field("sent", is_token)
#: The lease of that lock while the message waits, s.
declare_field("sent_timeout", _is_lease)
#: Alias of the cache that holds the locks, if the task names one.
declare_field("cache", is_text)
#: Whether others wait for the message, so that it is published in any case.
declare_field("canvas", is_flag)
#: Id of the task that was sent before; the message's run does nothing.
declare_field("duplicate", is_text)


#: The lock of each message that runs, for as long as Celery keeps its request.
_locks: Final[WeakKeyDictionary[Any, SentLock | None]] = WeakKeyDictionary()


@dataclass(slots=True)
class SentLock:
    """
    The lock that a message holds since it was sent, and what becomes of it in a run.

    Attributes:
        timeout: Its lease while the message waits, s.
        in_run: Whether a run is under way that will free or extend this lock at its end.
        passed_on: Lease, s, for the re-sent message that takes over this lock, such as a
            retry; None: no message does.
        settled: Whether this message has no more to do with it.
    """

    name: str
    token: str
    timeout: float
    cache: str | conf.Unset
    in_run: bool = False
    passed_on: float | None = None
    settled: bool = False
    #: While the run renews it.
    _lease: Lease[Store] | None = None
    #: The process of the run.
    _pid: int = field(default_factory=os.getpid)

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
        if self._pid != os.getpid():
            return  # a child of a bare os.fork(), which leaves the run's blocks too
        with self._failing_quietly():
            store = self._store()
            if seconds:
                store.extend([Renewal(self.name, self.token, store.nearest_lease(seconds))])
            else:
                store.release(self.name, self.token)
        self.settled = True

    @contextmanager
    def running(self, task: Any, request: Context, options: Options) -> Iterator[None]:
        """
        Hold this lock while the block runs the task, under the run's own lock.

        A message that the run re-sends takes this lock over. Its next run may begin as soon
        as this run frees its own lock, so the lease is extended before that. It is not
        extended inside the block, because a transaction or an event loop may be open there.
        """
        self._begin_run(task, request, options)
        self.in_run = True
        try:
            yield
        finally:
            self.in_run = False
            lease = self._lease
            self._stop_renewing()
            if self.passed_on is not None and not self.settled:
                with ExitStack() as stack:
                    if lease is not None:
                        # A renewal that is under way would shorten the lease again.
                        stack.enter_context(renewer.renewal_paused(lease))
                    self.move(self.passed_on)

    def _begin_run(self, task: Any, request: Context, options: Options) -> None:
        """
        Tie this lock to the run that begins: free it now, or renew it together with the run's lock.

        It is shortened to the lease of that lock, so that a killed worker leaves neither.
        Killed before that, the worker leaves it for ``sent_timeout``.
        """
        if options.unique_until == "start":
            self.move(0)
            return
        with self._failing_quietly():
            store = self._store()
            if not (options.renew and store.renews()):
                return
            seconds = min(options.lease(), self.timeout)
            asked_at = time.monotonic()
            lease = Lease(
                store,
                self.name,
                self.token,
                seconds,
                asked_at,
                asked_at + time_limit(task, request),
                _report_lost,
            )
            if store.extend([lease])[0]:
                self._lease = lease
                renewer.add(lease)
            else:
                _report_lost(lease, store.peek(self.name))

    @contextmanager
    def during(self, task: Any) -> Iterator[None]:
        """Decide what becomes of it when a run, or what is done instead of it, ends."""
        try:
            yield
        except BaseException as error:
            self._end_run(task, error)
            raise
        self._end_run(task, None)

    def _end_run(self, task: Any, error: BaseException | None) -> None:
        self._stop_renewing()
        if not self.settled and (seconds := self.after(task, error)) is not None:
            self.move(seconds)

    def _stop_renewing(self) -> None:
        if self._lease is not None:
            renewer.remove(self._lease)
            self._lease = None

    @contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        """Report that the store did not answer: the lock ends by its lease."""
        try:
            yield
        except CelerySafeError as error:
            SENT_LOCK_NOT_MOVED.emit(SentLock, name=self.name, reason=str(error), leases=1)

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
        Let a message that is about to be re-sent take this lock over, for ``seconds``.

        Outside of a run the lease is extended now, because the next run may begin right
        after the publication.
        """
        self.passed_on = seconds
        if not self.in_run and not self.settled:
            self.move(seconds)

    def take_back(self) -> None:
        """Record that the message could not be re-sent: the end of the run frees its lock."""
        self.passed_on = None
        if not self.in_run:
            self.settled = False

    def after(self, task: Any, error: BaseException | None) -> float | None:
        """
        Return the lease, s, to set when the run ended with ``error``, or without one.

        0: now. None: it is left alone, since the message may come again and
        nothing here can tell.
        """
        if self.passed_on is not None:
            return self.passed_on  # its end was interrupted before it could see to that
        if error is None:
            return 0.0
        if is_requeued(error) and task.acks_late:
            return self.lease()
        killed = not isinstance(error, Exception)
        if killed or isinstance(error, MessageGoesOn) or _is_retried(task, error):
            return None
        return 0.0

    def _store(self) -> Store:
        return get_store(self.cache)


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
    header = get_header(request)
    if "sent" not in header:
        return None
    if request not in _locks:
        _locks[request] = find_lock_of(request.task, header)
    return _locks[request]


def _report_lost(lease: Lease[Store], now_held: HeldLock | None) -> None:
    lease.lost = True
    SENT_LOCK_LOST.emit(SentLock, name=lease.name, holder=holder_text(now_held))


def _is_retried(task: Any, error: BaseException) -> bool:
    """Return whether ``autoretry_for``, which wraps the run from outside, takes up the error."""
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
