"""
Limiting how many processes may die in a task before the task is not run again.

Carried messages and steps count these deaths in their rows.
"""

from __future__ import annotations

from typing import Any, Final

from celery.exceptions import WorkerShutdown, WorkerTerminate

from .. import conf
from ..exceptions import TaskPoisoned
from ..leases.holder import HeldLock, decode_holder

#: Exit codes of billiard's children after a signal. A task may call ``sys.exit(-1)`` itself.
SIGNALLED: Final = range(-255, -191)


def most_deaths(task: Any) -> int | None:
    """Return how many processes may die in a task before it is not run again; None: any number."""
    given: int | conf.Unset | None = getattr(task, "max_deaths", conf.UNSET)
    most: int | None = conf.get("MAX_DEATHS") if isinstance(given, conf.Unset) else given
    return most


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
        process = str(last._replace(task_id=None))
        raise TaskPoisoned(f"{task.name}[{task_id}]", deaths, process)
