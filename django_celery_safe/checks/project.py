"""The project that the checks examine: its Celery app, the app's tasks and beat's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from celery import current_app
from django.core.checks import CheckMessage
from django.utils.module_loading import autodiscover_modules

from ..delivery.call import layers, load_tasks
from ..delivery.copies import visibility_timeout
from ..foreign_errors import describe_error
from ..inspection.findings import fault
from ..sending import SafeTaskMixin
from ..sending.beyond_visibility import redelivers
from ..sending.first_send import is_fallback
from ..stages.plan import get_step_layer

#: The name, in beat's schedule, of the shipped task that relays the outbox.
RELAY_TASK: Final = "django_celery_safe.tasks.relay_outbox"
#: Name prefixes of the tasks that come with Celery and with this package.
SHIPPED: Final = ("celery.", "django_celery_safe.")


class Project(NamedTuple):
    """The current Celery app and its tasks; faults, and no tasks if they can't be loaded."""

    app: Any
    tasks: list[Any]
    faults: tuple[CheckMessage, ...] = ()

    @property
    def safe_tasks(self) -> list[Any]:
        """The tasks that are a SafeTask, without those that come with Celery, such as chain."""
        safe = [task for task in self.tasks if isinstance(task, SafeTaskMixin)]
        return [task for task in safe if not task.name.startswith(SHIPPED)]

    @property
    def steps(self) -> list[Any]:
        """The tasks that are steps of stages."""
        return [task for task in self.tasks if get_step_layer(task) is not None]

    @property
    def visibility_timeout(self) -> float | None:
        """Seconds after which the broker redelivers a message; None: there is no such timeout."""
        try:
            return visibility_timeout(self.app) if redelivers(self.app) else None
        except (TypeError, ValueError):
            return None  # the broker's transport reports the wrong value

    def beat_entries(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the entries of beat's schedule: name, task and options of each."""
        schedule = self.app.conf.beat_schedule
        for name, entry in schedule.items() if isinstance(schedule, Mapping) else ():
            # Celery also accepts its own ScheduleEntry.
            fields = entry if isinstance(entry, Mapping) else getattr(entry, "__dict__", {})
            yield str(name), str(fields.get("task")), fields.get("options") or {}

    def beat_relays(self) -> bool:
        """Return whether beat starts the shipped relay."""
        return any(task == RELAY_TASK for _, task, _ in self.beat_entries())

    def time_limit(self, task: Any) -> float | None:
        """Return the hard time limit of a task, s; None: it has no limit."""
        return seconds_of(task.time_limit) or seconds_of(self.app.conf.task_time_limit)


def load_project() -> Project:
    """Return the project with the tasks of all modules that a worker imports; or W007, E010."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    fallback = is_fallback(app)
    try:
        load_tasks(app)
        if fallback:
            autodiscover_modules("tasks")
    except Exception as error:  # noqa: BLE001 - a project's task modules may raise anything
        text = f"The tasks can't be loaded, so none was checked: {describe_error(error)}."
        hint = "A worker that loads them will not start either."
        return Project(app, [], (fault("W007", text, hint),))
    tasks = list(app.tasks.values())
    own = [task for task in tasks if not task.name.startswith(SHIPPED)]
    # A project that uses only locks needs no Celery app.
    faults = (_no_app(own),) if fallback and own else ()
    return Project(app, tasks, faults)


def _no_app(tasks: list[Any]) -> CheckMessage:
    return fault(
        "E010",
        f"No Celery app of the project is loaded in this process: {count(tasks)} sent to Celery's "
        f"default broker, amqp://localhost, where none of your workers listens.",
        "Import the app in the __init__.py beside settings.py, so that Django loads it everywhere: "
        "from .celery import app as celery_app.",
    )


def innermost_code(task: Any) -> Any:
    """Return the code of a task's own function, below all decorators; None: not available."""
    return getattr(layers(task.run)[-1], "__code__", None)


def seconds_of(limit: Any) -> float | None:
    """Return a number or timedelta in seconds; None: it is neither, or 0 (no limit)."""
    if isinstance(limit, timedelta):
        limit = limit.total_seconds()
    return float(limit) if isinstance(limit, int | float) and limit else None


def count(tasks: list[Any], one: str = "is", many: str = "are") -> str:
    """Return the subject and the verb of a sentence about tasks."""
    if len(tasks) == 1:
        return f"Task {tasks[0].name} {one}"
    return f"{len(tasks)} tasks, such as {tasks[0].name}, {many}"


def lengthen_visibility(seconds: float) -> str:
    """Return the hint for a task whose message the broker redelivers too early."""
    return (
        f'Add {{"visibility_timeout": {seconds * 1.5:.0f}}} to CELERY_BROKER_TRANSPORT_OPTIONS, '
        f"set a shorter limit or wait, or use RabbitMQ with a consumer_timeout above that."
    )
