"""Checks of single-instance tasks: what else in the project contradicts their locks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from celery import current_app
from celery.contrib.django.task import DjangoTask
from django.core.checks import CheckMessage

from .. import conf
from ..concurrency.copies import visibility_timeout
from ..concurrency.guard import find_guarded, find_hidden
from ..concurrency.options import Options
from ..exceptions import ConfigurationError, describe_error
from ..sending import SafeTaskMixin
from ..sending.late import redelivers
from .messages import error, warning

#: Environment variable that Celery's Django fixup heeds (celery/fixups/django.py).
SKIP_CHECKS: Final = "CELERY_SKIP_CHECKS"


def check_tasks() -> list[CheckMessage]:
    """E005, W007 to W013, W024: what there is to say of the tasks of the current Celery app."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception as fault:  # noqa: BLE001 - a project's task modules may raise anything
        what = f"The tasks can't be loaded, so none of them was checked: {describe_error(fault)}."
        return [warning(7, what, "A worker that loads them will not start either.")]
    found = [(task, guarded.options) for task in tasks if (guarded := find_guarded(task))]
    messages = [message for task, options in found for message in _check(app, task, options)]
    return messages + _check_hidden(tasks) + _check_bypassed(app, tasks)


def load_tasks(app: Any) -> list[Any]:
    """Return the app's tasks, those of modules too that only a worker would import."""
    before = os.environ.get(SKIP_CHECKS)
    # Else Celery's Django fixup would run all of the project's checks within this one.
    os.environ[SKIP_CHECKS] = "1"
    try:
        app.loader.import_default_modules()
    finally:
        os.environ.pop(SKIP_CHECKS, None)
        if before is not None:
            os.environ[SKIP_CHECKS] = before
    return list(app.tasks.values())


def _check(app: Any, task: Any, options: Options) -> Iterator[CheckMessage]:
    yield from _check_base(app, task, options)
    yield from _check_lease(app, task, options)
    yield from _check_waiting(app, task, options)
    yield from _check_redelivery(app, task, options)
    yield from _check_skipping(task, options)


def _check_base(app: Any, task: Any, options: Options) -> Iterator[CheckMessage]:
    """E005: nothing takes the lock of the send. W008: it can't travel."""
    if options.unique_until is None:
        return
    what = f"Task {task.name} has unique_until={options.unique_until!r}"
    if not isinstance(task, SafeTaskMixin):
        yield error(
            5,
            f"{what}, but it is no SafeTask: its sends are Celery's own, and every one of them is "
            f"published.",
            "Write @shared_task(base=SafeTask), or derive the project's task class from "
            "SafeTaskMixin.",
        )
    elif app.conf.task_protocol == 1:
        yield warning(
            8,
            f"{what}, but task_protocol is 1, whose messages have no headers: the lock can't "
            f"travel, and every send is published.",
            "Leave task_protocol at 2, Celery's default.",
        )


def _check_lease(app: Any, task: Any, options: Options) -> Iterator[CheckMessage]:
    """W009: it runs on when its lock is over."""
    if options.renew:
        return
    lease = options.timeout
    if isinstance(lease, conf.Unset):
        try:
            lease = conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")
        except ConfigurationError:
            return  # E001 says so
    limit = time_limit(app, task)
    if limit is not None and limit <= lease:
        return
    ends = "no time limit ends it" if limit is None else f"its time limit is {limit:g} s"
    yield warning(
        9,
        f"Task {task.name} has renew=False and a lock of {lease:g} s, but {ends}: a run that takes "
        f"longer goes on without its lock, beside the next one.",
        "Leave renew=True, or set a time_limit below the lock's timeout.",
    )


def _check_waiting(app: Any, task: Any, options: Options) -> Iterator[CheckMessage]:
    """W010: it is ended while it waits."""
    soft = _seconds(task.soft_time_limit) or _seconds(app.conf.task_soft_time_limit)
    limits = [soft, time_limit(app, task)]
    limit = min((one for one in limits if one is not None), default=None)
    if options.on_conflict == "wait" and limit is not None and options.blocking_timeout >= limit:
        yield warning(
            10,
            f"Task {task.name} waits for its lock for up to {options.blocking_timeout:g} s, but "
            f"its time limit ends it after {limit:g} s, the waiting included.",
            'Set a shorter blocking_timeout, a longer time limit, or on_conflict="retry".',
        )


def _check_redelivery(app: Any, task: Any, options: Options) -> Iterator[CheckMessage]:
    """W011: the broker delivers it again while it runs."""
    if not task.acks_late or not redelivers(app):
        return
    try:
        timeout = visibility_timeout(app)
    except (TypeError, ValueError):
        return  # the broker's transport says so
    limit = time_limit(app, task)
    longest = max(limit or 0, options.blocking_timeout)
    if longest <= timeout:
        return
    yield warning(
        11,
        f"Task {task.name} may run for {longest:g} s and acknowledges late, but after a "
        f"visibility_timeout of {timeout:g} s the broker delivers it again: copies of it meet its "
        f"lock, again and again, while it runs.",
        f'Set broker_transport_options = {{"visibility_timeout": {longest * 1.5:.0f}}}, a shorter '
        f"time_limit, or use RabbitMQ with a consumer_timeout above that.",
    )


def _check_skipping(task: Any, options: Options) -> Iterator[CheckMessage]:
    """W013: what is sent during a run is not done."""
    if options.unique_until != "start" or options.on_conflict != "skip":
        return
    yield warning(
        13,
        f'Task {task.name} has unique_until="start" and on_conflict="skip": what is sent while it '
        f"runs finds the run's lock held when its turn comes, and is not done.",
        'Set on_conflict="retry", or unique_until="end" if one run does it for all.',
    )


def _check_hidden(tasks: list[Any]) -> list[CheckMessage]:
    """W024: a wrapper hides ``@single_instance`` from the task."""
    return [
        warning(
            24,
            f"Task {task.name} runs {hidden.__qualname__}, which has @single_instance, behind a "
            f"decorator that does not say what it wraps: a run still takes the lock, but as a "
            f"call by hand does. unique_until does nothing, no message is sent again, and a "
            f"redelivered one is skipped.",
            "Write @functools.wraps(function) above the inner function of that decorator, or put "
            "it below @single_instance.",
        )
        for task in tasks
        if (hidden := find_hidden(task)) is not None
    ]


def _check_bypassed(app: Any, tasks: list[Any]) -> list[CheckMessage]:
    """W012: ``base=SafeTask`` leaves out the project's own task class."""
    # Celery derives the app's own class from the project's.
    ours = app.Task.__mro__[1]
    if issubclass(SafeTaskMixin, ours) or issubclass(DjangoTask, ours):
        return []
    names = [
        task.name
        for task in tasks
        if isinstance(task, SafeTaskMixin) and not isinstance(task, ours)
    ]
    if not names:
        return []
    path = f"{ours.__module__}.{ours.__qualname__}"
    derived = (
        f"class SafeAppTask(SafeTaskMixin, {ours.__name__}): derive it, and give it as base, or "
        f"as the app's task_cls."
    )
    if issubclass(ours, SafeTaskMixin):
        derived = f"Leave out base=SafeTask, or write base={ours.__name__}: it is one already."
    return [
        warning(
            12,
            f"The app's task class is {path}, which {len(names)} task(s) with base=SafeTask do "
            f"without, such as {names[0]}.",
            derived,
        )
    ]


def beat_entries(app: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield what beat sends: each entry's name, its task and its options."""
    schedule = app.conf.beat_schedule
    for name, entry in schedule.items() if isinstance(schedule, Mapping) else ():
        # Celery takes its own ScheduleEntry too.
        found = entry if isinstance(entry, Mapping) else getattr(entry, "__dict__", {})
        yield str(name), str(found.get("task")), found.get("options") or {}


def time_limit(app: Any, task: Any) -> float | None:
    """Return after how long a run of a task is ended, s; None: never."""
    return _seconds(task.time_limit) or _seconds(app.conf.task_time_limit)


def _seconds(limit: Any) -> float | None:
    """Return a limit, s; None: there is none, as the pool takes 0."""
    if isinstance(limit, timedelta):
        limit = limit.total_seconds()
    return float(limit) if limit else None
