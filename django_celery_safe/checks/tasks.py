"""Faults of tasks: options and settings that contradict a task's class or its lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage

from ..concurrency.guard import find_guarded, find_hidden
from ..concurrency.options import Options
from ..exceptions import ConfigurationError
from ..inspection.findings import fault
from ..sending import SafeTask, SafeTaskMixin
from ..sending.option_names import find_misspelt
from .project import Project, lengthen_visibility, seconds_of

#: The options of a SafeTask.
OPTIONS: Final = ("send_on_commit", "outbox", "max_deaths")
#: The remedy for a task that is not a SafeTask.
BE_SAFE: Final = (
    'Write Celery("shop", task_cls="django_celery_safe:SafeTask") for all tasks, or '
    "@shared_task(base=SafeTask) for this one."
)


def find_task_faults(project: Project) -> Iterator[CheckMessage]:
    """E005, W008 to W013, W024, W025: faults of the tasks of the current Celery app."""
    for task in project.tasks:
        yield from _find_option_faults(task)
        if guarded := find_guarded(task):
            yield from _find_send_faults(project, task, guarded.options)
            yield from _find_run_faults(project, task, guarded.options)
        elif hidden := find_hidden(task):
            yield fault(
                "W024",
                f"Task {task.name} can't see {hidden.__name__}'s @single_instance: a decorator "
                f"between them lacks functools.wraps. A run takes the lock, but its message is "
                f"never sent again, and unique_until does nothing.",
                "Write @functools.wraps(function) above the inner function of that decorator, or "
                "put it below @single_instance.",
            )
    yield from _find_bypassed(project)


def _find_option_faults(task: Any) -> Iterator[CheckMessage]:
    """E005: SafeTask options on a task that is not a SafeTask. W025: misspelt options."""
    without = not isinstance(task, SafeTaskMixin)
    for option in OPTIONS if without else ():
        if option in vars(type(task)):
            yield fault(
                "E005",
                f"Task {task.name} has {option}={getattr(task, option)!r}, but it is not a "
                f"SafeTask: the option does nothing.",
                BE_SAFE,
            )
    for name, meant in find_misspelt(task, SafeTaskMixin):
        text = f"Task {task.name} has the option {name!r}, which does nothing."
        yield fault("W025", text, f"Did you mean {meant!r}?")


def _find_send_faults(project: Project, task: Any, options: Options) -> Iterator[CheckMessage]:
    """E005, W008: the send does not take the lock. W013: a message is skipped."""
    until = options.unique_until
    if until is None:
        return
    text = f"Task {task.name} has unique_until={until!r}, but "
    if not isinstance(task, SafeTaskMixin):
        text += "it is not a SafeTask: its sends are Celery's own, and each of them is published."
        yield fault("E005", text, BE_SAFE)
    elif project.app.conf.task_protocol == 1:
        text += (
            "task_protocol is 1, whose messages have no headers: the lock can't travel, and each "
            "send is published."
        )
        yield fault("W008", text, "Leave task_protocol at 2, Celery's default.")
    if until == "start" and options.on_conflict == "skip":
        yield fault(
            "W013",
            f'Task {task.name} has unique_until="start" and on_conflict="skip": a message that is '
            f"sent during a run finds the run's lock held when its turn comes, and is skipped.",
            'Set on_conflict="retry", or unique_until="end" if one run does it for all.',
        )


def _find_run_faults(project: Project, task: Any, options: Options) -> Iterator[CheckMessage]:
    """W009: a run outlives its lock. W010: it is ended while it waits. W011: redelivered early."""
    limit, waits = project.time_limit(task), options.blocking_timeout
    lease = _lease_of(options)
    if lease is not None and not options.renew and (limit is None or limit > lease):
        ends = "no time limit ends it" if limit is None else f"its time limit is {limit:g} s"
        yield fault(
            "W009",
            f"Task {task.name} has renew=False and a lock of {lease:g} s, but {ends}: a run that "
            f"takes longer goes on without its lock, beside the next run.",
            "Leave renew=True, or set a time_limit below the lock's timeout.",
        )
    soft = seconds_of(task.soft_time_limit) or seconds_of(project.app.conf.task_soft_time_limit)
    first = min((end for end in (soft, limit) if end is not None), default=None)
    if options.on_conflict == "wait" and first is not None and waits >= first:
        yield fault(
            "W010",
            f"Task {task.name} waits for its lock for up to {waits:g} s, but its time limit ends "
            f"it after {first:g} s, the waiting included.",
            'Set a shorter blocking_timeout, a longer time limit, or on_conflict="retry".',
        )
    longest = max(limit or 0, waits)
    timeout = project.visibility_timeout if task.acks_late else None
    if timeout is not None and longest > timeout:
        yield fault(
            "W011",
            f"Task {task.name} may run for {longest:g} s and acknowledges late, but after a "
            f"visibility_timeout of {timeout:g} s the broker delivers it again: its copies meet "
            f"its lock, again and again, while it runs.",
            lengthen_visibility(longest),
        )


def _lease_of(options: Options) -> float | None:
    """Return the lease of a task's lock, s; None: LOCK_TIMEOUT is not valid (E001 reports it)."""
    try:
        return options.lease()
    except ConfigurationError:
        return None


def _find_bypassed(project: Project) -> Iterator[CheckMessage]:
    """W012: ``base=SafeTask`` bypasses the project's own task class."""
    # Celery derives the app's Task class from the project's task class.
    base = project.app.Task.__mro__[1]
    if issubclass(SafeTask, base):
        return  # it is none of the project's own
    names = [task.name for task in project.safe_tasks if not isinstance(task, base)]
    if not names:
        return
    hint = (
        f"Define class SafeAppTask(SafeTaskMixin, {base.__name__}), and use it as base, or as "
        f"the app's task_cls."
    )
    if issubclass(base, SafeTaskMixin):
        hint = f"Leave out base=SafeTask, or write base={base.__name__}: it is one already."
    path = f"{base.__module__}.{base.__qualname__}"
    text = (
        f"The app's task class is {path}, but {len(names)} task(s) with base=SafeTask bypass it, "
        f"such as {names[0]}."
    )
    yield fault("W012", text, hint)
