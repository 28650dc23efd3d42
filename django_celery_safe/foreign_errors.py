"""Errors of other packages: their texts, and the soft time limit that they may hide."""

from __future__ import annotations

import sys

from celery.exceptions import SoftTimeLimitExceeded, WorkerTerminate


def describe_error(error: BaseException) -> str:
    """Say an error of someone else's library in one line."""
    return f"{type(error).__name__}: {text_of(error) or 'no message'}"


def text_of(error: BaseException) -> str:
    """Return what an error says of itself; "" if that fails."""
    try:
        return str(error).strip()
    except Exception:  # noqa: BLE001 - it is someone else's
        return ""


def find_soft_time_limit(
    error: BaseException | None, outer: BaseException | None = None
) -> SoftTimeLimitExceeded | None:
    """
    Return the soft time limit that an error is, or that it took the place of; None: no such.

    Args:
        outer: The error that was being handled before, whose soft time limit is not a new one.
    """
    while error is not None and not isinstance(error, SoftTimeLimitExceeded):
        # Leaving Django's atomic(), it ends in an error of the connection that it cut off.
        error = error.__context__
    return None if outer is not None and error is find_soft_time_limit(outer) else error


def find_shutdown(error: BaseException) -> WorkerTerminate | None:
    """
    Return the end of the worker that an error inside a task stands for; None: no end.

    At SIGQUIT a worker kills the processes of its tasks. With ``-P solo`` that is its own process,
    and Celery raises NotImplementedError out of the signal, in the middle of the task.
    """
    state = sys.modules.get("celery.worker.state")  # a process that is no worker has not loaded it
    code = getattr(state, "should_terminate", None)
    if code is None or not isinstance(error, NotImplementedError):
        return None
    return WorkerTerminate(code)
