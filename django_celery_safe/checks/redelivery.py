"""Checks of tasks that are done once: what keeps them from being delivered again, or does it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from celery import Task, current_app
from django.core.checks import CheckMessage

from ..concurrency.call import layers
from ..concurrency.copies import visibility_timeout
from ..concurrency.guard import find_guarded
from ..idempotency import Idempotent
from ..sending import SafeTaskMixin
from ..sending.late import redelivers
from .messages import warning
from .tasks import beat_entries, load_tasks, time_limit

#: Longest backoff that Celery takes when nothing is said, s (celery/app/autoretry.py).
BACKOFF_MAX: Final = 600
#: Doublings after which a backoff is longer than anything.
EVER: Final = 32
#: By these names a function does something once.
DOING_ONCE: Final = ("do_once", "idempotent")


def check_redelivery() -> list[CheckMessage]:
    """W018 to W021: what there is to say of tasks that may come twice, or never again."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception:  # noqa: BLE001 - W007 says so
        return []
    once = [task for task in tasks if is_done_once(task)]
    messages = [message for task in once for message in _check_acknowledgement(task)]
    if redelivers(app):
        try:
            patience = visibility_timeout(app)
        except (TypeError, ValueError):
            return messages  # the broker's transport says so
        ours = [task for task in tasks if isinstance(task, SafeTaskMixin) or task in once]
        messages += [one for task in ours for one in _check_patience(app, task, patience)]
        messages += _check_shutdown(app, once, patience)
    return messages


def is_done_once(task: Any) -> bool:
    """Tell whether a task is ``@idempotent``, or its function names what does a thing once."""
    if any(isinstance(getattr(one, "idempotent", None), Idempotent) for one in layers(task.run)):
        return True
    return any(name in _names_in(task) for name in DOING_ONCE)


def _names_in(task: Any) -> tuple[str, ...]:
    """Return what the code of a task's own function names."""
    *_, innermost = layers(task.run)
    names: tuple[str, ...] = getattr(getattr(innermost, "__code__", None), "co_names", ())
    return names


def _check_acknowledgement(task: Any) -> Iterator[CheckMessage]:
    """W018, W019: whose worker dies, is never done."""
    if not task.acks_late:
        yield warning(
            18,
            f"Task {task.name} does its work once, however often it comes, but acks_late is off: "
            f"its message is gone when it starts, and if the worker dies then, it is never done.",
            "Set acks_late=True and reject_on_worker_lost=True. If it does more than what is done "
            "once, that comes again with each delivery.",
        )
    elif not task.reject_on_worker_lost:
        yield warning(
            19,
            f"Task {task.name} acknowledges late, but reject_on_worker_lost is off: when its "
            f"process is killed (by the OOM killer, say), its message is acknowledged all the "
            f"same, and it is never done.",
            "Set reject_on_worker_lost=True.",
        )


def _check_patience(app: Any, task: Any, patience: float) -> Iterator[CheckMessage]:
    """W020: the broker delivers it again while it waits, or runs."""
    for what, seconds in _waits(app, task):
        if seconds > patience:
            yield warning(
                20,
                f"Task {task.name} has {what} of {seconds:.10g} s, but after a visibility_timeout "
                f"of {patience:.10g} s the broker delivers it again: it runs twice, or more often.",
                f'Set broker_transport_options = {{"visibility_timeout": {seconds * 1.5:.0f}}}, '
                f"or use RabbitMQ with a consumer_timeout above that.",
            )


def _waits(app: Any, task: Any) -> Iterator[tuple[str, float]]:
    """Yield for how long a message of a task may stay without being acknowledged, and why."""
    limit = time_limit(app, task)
    # Of single-instance tasks W011 says it.
    if task.acks_late and limit is not None and find_guarded(task) is None:
        yield "a time_limit", limit
    yield from _retries(task)
    for name, sent, options in beat_entries(app):
        if sent == task.name:
            yield f"in beat's entry {name!r} a countdown", _seconds(options.get("countdown"))


def _retries(task: Any) -> Iterator[tuple[str, float]]:
    """Yield how long a retry of a task waits at the most, as Celery's ``autoretry`` reckons."""
    if not getattr(task, "autoretry_for", ()):
        # The 180 s that every task has say nothing of what retry() is called with.
        if "retry" in _names_in(task) and task.default_retry_delay != Task.default_retry_delay:
            yield "a default_retry_delay", _seconds(task.default_retry_delay)
        return
    given = getattr(task, "retry_kwargs", None) or {}
    count = given.get("max_retries")
    count = task.max_retries if count is None else count
    if count == 0:
        return
    if backoff := getattr(task, "retry_backoff", False):
        longest = _seconds(getattr(task, "retry_backoff_max", BACKOFF_MAX))
        doublings = EVER if count is None else count - 1
        yield (
            "a longest retry_backoff",
            min(longest, int(max(1.0, float(backoff))) * 2.0 ** min(doublings, EVER)),
        )
    elif "countdown" in given:
        yield "in retry_kwargs a countdown", _seconds(given["countdown"])
    else:
        yield "a default_retry_delay", _seconds(task.default_retry_delay)


def _seconds(value: Any) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return float(value) if isinstance(value, int | float) else 0.0


def _check_shutdown(app: Any, once: list[Any], patience: float) -> list[CheckMessage]:
    """W021: a worker that is killed leaves its messages to the broker's patience."""
    late = [task.name for task in once if task.acks_late]
    # Celery has it since 5.5.
    timeout = app.conf.get("worker_soft_shutdown_timeout", 0)
    if not late or timeout:
        return []
    return [
        warning(
            21,
            f"A worker that is told to stop waits until its tasks have ended, and is killed if the "
            f"deployment does not wait as long: what it was at, such as {late[0]}, is delivered "
            f"again only after a visibility_timeout of {patience:.10g} s.",
            "Set worker_soft_shutdown_timeout to some seconds less than the deployment waits "
            "before it kills (Celery 5.5 or newer), and start workers with REMAP_SIGTERM=SIGQUIT "
            "in their environment: then they give back in time what they can't end.",
        )
    ]
