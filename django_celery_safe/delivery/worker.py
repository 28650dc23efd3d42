"""
The main process of a worker: the messages that it has received, and work in background threads.

A killed process reports nothing, and a revoked message reaches no run, but Celery reports both
to the main process. The main process must not wait, so it reacts in a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from celery import signals
from celery.app.task import Context

from ..exceptions import CelerySafeError
from ..texts import get_logger

logger = get_logger(__name__)

#: Name under which the receiver is connected, once in each process.
UID: Final = "django_celery_safe.worker"
#: Longest time to wait until a killed process is gone, s.
LONGEST_DEATH: Final = 10.0
#: Pause between two looks, s.
PAUSE: Final = 0.02

#: Requests that this worker has received, while Celery keeps them. A message that is
#: delivered again makes another one with the same id.
_received: WeakSet[Any] = WeakSet()
_background: ThreadPoolExecutor | None = None


def watch_messages() -> None:
    """Remember every message that comes, while Celery does."""
    signals.task_received.connect(_on_received, dispatch_uid=UID)


def find_received(task_id: str) -> list[Any]:
    """Return Celery's requests of the messages with this id that this worker has."""
    return [request for request in _received if request.id == task_id]


def was_put_back(message: Context) -> bool:
    """
    Return whether a message that Celery reports as terminated never reached a child process.

    The pool gave it to a child that ended before it read it. Revoked meanwhile, it is
    accepted and ended in the main process (``_put_back`` in celery/concurrency/asynpool.py).
    """
    return any(
        request._context is message and request.worker_pid == os.getpid() for request in _received
    )


def is_dead_soon(pid: int) -> bool:
    """Wait for a while until a child process has ended; return whether it has."""
    give_up_at = time.monotonic() + LONGEST_DEATH
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


def in_background(work: Callable[[], None], close: Callable[[], None], failure: str) -> None:
    """
    Run ``work`` in a thread: the worker's main loop must not wait for a store or a death.

    Args:
        close: Closes what ``work`` opened.
        failure: The log message for a ``work`` that failed.
    """
    global _background
    if _background is None:
        _background = ThreadPoolExecutor(4, thread_name_prefix="django_celery_safe worker")
    _background.submit(_do_safely, work, close, failure)


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


def _forget_parent() -> None:
    global _background
    _background = None
    _received.clear()


os.register_at_fork(after_in_child=_forget_parent)
