"""
The ``TaskResult`` of a Django task, made from its message or its outbox row.

Our header in a message records the settings with which its task was enqueued. The row of a task
that is carried until done has the rest, from the commit of ``enqueue`` until its deletion.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from traceback import format_exception
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from celery import exceptions as celery_exceptions
from django.conf import settings
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.base import TaskError
from django.tasks.exceptions import InvalidTask, InvalidTaskBackend
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from kombu.serialization import loads as loads_body
from kombu.utils.json import loads

from .. import exceptions
from ..databases import read_moment
from ..delivery.header import read_header
from ..leases.holder import HeldLock, Holder, decode_holder
from ..values import decode

# As texts, because Django's classes can't be subscripted.
AnyTask: TypeAlias = "Task[..., Any]"
AnyResult: TypeAlias = "TaskResult[..., Any]"

#: The field of our header that records how a task was enqueued; see :func:`describe`.
FIELD: Final = "django_task"
#: The id of an earlier worker of a task, which the row no longer has.
UNKNOWN: Final = "unknown"
#: The modules of the errors that a worker's main process or a relay records by name.
ERRORS: Final = (builtins, celery_exceptions, exceptions)

#: The statuses of a row's states; in any other state a task is ready.
_STATUS: Final = {
    "running": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "failed": TaskResultStatus.FAILED,
    "dead": TaskResultStatus.FAILED,
}


def describe(task: AnyTask) -> dict[str, str]:
    """Return how a task is enqueued now, for our header."""
    return {
        "backend": task.backend,
        "queue_name": task.queue_name,
        "run_after": "" if task.run_after is None else task.run_after.isoformat(),
        "enqueued_at": timezone.now().isoformat(),
    }


def make_result(
    task: AnyTask, task_id: str, header: Mapping[str, Any] = MappingProxyType({}), **values: Any
) -> AnyResult:
    """
    Return the result of a task in the state READY; ``values`` replace its default attributes.

    Args:
        task: The task as it was defined, or as it is enqueued now.
        header: Our header in its message. Without FIELD, it was sent as a Celery task.
    """
    if (described := header.get(FIELD)) is not None:
        task = _as_enqueued(task, described)
        values.setdefault("enqueued_at", parse_datetime(described["enqueued_at"]))
    usual: dict[str, Any] = {
        **dict.fromkeys(("enqueued_at", "started_at", "last_attempted_at", "finished_at")),
        "status": TaskResultStatus.READY,
        "errors": [],
        "worker_ids": [],
    }
    return TaskResult(task=task, id=task_id, backend=task.backend, **{**usual, **values})


def set_on(result: AnyResult, **values: Any) -> None:
    """Set attributes of a result, which only its backend may change (it is frozen)."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def read_row(task: AnyTask, row: Any) -> AnyResult:
    """
    Return the result of a carried task from its row.

    Raises:
        ContentDisallowed: It was not sent with ``enqueue``, and its arguments are not JSON.
    """
    properties = loads(row.properties)
    content = properties["content_type"], properties["content_encoding"]
    args, kwargs, *_ = loads_body(bytes(row.body), *content, accept=["application/json"])
    status = _STATUS.get(row.state, TaskResultStatus.READY)
    result = make_result(
        task,
        row.task_id,
        read_header(properties["options"]["headers"], row.task),
        status=status,
        args=args,
        kwargs=kwargs,
        enqueued_at=_moment_of(row, row.created_at),
        started_at=_moment_of(row, row.started_at),
        last_attempted_at=_moment_of(row, row.started_at),
        finished_at=_moment_of(row, row.ended_at),
        errors=[_read_error(row)] if status == TaskResultStatus.FAILED else [],
        worker_ids=list_workers(row.starts, decode_holder(row.holder, HeldLock("")).holder),
    )
    set_on(result, _return_value=decode(row.result))
    return result


def list_workers(starts: int, last: Holder) -> list[str]:
    """Return a worker's id for each start of a task, of which at most the last one is known."""
    known = [f"{last.host}:{last.pid}"] if last.host else []
    return [UNKNOWN] * (starts - len(known)) + known


def path_of(error: BaseException) -> str:
    """Return the module and name of an error's class."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def make_error(error: BaseException) -> TaskError:
    """Return an error in the form that results contain."""
    trace = "".join(format_exception(error))
    return TaskError(exception_class_path=path_of(error), traceback=trace)


def _as_enqueued(task: AnyTask, described: Mapping[str, str]) -> AnyTask:
    backend, queue = described["backend"], described["queue_name"]
    due = parse_datetime(described["run_after"])
    try:
        return replace(task, backend=backend, queue_name=queue, run_after=due)
    except (InvalidTask, InvalidTaskBackend):
        return task  # the settings have changed since


def _moment_of(row: Any, moment: datetime | None) -> datetime | None:
    """Return a row's time as Django's own backends would: local and naive without ``USE_TZ``."""
    if moment is None:
        return None
    moment = read_moment(row._state.db, moment)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def _read_error(row: Any) -> TaskError:
    """Return the error of a task that failed, or whose message could not be sent."""
    path = row.error_type or "CelerySafeError"
    if "." not in path:
        home = next((module for module in ERRORS if hasattr(module, path)), None)
        path = f"{home.__name__}.{path}" if home else "builtins.Exception"
    return TaskError(exception_class_path=path, traceback=row.traceback or f"{path}: {row.error}")
