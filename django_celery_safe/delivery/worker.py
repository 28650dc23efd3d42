"""
The main process of a worker: the messages that it has received, and work in background threads.

A killed process reports nothing, and a revoked message reaches no run, but Celery reports both
to the main process. The main process must not wait, so it reacts in a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from celery import signals
from celery.app.task import Context

from ..compat import acknowledges_timeout
from ..exceptions import CelerySafeError
from ..leases.holder import HOST, HeldLock, decode_holder
from ..texts import get_logger

logger = get_logger(__name__)

#: Longest wait until a killed process has ended, s.
LONGEST_DEATH: Final = 10.0
#: Longest wait for the background threads before a fork, s.
LONGEST_FORK: Final = 2.0
#: Pause between two checks of a process, s.
PAUSE: Final = 0.02

#: Requests that this worker has received, for as long as Celery keeps them. A redelivered
#: message has another request with the same id.
_received: WeakSet[Any] = WeakSet()
_background: ThreadPoolExecutor | None = None
#: Work that the threads have not finished yet.
_unfinished: set[Future[None]] = set()


def connect_receivers(module: str, **receivers: Callable[..., Any]) -> None:
    """
    Connect receivers to Celery's ``task_<name>`` signals, once in each process.

    Args:
        module: The name of the receivers' module, which identifies them when they connect again.
    """
    for name, receiver in receivers.items():
        getattr(signals, f"task_{name}").connect(receiver, dispatch_uid=module)


def watch_messages() -> None:
    """Start to record the messages that this worker receives, for as long as Celery has them."""
    connect_receivers(__name__, received=_on_received)


def find_received(task_id: str) -> list[Any]:
    """Return Celery's requests of the messages with this id that this worker has."""
    return [request for request in _received if request.id == task_id]


def held_by_run(task_id: str) -> Callable[[Any], bool]:
    """
    Return a function that tells whether a row is held by a run of this worker.

    The function takes a row with ``holder``. If the worker did not watch this message, any
    process of this machine counts as the worker's.
    """
    pids = {request.worker_pid for request in find_received(task_id)}

    def is_held(row: Any) -> bool:
        holder = decode_holder(row.holder, HeldLock("")).holder
        return holder.host == HOST and (not pids or holder.pid in pids)

    return is_held


def was_put_back(message: Context) -> bool:
    """
    Return whether a message that Celery reports as terminated never reached a child process.

    The pool gave the message to a child that ended before reading it. If it is then revoked,
    the main process accepts and ends it (``_put_back`` in celery/concurrency/asynpool.py).
    """
    return any(
        request._context is message and request.worker_pid == os.getpid() for request in _received
    )


def returns_after_time_limit(task: Any) -> bool:
    """Return whether the broker redelivers a message whose run was killed at its hard limit."""
    return bool(task.acks_late and not acknowledges_timeout(task))


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


def in_background(
    work: Callable[[], None], close: Callable[[], None], failure: str
) -> Future[None]:
    """
    Run ``work`` in a thread: the worker's main loop must not wait long for a store or a death.

    Args:
        close: Closes the connections that ``work`` opened.
        failure: The log message if ``work`` fails.

    Returns:
        A future that is done when ``work`` has ended, whether it failed or not.
    """
    global _background
    if _background is None:
        _background = ThreadPoolExecutor(4, thread_name_prefix="django_celery_safe worker")
    future = _background.submit(_do_safely, work, close, failure)
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


def _on_received(request: Any, **kwargs: Any) -> None:
    _received.add(request)


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
