"""Work of a worker's main process in background threads, because that process must not wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final

from ..exceptions import CelerySafeError
from ..texts import get_logger

logger = get_logger(__name__)

#: Longest wait until a killed process has ended, s.
LONGEST_DEATH: Final = 10.0
#: Longest wait for the background threads before a fork, s.
LONGEST_FORK: Final = 2.0
#: Pause between two checks of a process, s.
PAUSE: Final = 0.02

_background: ThreadPoolExecutor | None = None
#: Work that the threads have not finished yet.
_unfinished: set[Future[None]] = set()


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
    work: Callable[[], object], close: Callable[[], None], failure: str
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


def _do_safely(work: Callable[[], object], close: Callable[[], None], failure: str) -> None:
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


os.register_at_fork(before=_let_threads_end, after_in_child=_forget_parent)
