"""
Differences between the supported versions of Django and Celery.

The functions about Celery can go with Celery 5.6.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any, Final

import celery
from billiard.exceptions import WorkerLostError

#: Celery 5.7 distinguishes more ways in which a task can end than 5.6.
_IS_CELERY_57: Final = celery.VERSION[:2] >= (5, 7)


def is_django_task(value: object) -> bool:
    """Return whether a value is a task of ``django.tasks``, which is new in Django 6.0."""
    # By type: isinstance() would evaluate a lazy task of Celery, and finalize its app.
    return issubclass(type(value), getattr(sys.modules.get("django.tasks"), "Task", ()))


def has_models(layers: Iterable[Any]) -> bool:
    """
    Return whether a task has ``pydantic=True``, by the wrapper that each version of Celery has.

    Args:
        layers: The functions that the task runs, outermost first.
    """
    wrappers = vars(inspect.getmodule(celery.Celery))
    return any(getattr(layer, "__globals__", None) is wrappers for layer in layers)


def dump_models(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """
    Return arguments with plain data in place of pydantic models, as a message has them.

    Celery 5.7 converts models when it sends. Older versions can't send a model, but a task
    that is called directly may receive one.
    """
    if _IS_CELERY_57:
        dump = getattr(task, "_dump_pydantic_arguments", None)
        return (args, kwargs) if dump is None else dump(args, kwargs)
    plain = [_plain(value) for value in args or ()]
    return plain, {name: _plain(value) for name, value in (kwargs or {}).items()}


def _plain(value: Any) -> Any:
    dump = getattr(type(value), "model_dump", None)
    return value if dump is None else dump(value, mode="json")


def retries_after_death(task: Any) -> bool:
    """Return whether Celery re-sends a task whose process died, an option since 5.7."""
    return bool(getattr(task, "retry_on_worker_lost", False))


def acknowledges_timeout(task: Any) -> bool:
    """Return whether the message of a task that was killed at its time limit is acknowledged."""
    return bool(task.acks_on_timeout if _IS_CELERY_57 else task.acks_on_failure_or_timeout)


def as_exception(exc_info: Any, error: BaseException) -> Any:
    """
    Return the form in which a worker's main process reports an error that a child raised.

    billiard 4.3 reports every BaseException, and Celery stores it since 5.7. Before, Celery
    can store only an Exception, and reports the end of the process as a lost worker.
    """
    if _IS_CELERY_57 or isinstance(error, Exception):
        return exc_info
    from billiard.einfo import ExceptionInfo

    try:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise WorkerLostError(f"Worker exited prematurely: {error!r}.")
        raise type(type(error).__name__, (Exception,), {})(*error.args)
    except Exception:  # noqa: BLE001 - it is what Celery gets
        return ExceptionInfo()


def fail_rejected(request: Any, exc_info: Any, error: BaseException) -> None:
    """
    Record the failure of a task that rejected its message for good, as Celery does since 5.7.

    Before, its result, and the chord that it belongs to, would stay open for ever.
    """
    from celery.exceptions import Reject

    if _IS_CELERY_57 or not isinstance(error, Reject) or getattr(error, "requeue", False):
        return
    request.task.backend.mark_as_failure(
        request.id, error, request=request._context, store_result=request.store_errors
    )
    send_task_failure(request, exc_info, error)


def send_task_failure(request: Any, exc_info: Any, error: BaseException) -> None:
    """Send ``task_failure`` for a worker's request, for cases in which Celery does not."""
    from celery import signals

    signals.task_failure.send(
        sender=request.task,
        task_id=request.id,
        exception=error,
        args=request.args,
        kwargs=request.kwargs,
        traceback=exc_info.traceback,
        einfo=exc_info,
    )
