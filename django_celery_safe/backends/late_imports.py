"""
Django tasks in modules that a worker has not imported.

When a worker starts, Celery imports the modules called ``tasks`` of all apps. A Django task
may be in any module: its message names its path, so the worker imports the module when the
first message arrives. Only modules of the project's apps are imported, because anybody who
can write to the broker can choose the path.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.app.registry import TaskRegistry
from django.apps import apps

from ..texts import get_logger
from .functions import add_function, find_task, get_celery_task
from .results import AnyTask

logger = get_logger(__name__)


def prepare_worker(app: Any) -> None:
    """Let an app's worker, and the processes that it forks, import such tasks."""
    # Change the registry itself, because Celery's tracer has a reference to it.
    app.tasks.__class__ = _Registry
    app.tasks.app = app
    app.steps["consumer"].add(_FindTasks)


class _Registry(TaskRegistry):
    """Celery's task registry, which imports a Django task that it does not have yet."""

    app: Any

    def __missing__(self, name: str) -> Any:
        task = _import_task(name)
        if task is None:
            raise self.NotRegistered(name)
        add_function(task)
        return get_celery_task(self.app, name)


def _import_task(path: str) -> AnyTask | None:
    """Return the Django task at a path; None: there is none, or its module fails on import."""
    if apps.get_containing_app_config(path) is None:
        return None
    try:
        return find_task(path)
    except Exception:
        # Any other error than an unknown task would end the worker, and then the next one.
        logger.exception(
            "The task %s can't be imported, so its message is treated as one of an unknown task.",
            path,
        )
        return None


class _Strategies(dict[str, Any]):
    """A worker's strategies: for each task, the function that handles its messages."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer.strategies)
        self.consumer = consumer

    def __missing__(self, name: str) -> Any:
        app = self.consumer.app
        strategy = self[name] = app.tasks[name].start_strategy(app, self.consumer)
        return strategy


class _FindTasks(bootsteps.StartStopStep):
    """The bootstep of a worker that replaces its strategies."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        c.strategies = _Strategies(c)
