"""
Runs that can't free their locks themselves, and messages that never run.

A killed process frees nothing, and a revoked or unknown message reaches no run. But
Celery tells the worker's main process of most of them, which frees what the message
and its run held, once the process that ran it is really gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from .. import conf
from ..delivery.copies import MessageGoesOn, copy_marker, mark_ended
from ..delivery.header import read_header
from ..delivery.worker import (
    find_received,
    in_background,
    is_dead_soon,
    was_put_back,
    watch_messages,
)
from ..leases.holder import HOST
from ..locks import HeldLock
from ..locks.stores import locate
from ..texts import get_logger
from .guard import find_guarded_as_asked, get_lock_name
from .sent import find_lock_of, find_sent

logger = get_logger(__name__)

#: Name under which the receivers are connected, once in each process.
UID: Final = "django_celery_safe.endings"


def connect() -> None:
    """Connect Celery's signals: messages rejected before our wrapper, runs killed outside it."""
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
    watch_messages()
    if runs:
        signals.task_postrun.connect(_on_postrun, dispatch_uid=UID)


def _on_postrun(task: Any, state: str | None, retval: Any = None, **kwargs: Any) -> None:
    """Free the lock of a message whose run ended outside of its guard, as in a hook."""
    request = task.request
    if state is None or state == states.RETRY or request.is_eager:
        return
    if isinstance(retval, MessageGoesOn):
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
        held = locate(guarded[1].cache).store().peek(get_lock_name(sender, request, *guarded))
        if held is None or held.holder.task_id != request.id:
            sent.move(0)

    _in_background(free, sent.cache)


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
            With ``retried``: when it comes again, s or a moment. Otherwise 0.
    """
    same = find_received(task_id)
    for request in same:
        pid = request.worker_pid
        if pid is not None and pid != os.getpid():
            # The other delivery of a message goes on with its lock.
            alone = len(same) == 1
            _free_after_death(task, request._context, pid, delay, retried, alone)


def _free_after_death(
    task: Any, request: Context, pid: int, delay: float | None, retried: bool, alone: bool
) -> None:
    guarded = find_guarded_as_asked(task, request)
    if guarded is None:
        return
    name, store = get_lock_name(task, request, *guarded), locate(guarded[1].cache).store()
    sent = find_sent(request)
    ended = delay is not None and not retried

    def free() -> None:
        held = store.peek(name)
        is_ours = held is not None and _is_of(held, pid, request)
        if not is_ours and sent is None:
            return

        def mark() -> bool:
            # As the run itself does when it ends: its copy has nothing left to do.
            if held is None or not (is_ours and ended):
                return False
            if store.peek(copy_marker(task, request)) is None:
                return False
            mark_ended(task, request, store, held.token)
            return True

        # Before the process is gone, since its lease may end at once after that; and again,
        # since the message may be delivered meanwhile.
        done = mark()
        if not is_dead_soon(pid):
            logger.info(
                "Process %d of task %s[%s] does not end; its locks end by their leases.",
                pid,
                task.name,
                request.id,
            )
            return
        done = mark() or done
        if held is not None and is_ours:
            store.release(name, held.token, held.remaining)
        if sent is not None and delay is not None and (alone or done):
            sent.move(sent.lease(delay, request.expires) if retried else 0.0)

    _in_background(free, guarded[1].cache)


def _is_of(lock: HeldLock | None, pid: int, request: Context) -> bool:
    """Return whether a lock is that of a message's run in a process of this machine."""
    if lock is None or lock.holder.task_id != request.id:
        return False
    return lock.holder.host == HOST and lock.holder.pid == pid


def _in_background(free: Callable[[], None], cache: str | conf.Unset) -> None:
    def close() -> None:
        store = locate(cache).store()
        if store.connects_threads:
            store.close()  # one that is kept would be dead by the next time

    in_background(free, close, "A dead run's locks could not be freed and end by their leases.")
