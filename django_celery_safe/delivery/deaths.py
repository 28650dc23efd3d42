"""
Limiting how many processes may die in a task before the task is not run again.

Carried messages and steps count these deaths in their rows. This module counts the deaths in
other tasks, whose message the broker redelivers, in the lock store. Each death is a marker,
``<task>:death:<id>:<number>``, so one read shows whether the limit is reached.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import wait
from typing import Any, Final

from celery.app.task import Context
from celery.exceptions import WorkerShutdown, WorkerTerminate

from .. import conf
from ..events import TASK_POISONED
from ..exceptions import CelerySafeError, TaskPoisoned
from ..foreign_errors import describe_error
from ..leases.holder import HOST, HeldLock, Holder, decode_holder
from ..locks.stores import locate
from ..locks.stores.base import Acquired
from ..texts import get_logger
from .header import Header, get_header
from .worker import in_background

logger = get_logger(__name__)

#: How long a death counts, s: a task may take many hours, and its message is redelivered after
#: each death.
LASTS: Final = 7 * 24 * 3600.0
#: How long the main process of a worker waits until a death is counted, s. Only then does it
#: put the message back.
LONGEST_COUNT: Final = 1.0

#: Exit codes of billiard's children after a signal. A task may call ``sys.exit(-1)`` itself.
SIGNALLED: Final = range(-255, -191)

FAILURE: Final = "The death of a process could not be counted; its task may run once more."


def most_deaths(task: Any) -> int | None:
    """Return how many processes may die in a task before it is not run again; None: any number."""
    given: int | conf.Unset | None = getattr(task, "max_deaths", conf.UNSET)
    if isinstance(given, conf.Unset):
        return conf.max_deaths(conf.get("MAX_DEATHS"), "MAX_DEATHS")
    return given


def ends_process(error: BaseException) -> bool:
    """Return whether an error ends the process because the task itself raised it."""
    match error:
        case WorkerShutdown() | WorkerTerminate():
            return False
        case SystemExit(code=code):
            return code not in SIGNALLED
    return isinstance(error, KeyboardInterrupt)


def refuse_after_deaths(task: Any, task_id: str | None, deaths: int, last_death: str) -> None:
    """
    Refuse to run a task whose deaths are counted in a row.

    Args:
        last_death: The process that died last, as JSON like the row's ``holder``.

    Raises:
        TaskPoisoned: So many processes died in the task that it is not run again.
    """
    limit = most_deaths(task)
    if limit is not None and deaths >= limit:
        last = decode_holder(last_death, HeldLock("")).holder
        raise _poisoned(task, task_id, deaths, last)


def refuse_redelivered(task: Any, request: Context) -> None:
    """
    Refuse to run a message that was redelivered, if its deaths are counted in the lock store.

    If the store does not answer, the task runs.

    Raises:
        TaskPoisoned: So many processes died in the task that it is not run again.
    """
    if not _is_counted(task, get_header(request)):
        return
    try:
        limit = most_deaths(task)
        if limit is None:
            return
        death = locate().store().peek(_marker(task, request.id, limit))
    except CelerySafeError as error:
        logger.warning(
            "How many processes died in %s[%s] can't be asked, so it runs: %s",
            task.name,
            request.id,
            describe_error(error),
        )
        return
    if death is not None:
        poisoned = _poisoned(task, request.id, limit, death.holder)
        text = describe_error(poisoned)
        TASK_POISONED.emit(refuse_redelivered, task=task.name, task_id=request.id, error=text)
        raise poisoned


def record_death(task: Any, request: Context, pid: Any) -> None:
    """
    Count a process death in a task, in a worker's main process, before it puts the message back.

    If the store takes longer than a second, the task may run once more.
    """
    if not _is_counted(task, get_header(request)):
        return
    died = Holder(HOST, pid or 0, time.time(), task=task.name, task_id=request.id)

    def count() -> None:
        limit = most_deaths(task)
        if limit is None:
            return
        store, token = locate().store(), os.urandom(16).hex()
        lasts = store.nearest_lease(LASTS)
        for number in range(1, limit + 1):
            name = _marker(task, request.id, number)
            if isinstance(store.acquire(name, token, lasts, died), Acquired):
                return

    wait([in_background(count, locate().close, FAILURE)], LONGEST_COUNT)


def _is_counted(task: Any, header: Header) -> bool:
    """Return whether the broker redelivers a task whose process died, and no row counts deaths."""
    by_row = "attempt" in header or "step" in header
    return bool(task.acks_late and task.reject_on_worker_lost) and not by_row


def _marker(task: Any, task_id: str | None, number: int) -> str:
    return f"{task.name}:death:{task_id}:{number}"


def _poisoned(task: Any, task_id: str | None, deaths: int, last: Holder) -> TaskPoisoned:
    process = str(last._replace(task_id=None))
    return TaskPoisoned(f"{task.name}[{task_id}]", deaths, process)
