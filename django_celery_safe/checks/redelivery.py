"""Faults of tasks that are done once: their messages get lost, or come again too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery import Task

from ..concurrency.guard import find_guarded
from ..delivery.call import layers
from ..idempotency import Idempotent
from ..inspection.findings import Finding, fault
from ..sending import SafeTaskMixin
from .project import Project, innermost_code, lengthen_visibility, seconds_of

#: Longest backoff that Celery takes where none is set, s (celery/app/autoretry.py).
BACKOFF_MAX: Final = 600
#: Doublings after which a backoff is longer than anything.
EVER: Final = 32


def find_redelivery_faults(project: Project) -> Iterator[Finding]:
    """W018, W019: lost with the worker. W020, W021: delivered again too early, or late."""
    once = [task for task in project.tasks if _is_done_once(task)]
    for task in once:
        if not task.acks_late:
            yield fault(
                "W018",
                f"Task {task.name} does its work once, however often it comes, but acks_late is "
                f"off: its message is gone when it starts, and if the worker dies then, it is "
                f"never done.",
                "Set acks_late=True and reject_on_worker_lost=True. If the task does more than "
                "what is done once, that comes again with each delivery.",
            )
        elif not task.reject_on_worker_lost:
            yield fault(
                "W019",
                f"Task {task.name} acknowledges late, but reject_on_worker_lost is off: when its "
                f"process is killed, for example by the OOM killer, its message is acknowledged "
                f"all the same, and it is never done.",
                "Set reject_on_worker_lost=True.",
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
    late = [task.name for task in once if task.acks_late]
    # Celery has it since 5.5.
    if late and not project.app.conf.get("worker_soft_shutdown_timeout", 0):
        yield fault(
            "W021",
            f"worker_soft_shutdown_timeout is not set, so a worker that is killed while it stops "
            f"gives no message back: the broker delivers its tasks, such as {late[0]}, again only "
            f"after a visibility_timeout of {timeout:.10g} s.",
            "Set worker_soft_shutdown_timeout to some seconds less than the deployment waits "
            "before it kills (Celery 5.5 or newer), and start workers with REMAP_SIGTERM=SIGQUIT "
            "in their environment.",
        )


def _is_done_once(task: Any) -> bool:
    """Return whether a task is ``@idempotent``, or its function names what does a thing once."""
    if any(isinstance(getattr(one, "idempotent", None), Idempotent) for one in layers(task.run)):
        return True
    return not {"do_once", "idempotent"}.isdisjoint(_names_in(task))


def _names_in(task: Any) -> tuple[str, ...]:
    """Return what the code of a task's own function names."""
    return getattr(innermost_code(task), "co_names", ())


def _find_waits(project: Project, task: Any) -> Iterator[tuple[str, float | None]]:
    """Yield how long a message of a task may stay without being acknowledged, and why."""
    # W011 says it of single-instance tasks.
    if task.acks_late and find_guarded(task) is None:
        yield "a time_limit", project.time_limit(task)
    yield from _find_retries(task)
    for name, sent, options in project.beat_entries():
        if sent == task.name:
            yield f"in beat's entry {name!r} a countdown", seconds_of(options.get("countdown"))


def _find_retries(task: Any) -> Iterator[tuple[str, float | None]]:
    """Yield how long a retry of a task waits at the most, as Celery's ``autoretry`` reckons."""
    if not getattr(task, "autoretry_for", ()):
        # The 180 s that every task has say nothing of what retry() is called with.
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
