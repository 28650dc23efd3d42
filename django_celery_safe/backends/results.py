"""
The ``TaskResult`` of a Django task, made from its message or its outbox row.

Our header in a message records the settings with which its task was enqueued. The row of a task
that is carried until done has the rest, from the commit of ``enqueue`` until its deletion.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from traceback import format_exception
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

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
from ..delivery.header import declare_field, is_text, read_header
from ..leases.holder import HOST, HeldLock, decode_holder
from ..values import decode

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    AnyTask: TypeAlias = Task[..., Any]
    AnyResult: TypeAlias = TaskResult[..., Any]
else:  # Django's classes can't be subscripted
    AnyTask, AnyResult = Task, TaskResult

#: The field of our header that records how a task was enqueued; see :func:`describe`.
FIELD: Final = "django_task"
#: The id of an earlier worker of a task, which the row no longer has.
UNKNOWN: Final = "unknown"
#: The modules of the errors that a worker's main process or a relay records by name.
ERRORS: Final = (builtins, celery_exceptions, exceptions)

_STATUS: Final = {
    "pending": TaskResultStatus.READY,
    "sent": TaskResultStatus.READY,
    "running": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "failed": TaskResultStatus.FAILED,
    "dead": TaskResultStatus.FAILED,
}


def _is_description(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(is_text(value.get(name)) for name in ("backend", "queue_name", "enqueued_at"))
        and type(value.get("priority")) is int
        and isinstance(value.get("run_after"), str | None)
    )


declare_field(FIELD, _is_description, is_given=True)


def describe(task: AnyTask, enqueued_at: datetime) -> dict[str, Any]:
    """Return the settings with which a task is enqueued, for our header."""
    return {
        "backend": task.backend,
        "queue_name": task.queue_name,
        "priority": task.priority,
        "run_after": None if task.run_after is None else task.run_after.isoformat(),
        "enqueued_at": enqueued_at.isoformat(),
    }


def make_result(
    task: Task[P, R], task_id: str, header: Mapping[str, Any] = MappingProxyType({}), **values: Any
) -> TaskResult[P, R]:
    """
    Return the result of a task in the state READY; ``values`` replace its default attributes.

    Args:
        task: The task as it was defined, or as it is enqueued now.
        header: Our header in its message. Without FIELD, it was sent as a Celery task.
    """
    if (described := header.get(FIELD)) is not None:
        task = _as_enqueued(task, described)
        values.setdefault("enqueued_at", _moment(described["enqueued_at"]))
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

    Args:
        task: The task as it was defined.

    Raises:
        ContentDisallowed: It was not sent with ``enqueue``, and its arguments are not JSON.
    """
    properties = loads(row.properties)
    args, kwargs, *_ = loads_body(
        bytes(row.body),
        properties["content_type"],
        properties["content_encoding"],
        accept=["application/json"],
    )
    status = _STATUS[row.state]
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
        finished_at=_moment_of(row, row.ended_at or row.dead_at),
        errors=[_read_error(row)] if status == TaskResultStatus.FAILED else [],
        worker_ids=_read_worker_ids(row),
    )
    if status == TaskResultStatus.SUCCESSFUL:
        set_on(result, _return_value=decode(row.result))
    return result


def list_workers(starts: int, *last: str) -> list[str]:
    """Return a worker's id for each start of a task; only the last ones are known."""
    known = last[-starts:] if starts else ()
    return [UNKNOWN] * (starts - len(known)) + list(known)


def name_worker(host: str = HOST, pid: int | None = None) -> str:
    """Return the id of a process that runs tasks; by default, of this process."""
    return f"{host}:{os.getpid() if pid is None else pid}"


def path_of(error: BaseException) -> str:
    """Return the module and name of an error's class."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def make_error(error: BaseException) -> TaskError:
    """Return an error in the form that results contain."""
    return TaskError(
        exception_class_path=path_of(error),
        traceback="".join(format_exception(error)),
    )


def _as_enqueued(task: Task[P, R], described: Mapping[str, Any]) -> Task[P, R]:
    try:
        return replace(
            task,
            backend=described["backend"],
            queue_name=described["queue_name"],
            priority=described["priority"],
            run_after=_moment(described["run_after"]),
        )
    except (InvalidTask, InvalidTaskBackend):
        return task  # the settings have changed since


def _moment(text: str | None) -> datetime | None:
    return None if text is None else parse_datetime(text)


def _moment_of(row: Any, moment: datetime | None) -> datetime | None:
    """Return a row's time as Django's own backends would: local and naive without ``USE_TZ``."""
    if moment is None:
        return None
    moment = read_moment(row._state.db, moment)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def _read_worker_ids(row: Any) -> list[str]:
    # The process that died last stays the holder until the task is started again.
    texts = dict.fromkeys(filter(None, (row.last_death, row.holder)))
    holders = [decode_holder(text, HeldLock("")).holder for text in texts]
    return list_workers(row.starts, *(name_worker(one.host, one.pid) for one in holders))


def _read_error(row: Any) -> TaskError:
    """Return the error of a task that failed, or whose message could not be sent."""
    # Anyone may have written the error's text, and Django imports the class that this names.
    path = row.error_type or exceptions.SendError.__name__
    if "." not in path:
        home = next((one for one in ERRORS if hasattr(one, path)), None)
        path = f"{home.__name__}.{path}" if home else "builtins.Exception"
    return TaskError(exception_class_path=path, traceback=row.traceback or f"{path}: {row.error}")
