"""The project that the checks look at: its Celery app, the app's tasks, and what beat sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from celery import current_app

from ..delivery.call import layers, load_tasks
from ..delivery.copies import visibility_timeout
from ..exceptions import describe_error
from ..inspection.findings import Finding, fault
from ..sending import SafeTaskMixin
from ..sending.beyond_visibility import redelivers
from ..stages.plan import get_step_layer

#: The shipped task that relays the outbox, as beat's schedule names it.
RELAY_TASK: Final = "django_celery_safe.tasks.relay_outbox"


class Project(NamedTuple):
    """The current Celery app and its tasks; a fault and no tasks if they can't be loaded."""

    app: Any
    tasks: list[Any]
    faults: tuple[Finding, ...] = ()

    @property
    def safe_tasks(self) -> list[Any]:
        """The tasks that send themselves on commit; none if there are only our own."""
        return [task for task in self.tasks if isinstance(task, SafeTaskMixin)]

    @property
    def steps(self) -> list[Any]:
        """The tasks that are steps of stages."""
        return [task for task in self.tasks if get_step_layer(task) is not None]

    @property
    def visibility_timeout(self) -> float | None:
        """After how long the broker delivers a message again, s; None: by no time."""
        try:
            return visibility_timeout(self.app) if redelivers(self.app) else None
        except (TypeError, ValueError):
            return None  # the broker's transport says so

    def beat_entries(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield what beat sends: each entry's name, its task and its options."""
        schedule = self.app.conf.beat_schedule
        for name, entry in schedule.items() if isinstance(schedule, Mapping) else ():
            # Celery takes its own ScheduleEntry too.
            fields = entry if isinstance(entry, Mapping) else getattr(entry, "__dict__", {})
            yield str(name), str(fields.get("task")), fields.get("options") or {}

    def beat_relays(self) -> bool:
        """Return whether beat starts the shipped relay."""
        return any(task == RELAY_TASK for _, task, _ in self.beat_entries())

    def time_limit(self, task: Any) -> float | None:
        """Return after how long a run of a task is ended, s; None: never."""
        return seconds_of(task.time_limit) or seconds_of(self.app.conf.task_time_limit)


def load_project() -> Project:
    """Return the project, with the tasks of all modules that a worker imports, or with W007."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        load_tasks(app)
    except Exception as error:  # noqa: BLE001 - a project's task modules may raise anything
        text = f"The tasks can't be loaded, so none was checked: {describe_error(error)}."
        hint = "A worker that loads them will not start either."
        return Project(app, [], (fault("W007", text, hint),))
    return Project(app, list(app.tasks.values()))


def innermost_code(task: Any) -> Any:
    """Return the code of a task's own function, below all decorators; None: it has none."""
    *_, function = layers(task.run)
    return getattr(function, "__code__", None)


def seconds_of(limit: Any) -> float | None:
    """Return a number or timedelta, s; None: it is neither, or 0, which means no limit."""
    if isinstance(limit, timedelta):
        limit = limit.total_seconds()
    return float(limit) if isinstance(limit, int | float) and limit else None


def count(tasks: list[Any], one: str = "is", many: str = "are") -> str:
    """Return the subject of a sentence about tasks, and its verb."""
    if len(tasks) == 1:
        return f"Task {tasks[0].name} {one}"
    return f"{len(tasks)} tasks, such as {tasks[0].name}, {many}"


def lengthen_visibility(seconds: float) -> str:
    """Return the hint for a task whose message the broker delivers again after too few seconds."""
    return (
        f'Set broker_transport_options = {{"visibility_timeout": {seconds * 1.5:.0f}}}, a shorter '
        f"limit or wait, or use RabbitMQ with a consumer_timeout above that."
    )
