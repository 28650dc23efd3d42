"""
The Celery tasks with which workers run the functions of Django tasks.

Each function has its own Celery task, named by its path. So decorators, locks, records,
options, routes and time limits work as for any Celery task, and operators see its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from celery import _state, current_app
from celery._state import connect_on_app_finalize, get_current_task
from celery.app.task import Context
from celery.app.trace import build_tracer
from django.tasks import Task, TaskContext, TaskResultStatus, task_backends
from django.tasks.exceptions import InvalidTaskBackend
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from .. import conf
from ..delivery.call import own_signature, show_signature
from ..delivery.header import get_header
from ..delivery.worker import find_received
from ..exceptions import MessageLost, ResultNotStored
from ..leases.claim import LONGEST_RESULT
from ..sending import SafeTaskMixin
from ..sending.carried import find_run
from ..values import NotPlain, encode
from .results import (
    AnyResult,
    AnyTask,
    list_workers,
    make_error,
    make_result,
    name_worker,
    path_of,
    set_on,
)


class _Known(NamedTuple):
    """A Django task, maybe changed by ``using()``, and the maker of an app's Celery task."""

    task: AnyTask
    make: Callable[[Any], Any]


#: The Django tasks that have a Celery task, by path.
_known: Final[dict[str, _Known]] = {}
#: The result of each running message, for as long as Celery keeps its request.
_results: Final[WeakKeyDictionary[Context, AnyResult]] = WeakKeyDictionary()


class FunctionTask(SafeTaskMixin):
    """The part of the Celery task's class that all apps share."""

    abstract = True

    @staticmethod
    def _name_error(error: BaseException) -> str:
        """Return the path of an error's class, which the task's result has to show."""
        return path_of(error)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Send ``task_finished``: by now the row says that the task is done."""
        super().on_success(retval, task_id, args, kwargs)
        _finish(self, task_id, args, kwargs, TaskResultStatus.SUCCESSFUL, _return_value=retval)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Send ``task_finished``, unless another run has claimed the task by now."""
        super().on_failure(exc, task_id, args, kwargs, einfo)
        if not isinstance(exc, MessageLost):
            errors = [make_error(exc)]
            _finish(self, task_id, args, kwargs, TaskResultStatus.FAILED, errors=errors)


def add_function(task: AnyTask, **options: Any) -> None:
    """
    Add a Celery task for a Django task's function to all Celery apps, including future ones.

    Args:
        options: Options of the Celery task.
    """
    path = task.module_path
    if path in _known:
        return
    run = _make_run(task)

    def make(app: Any) -> Any:
        made = app.task(
            run,
            name=path,
            base=_base_of(app),
            bind=task.takes_context,
            serializer="json",
            shared=False,
            lazy=False,
            **options,
        )
        if app.use_fast_trace_task and made.__trace__ is None:
            # The worker made the tracers of its other tasks when it started.
            made.__trace__ = build_tracer(path, made, app.loader, app=app)
        return made

    _known[path] = _Known(task, make)
    connect_on_app_finalize(make)
    active: list[Any] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    for app in active:
        if app.finalized:
            make(app)


def get_celery_task(app: Any, path: str) -> Any:
    """Return an app's Celery task for a Django task that was added."""
    found = app.tasks.get(path)  # app.tasks finalizes the app
    return _known[path].make(app) if found is None else found


def find_task(path: str) -> AnyTask | None:
    """Return the Django task at a path, as it was defined; None: there is none."""
    try:
        found = import_string(path)
    except ImportError:
        found = None
    if isinstance(found, Task):
        return found
    # The task's function may have another name than the task's variable.
    return _known[path].task if path in _known else None


def _base_of(app: Any) -> type[FunctionTask]:
    """Return a base class that also has the behaviour of the project's own task class."""
    return type("FunctionTask", (FunctionTask, app.Task), {"abstract": True})


def _make_run(task: AnyTask) -> Callable[..., Any]:
    function = task.func

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        running: Any = get_current_task()
        if running is None or running.name != task.module_path:
            running = get_celery_task(current_app, task.module_path)  # .run() was called directly
        # With bind=True, used for tasks with a context, the first argument is the Celery task.
        args = args[task.takes_context :]
        result = _start(running, args, kwargs)
        context = (TaskContext(task_result=result),) if task.takes_context else ()
        value = normalize_json(task.call(*context, *args, **kwargs))
        _keep(running, value)
        return value

    show_signature(run, own_signature(function))
    return run


def _start(running: Any, args: Any, kwargs: Any) -> AnyResult:
    """Send ``task_started`` for the running task; return its result."""
    request = running.request
    now = timezone.now()
    result = _results[request] = _make_result(request, running.name, args, kwargs)
    run = find_run(request.id)
    starts = 1 + (request.retries or 0) if run is None else run.found.starts
    set_on(
        result,
        status=TaskResultStatus.RUNNING,
        started_at=now,
        last_attempted_at=now,
        worker_ids=list_workers(starts, name_worker()),
    )
    task_started.send_robust(_sender(result), task_result=result)
    return result


def _keep(running: Any, value: Any) -> None:
    """Store the return value of a carried task in its row, if the row is kept."""
    run = find_run(running.request.id)
    if run is None or not conf.keeps_sent():
        return
    try:
        run.returned = encode(value, LONGEST_RESULT)
    except NotPlain as error:
        raise ResultNotStored(run.claim.key, str(error)) from error


def _finish(
    running: Any, task_id: str, args: Any, kwargs: Any, status: TaskResultStatus, **values: Any
) -> None:
    request = running.request
    result = _results.pop(request, None)
    if result is None:
        # The task was not started, or its process was killed and this is the main process.
        received = (one._context for one in find_received(task_id))
        about = request if request.id == task_id else next(received, request)
        result = _make_result(about, running.name, args, kwargs, task_id)
    set_on(result, status=status, finished_at=timezone.now(), **values)
    task_finished.send_robust(_sender(result), task_result=result)


def _make_result(
    request: Any, path: str, args: Any, kwargs: Any, task_id: str | None = None
) -> AnyResult:
    task, header = find_task(path) or _known[path].task, get_header(request)
    return make_result(task, task_id or request.id or "", header, args=args, kwargs=kwargs)


def _sender(result: AnyResult) -> type:
    """Return the class of a result's backend, which sends the signals."""
    try:
        return type(task_backends[result.backend])
    except InvalidTaskBackend:
        return FunctionTask  # the settings have changed since
