"""
Frees the locks of runs that can't free them themselves, and of messages that never run.

A killed process frees nothing, and a revoked or unknown message never runs. But Celery
reports most of these cases to the worker's main process, which frees the locks of the
message and its run once the process of the run has really ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import states
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from ..delivery.copies import MessageGoesOn, mark_end
from ..delivery.header import Header, find_ours, read_header
from ..delivery.worker import (
    connect_receivers,
    find_received,
    in_background,
    is_dead_soon,
    returns_after_time_limit,
    was_put_back,
    watch_messages,
)
from ..leases.holder import HOST, place_names
from ..locks import HeldLock
from ..locks.stores import get_store, locate
from ..locks.stores.base import Store
from ..texts import get_logger
from .guard import Guarded, find_guarded_as_asked, get_lock_name
from .options import Options
from .sent import find_lock_of, find_sent

logger = get_logger(__name__)


def connect() -> None:
    """Connect Celery's signals for messages that never reach our wrapper and for killed runs."""
    connect_receivers(
        __name__,
        failure=_on_failure,
        retry=_on_retry,
        revoked=_on_revoked,
        unknown=_on_refused,
        rejected=_on_refused,
    )


def watch(*, runs: bool = False) -> None:
    """
    Watch every message that this worker receives; called when a task may hold a lock.

    Args:
        runs: Also watch the end of every run, because a message may hold a lock that
            code outside the run's guard could leave behind.
    """
    watch_messages()
    if runs:
        connect_receivers(__name__, postrun=_on_postrun)


def _on_postrun(task: Any, state: str | None, retval: Any = None, **kwargs: Any) -> None:
    """Free the lock of a message whose run ended outside its guard, for example in a hook."""
    request = task.request
    ours = find_ours(request)
    if not isinstance(ours, Mapping) or "sent" not in ours:  # most runs; cheaper than to read it
        return
    if state is None or state == states.RETRY or request.is_eager:
        return
    if isinstance(retval, MessageGoesOn):
        return
    sent = find_sent(request)
    if sent is not None and not sent.settled and sent.passed_on is None:
        sent.move(0)


def _on_failure(sender: Any, task_id: str, exception: BaseException, **kwargs: Any) -> None:
    """Free the locks of a killed run, which Celery reports only to the main process."""
    if not isinstance(exception, WorkerLostError | TimeLimitExceeded):
        return
    comes_again = isinstance(exception, TimeLimitExceeded) and returns_after_time_limit(sender)
    _free_killed(sender, task_id, None if comes_again else 0.0)


def _on_retry(sender: Any, request: Context, reason: Any = None, **kwargs: Any) -> None:
    """Free the lock of a killed run that the main process re-sends or cancels."""
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
        # The message may have been delivered twice and refused the second time, while the
        # first delivery still runs.
        store = get_store()
        if _find_run(store, sender, request, guarded) is None:
            sent.move(0)

    _in_background(free)


def _on_refused(message: Any, **kwargs: Any) -> None:
    """Free the lock of a message that no task of this worker can handle."""
    headers = getattr(message, "headers", None) or {}
    task = headers.get("task")
    if (sent := find_lock_of(task, read_header(headers, task))) is not None:
        _in_background(lambda: sent.move(0))


def _free_killed(task: Any, task_id: str, delay: float | None, *, retried: bool = False) -> None:
    """
    Free the locks of a run whose process was killed.

    Args:
        delay: None: the broker redelivers the message, so the message keeps its own lock.
            With ``retried``: when the message runs again, seconds or a time. Otherwise 0.
        retried: Whether the run's message is re-sent.
    """
    same = find_received(task_id)
    for request in same:
        pid = request.worker_pid
        if pid is not None and pid != os.getpid():
            # If the message was delivered twice, the other delivery keeps its lock.
            alone = len(same) == 1
            _free_after_death(task, request._context, pid, delay, retried, alone)


def _free_after_death(
    task: Any, request: Context, pid: int, delay: float | None, retried: bool, alone: bool
) -> None:
    guarded = find_guarded_as_asked(task, request)
    if guarded is None:
        return
    store = get_store()
    sent = find_sent(request)
    ended = delay is not None and not retried

    def free() -> None:
        held = _find_run(store, task, request, guarded)
        is_ours = held is not None and _is_of(held, pid, request)
        if not is_ours and sent is None:
            return

        # As a run does at its own end; first, because its lease may expire right after its death.
        done = False
        if held is not None and is_ours and ended and task.acks_late:
            done = mark_end(task, request, store, time.time() - held.holder.since)
        if not is_dead_soon(pid):
            logger.info(
                "Process %d of task %s[%s] does not end; its locks end by their leases.",
                pid,
                task.name,
                request.id,
            )
            return
        if held is not None and is_ours:
            store.release(held.name, held.token, held.remaining)
        if sent is not None and delay is not None and (alone or done):
            sent.move(sent.lease(delay, request.expires) if retried else 0.0)

    _in_background(free)


def _find_run(
    store: Store, task: Any, request: Context, guarded: tuple[Guarded, Options, Header]
) -> HeldLock | None:
    """Return the lock that a run of this message holds; None: no run holds it."""
    name = get_lock_name(task, request, *guarded)
    for place in place_names(name, guarded[1].limit):
        held = store.peek(place)
        if held is not None and held.holder.task_id == request.id:
            return held._replace(name=place)
    return None


def _is_of(lock: HeldLock | None, pid: int, request: Context) -> bool:
    """Return whether a lock belongs to a message's run in process ``pid`` on this machine."""
    if lock is None or lock.holder.task_id != request.id:
        return False
    return lock.holder.host == HOST and lock.holder.pid == pid


def _in_background(free: Callable[[], None]) -> None:
    in_background(
        free, locate().close, "A dead run's locks could not be freed and end by their leases."
    )
