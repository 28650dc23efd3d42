"""
The lock that a message of a task with ``unique_until`` holds from the moment it is sent.

Its name is the name of the run's lock with the prefix ``sent:``, and its token travels in
the message, so any process that has the message can free exactly that lock. While
the message waits (in a queue, for its ETA, for its retry), no process can renew the lock,
and its lease is ``SENT_TIMEOUT``. While the task runs, it has the lease of the run's own lock
and is renewed together with it, so a killed worker leaves neither lock behind.

A period's lock, for example with ``unique_until=600``, is taken like any other when the task is
sent. After the publication the message no longer owns it, so the end of a run can't free it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from celery.exceptions import Ignore, Retry

from .. import conf, process
from ..delivery.copies import MessageGoesOn, is_requeued
from ..delivery.header import HEADER, Header, get_header, read_header
from ..events import LOCK_NOT_RELEASED
from ..exceptions import CelerySafeError, LockBackendError, WrongTransaction
from ..leases.holder import Holder, describe_arguments
from ..leases.lease import Lease, Renewal
from ..leases.renewer import renewer
from ..locks import CacheLock, HeldLock
from ..locks.stores import get_store
from ..locks.stores.base import Acquired, LockRequest, Store
from ..values import seconds_until
from .options import Options


@dataclass
class SentLock:
    """
    The lock that a message has held since it was sent, with its state during a run.

    Attributes:
        period: For how long the lock is held from the send on, s, whatever the message's eta and
            expiry; None: while the message waits, or until its run ends.
        in_run: Whether a run is in progress that will free or extend this lock when it ends.
        passed_on: Lease, s, for a re-sent message (such as a retry) that takes over this lock;
            None: no message takes it over.
        settled: Whether this message has finished with the lock.
        freed: What asks the lock of the run to free this one along with it.
    """

    name: str
    token: str
    period: float | None = None
    in_run: bool = False
    passed_on: float | None = None
    settled: bool = False
    freed: Renewal | None = None
    #: The lease of the run, which takes this lock along; None: none does.
    _lease: Lease[Store] | None = None
    #: Id of the process that runs the task.
    _pid: int = field(default_factory=lambda: process.pid)

    def lease(self, eta: object = None, expires: object = None) -> float:
        """
        Return how many seconds from now a waiting message holds the lock; 0: it has expired.

        Args:
            eta, expires: As in the message: seconds from now, ISO text or datetime, or None.
        """
        if self.period is not None:
            return self.period
        store, left = self._store, None if expires is None else seconds_until(expires)
        if left is not None and left <= 0:
            return 0.0
        seconds: float = conf.get("SENT_TIMEOUT")
        if eta:
            seconds += max(0.0, seconds_until(eta) or 0.0)
        seconds = seconds if left is None else min(seconds, left)
        return min(max(seconds, store.shortest_lease), store.longest_lease)

    def move(self, seconds: float) -> bool:
        """
        Make the lock end in ``seconds``; 0: now.

        Returns:
            Whether the store answered; if not, the lock ends by its lease.
        """
        is_moved = True
        if self._pid != process.pid:
            return is_moved  # a child of a bare os.fork(), which also leaves the run's blocks
        try:
            if seconds:
                self._store.extend([Renewal(self.name, self.token, seconds)])
            else:
                self._store.release(self.name, self.token)
        except CelerySafeError as error:
            is_moved = False
            self._emit_not_moved(error)
        self.settled = True
        return is_moved

    def hold(
        self, lock: CacheLock, lease: Lease[Store], options: Options, call: Callable[[], Any]
    ) -> Any:
        """
        Hold this lock while ``call`` runs the task, under the run's own ``lock`` with ``lease``.

        A message that the run re-sends takes over this lock. Its next run may start as soon
        as this run frees its own lock, so the lease is extended before that. It is not
        extended during the run, which may have an open transaction or event loop.
        """
        self._begin_run(lock, lease, options)
        self.in_run = True
        try:
            return call()
        finally:
            self.in_run, own = False, self._lease
            self._stop_renewing()
            if self.passed_on is not None and not self.settled:
                if own is not None:  # a renewal that is in progress would shorten the lease again
                    renewer.finish_renewal(own)
                self.move(self.passed_on)

    def _begin_run(self, lock: CacheLock, run_lease: Lease[Store], options: Options) -> None:
        """
        Free this lock when a run starts, or renew it together with the run's lock.

        It gets the lease of the run's lock, so a killed worker leaves neither lock for longer. If
        the worker is killed before that, this lock stays for ``SENT_TIMEOUT``.
        """
        self._store, is_carried, lock.along = run_lease.store, lock.along is None, None
        if options.unique_until == "start":
            if is_carried:
                self.settled = True
            else:
                self.move(0)
        elif run_lease.lock is not None:  # it is renewed
            self._lease = run_lease
            run_lease.along = Renewal(self.name, self.token, run_lease.seconds)
            if is_carried:
                return
            try:
                if not self._store.extend([run_lease.along])[0]:
                    self._stop_renewing()
            except CelerySafeError as error:
                self._emit_not_moved(error)

    def end_run(
        self, task: Any, error: BaseException | None, lock: CacheLock | None = None
    ) -> None:
        """
        Free or extend this lock after a run that ended with ``error``, or was skipped.

        Args:
            lock: The lock of the run, whose release may have freed this one too.
        """
        self._stop_renewing()
        if lock is not None and self.freed is not None and lock.along is not self.freed:
            self.settled = True
        if not self.settled and (seconds := self.after(task, error)) is not None:
            self.move(seconds)

    def _stop_renewing(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.along = None

    def _emit_not_moved(self, error: CelerySafeError) -> None:
        """Report an error of the store instead of raising it: the lock ends by its lease."""
        LOCK_NOT_RELEASED.emit(SentLock, name=self.name, reason=str(error), leases=1)

    def claim(self, headers: Mapping[str, Any]) -> HeldLock | None:
        """
        Take the lock for a message that is about to be published, unless that has expired.

        Args:
            headers: The headers of the message, whose facts its holder keeps.

        Returns:
            The lock with its other holder; None: the message holds it now, or has expired.

        Raises:
            ConfigurationError: The store can't keep a lock for a period of this length.
            LockBackendError: The store did not answer; the message must not be published.
            WrongTransaction: The lock's database has an open transaction.
        """
        seconds = self.lease(headers.get("eta"), headers.get("expires"))
        if not seconds:
            return None
        store, task = self._store, headers["task"]
        if self.period is not None:
            store.check(seconds)
        shown = describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))
        # No process: the message does not depend on whether the sender is still alive.
        holder = Holder(since=time.time(), task=task, task_id=headers["id"], arguments=shown)
        try:
            outcome = store.take(LockRequest(self.name, self.token, seconds, holder))
        except WrongTransaction as error:
            raise WrongTransaction(
                f"Task {task} has unique_until, and its lock lives in {store.where}, which has a "
                f"transaction open that would hide it from others. Send the task when that "
                f"commits: {task}.delay_on_commit(...)."
            ) from error
        except BaseException as error:
            # The store may have got the request, and the lease is long.
            if isinstance(error, LockBackendError) or not isinstance(error, CelerySafeError):
                with suppress(CelerySafeError):
                    store.release(self.name, self.token)
            raise
        return None if isinstance(outcome, Acquired) else outcome

    def pass_on(self, seconds: float) -> None:
        """
        Let a message that is about to be re-sent take over this lock, for ``seconds``.

        Outside a run, the lease is extended now, because the next run may start right
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
        Return the lease, s, to set when the run has ended with ``error`` (None: no error).

        0: free the lock now. None: leave it alone, because the message may be redelivered,
        and this process can't know.
        """
        if self.passed_on is not None:
            return self.passed_on  # the run was interrupted before it could extend the lease
        if error is None:
            return 0.0
        if is_requeued(error) and task.acks_late:
            return self.lease()
        killed = not isinstance(error, Exception)
        if killed or isinstance(error, MessageGoesOn) or _is_retried(task, error):
            return None
        return 0.0

    @cached_property
    def _store(self) -> Store:
        return get_store()


def find_lock_of(task: str | None, header: Header) -> SentLock | None:
    """Return the lock that a message holds according to its header; None: no lock."""
    if task is None or "sent" not in header or "key" not in header or "duplicate" in header:
        return None
    name = f"sent:{header.get('lock', task)}:{header['key']}"
    return SentLock(name, header["sent"], header.get("period"))


def leave_period(headers: dict[str, Any]) -> None:
    """
    Remove a period lock's token from the headers of a message that is about to be published.

    The lock stays held. Without its token the message can't free it, and the message does not
    count as a duplicate when it is re-sent.
    """
    header = read_header(headers, headers.get("task"))
    if "period" in header:
        headers[HEADER] = {name: header[name] for name in header if name != "sent"}


def find_sent(request: Any, header: Header | None = None) -> SentLock | None:
    """
    Return the lock of the running message, the same object in a whole run; None: no lock.

    Args:
        header: Its header; None: read it.
    """
    if not (header := get_header(request) if header is None else header):
        return None
    kept = request.safe_kept
    if kept.sent is None:
        kept.sent = find_lock_of(request.task, header)
    sent: SentLock | None = kept.sent
    return sent


def _is_retried(task: Any, error: BaseException) -> bool:
    """Return whether ``autoretry_for``, which wraps the run, will retry after the error."""
    if not hasattr(task, "_orig_run") or isinstance(error, Ignore | Retry):
        return False
    not_for = tuple(getattr(task, "dont_autoretry_for", ()))
    return isinstance(error, tuple(task.autoretry_for)) and not isinstance(error, not_for)
