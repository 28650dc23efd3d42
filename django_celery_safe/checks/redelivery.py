"""Faults of tasks that are done once: messages that are lost or redelivered too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery import Task
from django.core.checks import CheckMessage

from ..concurrency.guard import find_guarded
from ..delivery.call import layers
from ..idempotency import Idempotent
from ..inspection.findings import fault
from ..sending import SafeTaskMixin
from .project import Project, innermost_code, lengthen_visibility, seconds_of

#: Celery's default for the longest backoff, s (celery/app/autoretry.py).
BACKOFF_MAX: Final = 600
#: The end of a hint to have a killed task redelivered.
LIMITED: Final = " (and max_deaths, if MAX_DEATHS is not the right limit for this SafeTask)"
#: Number of doublings after which a backoff exceeds any limit.
EVER: Final = 32


def find_redelivery_faults(project: Project) -> Iterator[CheckMessage]:
    """W018, W019: a message is lost with its worker. W020: it is redelivered too early."""
    once = [task for task in project.tasks if _is_done_once(task)]
    for task in once:
        if not task.acks_late:
            yield fault(
                "W018",
                f"Task {task.name} does its work only once, but acks_late is off: its message is "
                f"acknowledged before it starts, so if the worker dies, the work is never done.",
                f"Set acks_late=True and reject_on_worker_lost=True{LIMITED}. Anything else that "
                f"the task does, outside of what is done once, is repeated at each delivery.",
            )
        elif not task.reject_on_worker_lost:
            yield fault(
                "W019",
                f"Task {task.name} acknowledges late, but reject_on_worker_lost is off: when its "
                f"process is killed, for example by the OOM killer, its message is acknowledged "
                f"all the same, and it is never done.",
                f"Set reject_on_worker_lost=True{LIMITED}.",
            )
    timeout = project.visibility_timeout
    if timeout is None:
        return
    for task in project.tasks:
        if isinstance(task, SafeTaskMixin) or task in once:
            for wait, seconds in _find_waits(project, task):
                if seconds is not None and seconds > timeout:
                    yield fault(
                        "W020",
                        f"Task {task.name} has {wait} of {seconds:.10g} s, but after a "
                        f"visibility_timeout of {timeout:.10g} s the broker delivers it again: it "
                        f"runs twice, or more often.",
                        lengthen_visibility(seconds),
                    )


def find_stop_faults(project: Project) -> Iterator[CheckMessage]:
    """W021: the messages of a worker that is killed while it stops are redelivered late."""
    timeout = project.visibility_timeout
    if timeout is None:
        return
    late = [task.name for task in project.tasks if task.acks_late and _is_done_once(task)]
    # The setting exists since Celery 5.5.
    if late and not project.app.conf.get("worker_soft_shutdown_timeout", 0):
        yield fault(
            "W021",
            f"worker_soft_shutdown_timeout is not set: if a worker is killed while it stops, its "
            f"unfinished tasks, such as {late[0]}, are redelivered only after a "
            f"visibility_timeout of {timeout:.10g} s.",
            "Set worker_soft_shutdown_timeout to some seconds less than the deployment waits "
            "before it kills (Celery 5.5 or newer), and start workers with REMAP_SIGTERM=SIGQUIT "
            "in their environment.",
        )


def _is_done_once(task: Any) -> bool:
    """Return whether a task is ``@idempotent``, or its code uses ``do_once`` or ``idempotent``."""
    if any(isinstance(getattr(one, "idempotent", None), Idempotent) for one in layers(task.run)):
        return True
    return not {"do_once", "idempotent"}.isdisjoint(_names_in(task))


def _names_in(task: Any) -> tuple[str, ...]:
    """Return the names that the code of a task's own function uses."""
    return getattr(innermost_code(task), "co_names", ())


def _find_waits(project: Project, task: Any) -> Iterator[tuple[str, float | None]]:
    """Yield how long a message of a task may stay without being acknowledged, and why."""
    # W011 reports it for single-instance tasks.
    if task.acks_late and find_guarded(task) is None:
        yield "a time_limit", project.time_limit(task)
    yield from _find_retries(task)
    for name, sent, options in project.beat_entries():
        if sent == task.name:
            yield f"in beat's entry {name!r} a countdown", seconds_of(options.get("countdown"))


def _find_retries(task: Any) -> Iterator[tuple[str, float | None]]:
    """Yield how long a retry of a task waits at most, computed like Celery's ``autoretry``."""
    if not getattr(task, "autoretry_for", ()):
        # The default of 180 s does not show which countdown retry() is called with.
        if "retry" in _names_in(task) and task.default_retry_delay != Task.default_retry_delay:
            yield "a default_retry_delay", seconds_of(task.default_retry_delay)
        return
    options = getattr(task, "retry_kwargs", None) or {}
    retries = options.get("max_retries")
    retries = task.max_retries if retries is None else retries
    if retries == 0:
        return
    if backoff := getattr(task, "retry_backoff", False):
        longest = seconds_of(getattr(task, "retry_backoff_max", BACKOFF_MAX)) or 0.0
        doublings = EVER if retries is None else min(retries - 1, EVER)
        seconds = min(longest, int(max(1.0, float(backoff))) * 2.0**doublings)
        yield "a longest retry_backoff", seconds
    elif "countdown" in options:
        yield "in retry_kwargs a countdown", seconds_of(options["countdown"])
    else:
        yield "a default_retry_delay", seconds_of(task.default_retry_delay)
