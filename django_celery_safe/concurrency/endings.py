"""
Runs that can't free their locks themselves, and messages that never run.

A killed process frees nothing, and a revoked or unknown message reaches no run. But
Celery tells the worker's main process of most of them, which frees what the message
and its run held, once the process that ran it is really gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from .. import conf
from ..exceptions import CelerySafeError
from ..locks import HeldLock
from ..locks.lock import HOST
from ..locks.stores import locate
from ..locks.stores.base import Renewal
from ..texts import get_logger
from .copies import ended_for, met_note
from .guard import find_guarded_as_asked, find_lock_name
from .header import read_header
from .sent import find_lock_of, find_sent

logger = get_logger(__name__)

#: Name under which the receivers are connected, once in each process.
UID: Final = "django_celery_safe.endings"
#: Longest time to wait until a killed process is gone, s. A lease frees what is left.
DEATH_PATIENCE: Final = 10.0
#: Pause between two looks, s.
PAUSE: Final = 0.02

#: Requests that this worker has received, while Celery keeps them. A message that is
#: delivered again makes another one with the same id.
_received: WeakSet[Any] = WeakSet()
_freeing: ThreadPoolExecutor | None = None


def connect() -> None:
    """Listen to what seldom happens: a message or a run that ends without us."""
    signals.task_failure.connect(_on_failure, dispatch_uid=UID)
    signals.task_retry.connect(_on_retry, dispatch_uid=UID)
    signals.task_revoked.connect(_on_revoked, dispatch_uid=UID)
    signals.task_unknown.connect(_on_refused, dispatch_uid=UID)
    signals.task_rejected.connect(_on_refused, dispatch_uid=UID)


def watch(*, runs: bool = False) -> None:
    """
    Listen to every message that comes, once there is a task that may hold a lock.

    Args:
        runs: Also to the end of every run, once a message may hold a lock that
            something outside of the run's guard could leave behind.
    """
    signals.task_received.connect(_on_received, dispatch_uid=UID)
    if runs:
        signals.task_postrun.connect(_on_postrun, dispatch_uid=UID)


def _on_received(request: Any, **kwargs: Any) -> None:
    _received.add(request)


def _on_postrun(task: Any, state: str | None, **kwargs: Any) -> None:
    """Free the lock of a message whose run ended outside of its guard, as in a hook."""
    request = task.request
    if state is None or state == states.RETRY or request.is_eager:
        return
    sent = find_sent(request)
    if sent is not None and not sent.settled and sent.passed_on is None:
        sent.move(0)


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Free what a killed run held; it is told to the main process only."""
    if not isinstance(exception, WorkerLostError | TimeLimitExceeded):
        return
    comes_again = (
        isinstance(exception, TimeLimitExceeded)
        and sender.acks_late
        and not getattr(sender, "acks_on_timeout", True)  # Celery 5.7
    )
    _free_killed(sender, task_id, None if comes_again else 0.0)


def _on_retry(sender: Any, request: Context, reason: Any = None, **kwargs: Any) -> None:
    """Free the lock of a killed run that the main process sends again, or cancels."""
    if reason is not None:
        _free_killed(sender, request.id or "", reason.when or 0.0, retried=True)
    else:
        _free_killed(sender, request.id or "", None if sender.acks_late else 0.0)


def _on_revoked(sender: Any, request: Context, terminated: bool, **kwargs: Any) -> None:
    if terminated and not was_put_back(request):
        _free_killed(sender, request.id or "", 0.0)
        return
    sent, guarded = find_sent(request), find_guarded_as_asked(sender, request)
    if sent is None or guarded is None:
        return

    def free() -> None:
        # Delivered twice, and refused the second time: the first may still run.
        held = locate(guarded[1].cache).store().peek(find_lock_name(sender, request, *guarded))
        if held is None or held.holder.task_id != request.id:
            sent.move(0)

    _in_background(free, sent.cache)


def was_put_back(message: Context) -> bool:
    """
    Tell whether no child ran a message that Celery reports as terminated.

    The pool gave it to a child that ended before it read it. Revoked meanwhile, it is
    accepted and ended in the main process (``_put_back`` in celery/concurrency/asynpool.py).
    """
    return any(
        request._context is message and request.worker_pid == os.getpid() for request in _received
    )


def _on_refused(message: Any, **kwargs: Any) -> None:
    """Free the lock of a message that no task here can take."""
    headers = getattr(message, "headers", None) or {}
    task = headers.get("task")
    if (sent := find_lock_of(task, read_header(headers, task))) is not None:
        _in_background(lambda: sent.move(0), sent.cache)


def _free_killed(task: Any, task_id: str, delay: float | None, *, retried: bool = False) -> None:
    """
    Free the locks of a run whose process was killed.

    Args:
        delay: None: the broker delivers the message again, so that it keeps its own lock.
            With ``retried``: when it comes again, s or a moment. Else 0.
    """
    same = [request for request in _received if request.id == task_id]
    for request in same:
        pid = request.worker_pid
        if pid is not None and pid != os.getpid():
            # Of a message that was delivered twice, the other one goes on with its lock.
            alone = len(same) == 1
            _free_after_death(task, request._context, pid, delay, retried, alone)


def _free_after_death(
    task: Any, request: Context, pid: int, delay: float | None, retried: bool, alone: bool
) -> None:
    guarded = find_guarded_as_asked(task, request)
    if guarded is None:
        return
    name, store = find_lock_name(task, request, *guarded), locate(guarded[1].cache).store()
    sent = find_sent(request)
    ended = delay is not None and not retried

    def free() -> None:
        held, met = store.peek(name), store.peek(met_note(task, request))
        if not any(_is_of(lock, pid, request) for lock in (held, met)) and sent is None:
            return
        if not _is_dead_within(pid, DEATH_PATIENCE):
            logger.info(
                "Process %d of task %s[%s] does not end; its locks end by their leases.",
                pid,
                task.name,
                request.id,
            )
            return
        done = False
        if ended and met is not None and _is_of(met, pid, request):
            # As the run itself does when it ends: its copy has nothing left to do.
            done = store.extend([Renewal(met.name, met.token, ended_for(task))])[0]
        if held is not None and _is_of(held, pid, request):
            store.release(name, held.token, held.remaining)
        if sent is not None and delay is not None and (alone or done):
            sent.move(sent.lease(delay, request.expires) if retried else 0.0)

    _in_background(free, guarded[1].cache)


def _is_of(lock: HeldLock | None, pid: int, request: Context) -> bool:
    """Tell whether a lock is that of a message's run in a process of this machine."""
    if lock is None or lock.holder.task_id != request.id:
        return False
    return lock.holder.host == HOST and lock.holder.pid == pid


def _is_dead_within(pid: int, seconds: float) -> bool:
    """Wait until a child process has ended; tell whether it has."""
    give_up_at = time.monotonic() + seconds
    while not _is_dead(pid):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(PAUSE)
    return True


def _is_dead(pid: int) -> bool:
    if hasattr(os, "waitid"):
        # The pool reaps its children every few seconds only; this looks and leaves it to that.
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # the number is another user's by now
    return False


def _in_background(free: Callable[[], None], cache: str | conf.Unset) -> None:
    def close() -> None:
        store = locate(cache).store()
        if store.connects_threads:
            store.close()  # one that is kept would be dead by the next time

    in_background(free, close, "A dead run's locks could not be freed and end by their leases.")


def in_background(work: Callable[[], None], close: Callable[[], None], failure: str) -> None:
    """
    Do it in a thread: the worker's main loop must not wait for a store, nor for a death.

    Args:
        close: Closes what ``work`` opened.
        failure: What is logged if it could not be done.
    """
    global _freeing
    if _freeing is None:
        _freeing = ThreadPoolExecutor(4, thread_name_prefix="django_celery_safe endings")
    _freeing.submit(_do_safely, work, close, failure)


def _do_safely(work: Callable[[], None], close: Callable[[], None], failure: str) -> None:
    try:
        try:
            work()
        finally:
            close()
    except CelerySafeError as error:
        logger.warning("%s %s", failure, error)
    except Exception:
        logger.exception("%s", failure)


def _forget_parent() -> None:
    global _freeing
    _freeing = None
    _received.clear()


os.register_at_fork(after_in_child=_forget_parent)
