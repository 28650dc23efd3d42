"""Options of tasks that do nothing, are misspelt, or contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage

from ..concurrency.guard import find_guarded
from ..concurrency.options import Options
from ..inspection.lock_store import fault
from ..sending import SafeTaskMixin
from ..sending.option_names import find_misspelt
from .project import Project, is_carried

#: The options of a SafeTask.
OPTIONS: Final = ("send_on_commit", "outbox", "max_deaths")


def check_options(project: Project) -> Iterator[CheckMessage]:
    """E005: an option does nothing. W001: it is misspelt. W005: two contradict each other."""
    for task in project.tasks:
        guarded = find_guarded(task)
        lock = guarded.options if guarded else None
        yield from _find_idle(task, lock)
        for name, meant in find_misspelt(task, SafeTaskMixin):
            text = f"Task {task.name} has the option {name!r}, which does nothing."
            yield fault("W001", text, f"Did you mean {meant!r}?")
        if lock and lock.unique_until == "start" and lock.on_conflict == "skip":
            yield fault(
                "W005",
                f'Task {task.name} has unique_until="start" and on_conflict="skip": a message that '
                f"is sent during a run finds the run's lock held when its turn comes, and is "
                f"skipped.",
                'Set on_conflict="retry", or unique_until="end" if one run does it for all.',
            )


def _find_idle(task: Any, lock: Options | None) -> Iterator[CheckMessage]:
    """Yield E005 for options that only a SafeTask, or only a carried task, reads."""
    given = {name: getattr(task, name) for name in OPTIONS if name in vars(type(task))}
    if isinstance(task, SafeTaskMixin):
        if given.get("max_deaths") is not None and not is_carried(task):
            yield fault(
                "E005",
                f"Task {task.name} has max_deaths={task.max_deaths!r}, but it is not carried: "
                f"nothing counts the processes that die in it.",
                'Set outbox="until_done", which sends the task again after a death.',
            )
        return
    if lock is not None and lock.unique_until is not None:
        given["unique_until"] = lock.unique_until
    for name, value in given.items():
        yield fault(
            "E005",
            f"Task {task.name} has {name}={value!r}, but it is not a SafeTask: its sends are "
            f"Celery's own, and the option does nothing.",
            'Write Celery("shop", task_cls="django_celery_safe:SafeTask") for all tasks, or '
            "@shared_task(base=SafeTask) for this one.",
        )
