"""
How messages end: what Celery reports, translated once.

The process of a run reports how the run ends. A worker's main process reports runs whose process
was killed, and messages that reach no run. Each report becomes an :class:`Outcome`, and the
handlers of higher rooms write what is theirs: in background threads of a main process, because that
process must not wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from celery import signals, states
from celery._state import _task_stack  # type: ignore[attr-defined]
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from django.db import connections

from ..compat import acknowledges_timeout
from ..exceptions import CelerySafeError
from ..leases.claim import current_claims as _claims
from ..leases.holder import HOST, Holder
from ..texts import get_logger
from .call import _running, find_higher, has_header
from .copies import MessageGoesOn
from .header import HEADER, Header, find_ours, get_header

logger = get_logger(__name__)

#: The handlers: a field of the header, kinds of outcomes, and a function. A handler gets the
#: outcomes of these kinds that the process of a run reports, for messages with this field. It
#: gets everything that a worker's main process reports, and must not wait then. Functions are
#: texts, because this room must not import higher ones.
HANDLERS: Final = (
    ("sent", ("over",), "concurrency.message_endings.settle"),
    ("attempt", ("succeeded", "failed", "retried", "over"), "sending.carried_ends.record"),
)
#: The kinds of outcomes of which only the main process of a worker knows: a process was killed.
DEATHS: Final = ("lost", "timed out", "cancelled", "re-sent", "terminated")
#: Longest wait until a killed process has ended, s.
LONGEST_DEATH: Final = 10.0
#: Longest wait for the background threads before a fork, s.
LONGEST_FORK: Final = 2.0
#: Pause between two checks of a process, s.
PAUSE: Final = 0.02

#: Requests that this worker has received, for as long as Celery keeps them. A redelivered
#: message has another request with the same id.
_received: WeakValueDictionary[int, Any] = WeakValueDictionary()
_background: ThreadPoolExecutor | None = None
#: Work that the threads have not finished yet.
_unfinished: set[Future[None]] = set()


class Outcome(NamedTuple):
    """
    The end of one delivery of a message, or of its run.

    Attributes:
        kind: How a run ended: ``succeeded``, ``failed`` or ``retried``, and then ``over`` in any
            case; or one of ``DEATHS``; or why the message reached no run: it was ``revoked``,
            ``expired``, of an ``unknown`` task, or ``undecodable``.
        task: The task; None: this worker could not find it.
        request: The request as the task sees it.
        error: The error behind that; None: there is none, or it is not known.
        comes_again: Whether the broker delivers the message again.
        when: When a message that was sent again is run, seconds or a time; None: it was not.
        pid: The process that was killed; None: none was, or it is not known.
        is_only: Whether this worker has no other delivery of the message.
    """

    kind: str
    task: Any
    request: Any
    error: Any = None
    comes_again: bool = False
    when: float | datetime | None = None
    pid: int | None = None
    is_only: bool = True

    @property
    def header(self) -> Header:
        """Our header of the message."""
        return get_header(self.request)

    @property
    def task_id(self) -> str:
        """The id of the task; empty if the message has none."""
        return self.request.id or ""

    def ended(self, holder: Holder) -> bool:
        """Return whether the holder of a lock or row is the run whose process was killed."""
        is_of_worker = holder.host == HOST and self.pid in (None, holder.pid)
        return self.kind in DEATHS and is_of_worker


def connect() -> None:
    """Connect to all signals with which Celery reports the begin and the end of a message."""
    receivers = (_on_received, _on_prerun, _on_success, _on_failure, _on_retry, _on_postrun)
    for receiver in (*receivers, _on_revoked, _on_unknown, _on_rejected):
        signal = getattr(signals, receiver.__name__.replace("_on", "task"))
        signal.connect(receiver, dispatch_uid=__name__)
    for _, _, path in HANDLERS:
        find_higher(path)  # imported now: a child of the pool inherits it


def _on_received(request: Any, **kwargs: Any) -> None:
    _received[id(request)] = request


def _on_prerun(task: Any, **kwargs: Any) -> None:
    """Forget what a time limit may have kept the last run of this thread from forgetting."""
    request = task.request
    may_have = request.is_eager or request.headers or hasattr(request, HEADER)
    has_header.set(None if may_have else False)
    if len(_task_stack) == 1 and not request.is_eager:
        _claims.set(())
        _running.set(())


def _on_success(sender: Any, **kwargs: Any) -> None:
    _report_run("succeeded", sender, sender.request)


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    if not isinstance(exception, WorkerLostError | TimeLimitExceeded) or not _find(task_id):
        if (request := sender.request).id == task_id:
            _report_run("failed", sender, request, exception)
    elif isinstance(exception, TimeLimitExceeded):
        # Otherwise the message is acknowledged.
        again = bool(sender.acks_late and not acknowledges_timeout(sender))
        _report_death("timed out", sender, task_id, error=exception, comes_again=again)
    else:
        _report_death("lost", sender, task_id, error=exception)


def _on_retry(sender: Any, request: Any, reason: Any = None, **kwargs: Any) -> None:
    if reason is None:  # the worker has lost its connection to the broker
        _report_death("cancelled", sender, request.id, comes_again=bool(sender.acks_late))
    elif any(one._context is request for one in _find(request.id)):
        _report_death("re-sent", sender, request.id, error=reason, when=reason.when or 0.0)
    elif not request.is_eager:
        _report_run("retried", sender, sender.request, reason)


def _on_postrun(task: Any, state: str | None, retval: Any = None, **kwargs: Any) -> None:
    has_header.set(None)
    if not (request := task.request).is_eager:
        again = state in (None, states.RETRY) or isinstance(retval, MessageGoesOn)
        _report_run("over", task, request, comes_again=again)


def _on_revoked(sender: Any, request: Any, terminated: bool, expired: bool, **kwargs: Any) -> None:
    how = "expired before it was begun" if expired else "was revoked"
    error = RuntimeError(f"The task {how}.")
    # The pool may have given the message to a child that ended before reading it. If it is then
    # revoked, the main process accepts and ends it (_put_back in celery/concurrency/asynpool.py).
    accepted_by = (one.worker_pid for one in _find(request.id) if one._context is request)
    if terminated and os.getpid() not in accepted_by:
        _report_death("terminated", sender, request.id, request, error=error)
    else:
        _report(Outcome("expired" if expired else "revoked", sender, request, error))


def _on_unknown(message: Any, exc: Any = None, kind: str = "unknown", **kwargs: Any) -> None:
    headers = {"task": None, **(getattr(message, "headers", None) or {})}
    _report(Outcome(kind, None, Context(headers), exc))


def _on_rejected(message: Any, exc: Any = None, **kwargs: Any) -> None:
    _on_unknown(message, exc, "undecodable")


def _report_run(
    kind: str, task: Any, request: Any, error: Any = None, *, comes_again: bool = False
) -> None:
    # Read directly, because most messages have no header of ours.
    found = find_ours(request) if request.is_eager else getattr(request, HEADER, None)
    if not isinstance(found, dict):
        return
    ended = getattr(request, "safe_ended", None)  # the field whose wrapper has recorded the end
    for field, kinds, path in HANDLERS:
        if field in found and field != ended and kind in kinds:
            find_higher(path)(Outcome(kind, task, request, error, comes_again))


def _report_death(kind: str, task: Any, task_id: str, request: Any = None, **facts: Any) -> None:
    """Report that the process of a run was killed; None: of which delivery is not known."""
    same = _find(task_id)
    pids = {one._context: one.worker_pid for one in same if one.worker_pid}
    for each in pids if request is None else (request,):
        only = len(same) <= 1
        _report(Outcome(kind, task, each, pid=pids.get(each), is_only=only, **facts))


def _report(outcome: Outcome) -> None:
    for _, _, path in HANDLERS:
        find_higher(path)(outcome)


def _find(task_id: str) -> list[Any]:
    """Return Celery's requests of the messages with this id that this worker has."""
    # At once, because another thread may add one.
    found = [reference() for reference in _received.valuerefs()]
    return [request for request in found if request is not None and request.id == task_id]


def is_dead_soon(pid: int) -> bool:
    """Wait up to ``LONGEST_DEATH`` for a child process to end; return whether it has ended."""
    give_up_at = time.monotonic() + LONGEST_DEATH
    while not _is_dead(pid):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(PAUSE)
    return True


def _is_dead(pid: int) -> bool:
    if hasattr(os, "waitid"):
        # The pool reaps its children only every few seconds; WNOWAIT leaves that to the pool.
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # the pid now belongs to another user's process
    return False


def in_background(work: Callable[[], object], failure: str) -> Future[None]:
    """
    Run ``work`` in a thread: the worker's main loop must not wait long for a store or a death.

    The connections to databases that it opens are closed: they would be dead by the next use.

    Args:
        failure: The log message if ``work`` fails.

    Returns:
        A future that is done when ``work`` has ended, whether it failed or not.
    """
    global _background
    if _background is None:
        _background = ThreadPoolExecutor(4, thread_name_prefix="django_celery_safe worker")
    future = _background.submit(_do_safely, work, failure)
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


def _do_safely(work: Callable[[], object], failure: str) -> None:
    try:
        try:
            work()
        finally:
            connections.close_all()
    except CelerySafeError as error:
        logger.warning("%s %s", failure, error)
    except Exception:
        logger.exception("%s", failure)


def _let_threads_end() -> None:
    """
    Wait for the threads before the pool forks the child that replaces a dead one.

    A mutex that a thread holds during the fork, such as the mutex of SQLite's memory, stays
    locked in the child for ever, so the child's first query would never return.
    """
    wait(list(_unfinished), LONGEST_FORK)


def _forget_parent() -> None:
    global _background
    _background = None
    _unfinished.clear()
    _received.clear()


os.register_at_fork(before=_let_threads_end, after_in_child=_forget_parent)
