"""The ordered wrappers around a run of a task; each message names the wrappers it needs."""

from __future__ import annotations

import functools
from typing import Any, Final

from django.utils.module_loading import import_string

from .call import Function, find_request
from .header import get_header

#: The wrappers, the outermost first, each after the header field with which a message requests it:
#: called with a task, its request, the function to run, and its arguments; may run it or not.
#: As texts, because this room knows nothing of higher ones.
WRAPPERS: Final = (
    ("attempt", "sending.carried.run_carried"),
    ("options", "concurrency.guard.run_as_asked"),
    ("step", "stages.step_tasks.run_plain"),
)
_FIELDS: Final = {field for field, _ in WRAPPERS}
_wrapper: Final = functools.cache(lambda path: import_string(f"django_celery_safe.{path}"))


def wrap_run(task: Any) -> Function:
    """Return the task's ``run`` with the wrappers that the header of each message requests."""
    run = task.run

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        header, inner = get_header(task.request), run
        asks = header and not _FIELDS.isdisjoint(header)
        if not asks or (request := find_request(task, run)) is None:
            return run(*args, **kwargs)
        for field, path in reversed(WRAPPERS):
            if field in header:
                inner = functools.partial(_wrapper(path), task, request, inner)
        return inner(*args, **kwargs)

    return wrapped
