"""
The Celery tasks with which workers run the functions of Django tasks.

Each function has its own Celery task, named by its path. So decorators, locks, records,
options, routes and time limits work as for any Celery task, and operators see its name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import _state, current_app
from celery._state import connect_on_app_finalize
from celery.app.task import Context
from django.tasks import TaskContext, TaskResultStatus
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from .. import conf
from ..delivery.call import own_signature, show_signature
from ..delivery.header import get_header
from ..exceptions import InvalidResult
from ..leases.claim import LONGEST_RESULT
from ..leases.holder import HOST, Holder
from ..sending import SafeTaskMixin
from ..sending.carried_run import find_run
from ..sending.outbox import Outbox
from ..values import NotPlain, encode
from .results import AnyResult, AnyTask, list_workers, make_error, make_result, path_of, set_on

#: The paths of the Django tasks that have a Celery task.
_added: Final[set[str]] = set()
#: The result of each running message, for as long as Celery keeps its request.
_results: Final[WeakKeyDictionary[Context, AnyResult]] = WeakKeyDictionary()


class FunctionTask(SafeTaskMixin):
    """The part of the Celery task's class that all apps share."""

    abstract = True
    #: The Django task, as it was defined.
    django_task: AnyTask

    @staticmethod
    def _name_error(error: BaseException) -> str:
        """Return the path of an error's class, which the task's result has to show."""
        return path_of(error)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Send ``task_finished``: by now the row says that the task is done."""
        super().on_success(retval, task_id, args, kwargs)
        _finish(self, args, kwargs, TaskResultStatus.SUCCESSFUL, _return_value=retval)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Send ``task_finished``: by now the row says that the task failed."""
        super().on_failure(exc, task_id, args, kwargs, einfo)
        # If its process was killed, this is the main process, which has no request of the task.
        if self.request.id == task_id:
            _finish(self, args, kwargs, TaskResultStatus.FAILED, errors=[make_error(exc)])


def add_function(task: AnyTask, outbox: Outbox) -> None:
    """Add a Celery task for a Django task's function to all Celery apps, including future ones."""
    path = task.module_path
    if path in _added:
        return
    run = _make_run(task)

    def make(app: Any) -> None:
        app.task(
            run,
            name=path,
            # With the behaviour of the project's own task class too.
            base=type("FunctionTask", (FunctionTask, app.Task), {"abstract": True}),
            bind=task.takes_context,
            serializer="json",
            outbox=outbox,
            django_task=task,
            shared=False,
            lazy=False,
        )

    _added.add(path)
    connect_on_app_finalize(make)
    active: list[Any] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    for app in active:
        if app.finalized:
            make(app)


def find_task(path: str) -> AnyTask | None:
    """Return the Django task at a path, as it was defined; None: there is none."""
    with suppress(ImportError, ValueError):
        import_module(path.rpartition(".")[0])  # defines the task
    return getattr(current_app.tasks.get(path), "django_task", None)


def _make_run(task: AnyTask) -> Callable[..., Any]:
    function = task.func

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        running = current_app.tasks[task.module_path]
        # With bind=True, used for tasks with a context, the first argument is the Celery task.
        args = args[task.takes_context :]
        result = _start(running, args, kwargs)
        context = (TaskContext(task_result=result),) if task.takes_context else ()
        value = normalize_json(task.call(*context, *args, **kwargs))
        _record_value(running.request, value)
        return value

    show_signature(run, own_signature(function))
    return run


def _start(running: Any, args: Any, kwargs: Any) -> AnyResult:
    """Send ``task_started`` for the running task; return its result."""
    request, now = running.request, timezone.now()
    result = _results[request] = _make_result(running, args, kwargs)
    run = find_run(request.id)
    starts = 1 + (request.retries or 0) if run is None else run.found.starts
    set_on(
        result,
        status=TaskResultStatus.RUNNING,
        started_at=now,
        last_attempted_at=now,
        worker_ids=list_workers(starts, Holder(HOST, os.getpid())),
    )
    task_started.send_robust(type(result.task.get_backend()), task_result=result)
    return result


def _record_value(request: Context, value: Any) -> None:
    """Store the return value of a carried task in its row, if the row is kept."""
    run = find_run(request.id)
    # A finished task has its result in the row already.
    if run is None or run.claim.is_finished or not conf.keeps_sent():
        return
    try:
        run.returned = encode(value, LONGEST_RESULT)
    except NotPlain as error:
        raise InvalidResult(run.claim.key, str(error)) from error


def _finish(running: Any, args: Any, kwargs: Any, status: TaskResultStatus, **values: Any) -> None:
    result = _results.pop(running.request, None)
    if result is None:  # the task was not started
        result = _make_result(running, args, kwargs)
    set_on(result, status=status, finished_at=timezone.now(), **values)
    task_finished.send_robust(type(result.task.get_backend()), task_result=result)


def _make_result(running: Any, args: Any, kwargs: Any) -> AnyResult:
    request = running.request
    header = get_header(request)
    return make_result(running.django_task, request.id or "", header, args=args, kwargs=kwargs)
