"""The project that the checks examine: its Celery app, and the app's tasks."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from celery import _state, current_app
from django.core.checks import CheckMessage
from django.utils.module_loading import autodiscover_modules

from ..delivery.call import layers, load_tasks
from ..idempotency import Idempotent
from ..inspection.lock_store import fault
from ..sending import SafeTaskMixin
from ..sending.outbox import UNTIL_DONE, task_wants_outbox
from ..stages.plan import get_step_layer
from ..texts import describe_error

#: The name of the shipped task that relays the outbox.
RELAY_TASK: Final = "django_celery_safe.tasks.relay_outbox"
#: Name prefixes of the tasks that come with Celery, such as chain, and with this package.
SHIPPED: Final = ("celery.", "django_celery_safe.")


class Project(NamedTuple):
    """The current Celery app and the project's own tasks; faults, if they can't be loaded."""

    app: Any
    tasks: list[Any]
    faults: tuple[CheckMessage, ...] = ()

    @property
    def safe_tasks(self) -> list[Any]:
        """The tasks that are a SafeTask."""
        return [task for task in self.tasks if isinstance(task, SafeTaskMixin)]

    @property
    def senders(self) -> list[Any]:
        """The tasks that are sent through the outbox."""
        return [task for task in self.safe_tasks if task_wants_outbox(task)]

    @property
    def steps(self) -> list[Any]:
        """The tasks that are steps of stages."""
        return [task for task in self.tasks if get_step_layer(task) is not None]

    @property
    def broker(self) -> tuple[str, dict[str, Any]]:
        """The kind of the broker and the options of its transport; "": it can't be used."""
        try:
            connection = self.app.connection_for_write()
            return connection.transport.driver_type, connection.transport_options
        except Exception:  # noqa: BLE001 - such a broker says so itself
            return "", {}

    def beat_relays(self) -> bool:
        """Return whether beat starts the shipped relay."""
        # The schedule has entries of several forms, all of which show the name of their task.
        return RELAY_TASK in repr(self.app.conf.beat_schedule)


def is_fallback(app: Any) -> bool:
    """
    Return whether an app is Celery's default app, made because the project has loaded none.

    A default app with a broker, for example from the environment variable ``CELERY_BROKER_URL``,
    does not count, because it is meant to be used.
    """
    default: Any = _state.default_app  # type: ignore[attr-defined]
    made_by_celery = app is default and app.main == "default" and not app.set_as_current
    return made_by_celery and not app.conf.broker_write_url


def load_project() -> Project:
    """Return the project with the tasks of all modules that a worker imports; or W004, E004."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    fallback = is_fallback(app)
    try:
        load_tasks(app)
        if fallback:
            autodiscover_modules("tasks")
        tasks = [task for task in app.tasks.values() if not task.name.startswith(SHIPPED)]
    except Exception as error:  # noqa: BLE001 - a project's task modules may raise anything
        text = f"The tasks can't be loaded, so none was checked: {describe_error(error)}."
        hint = "Correct that module. A worker that loads it will not start either."
        return Project(app, [], (fault("W004", text, hint),))
    # A project that uses only locks needs no Celery app.
    return Project(app, tasks, (_no_app(tasks),) if fallback and tasks else ())


def _no_app(tasks: list[Any]) -> CheckMessage:
    return fault(
        "E004",
        f"No Celery app of the project is loaded in this process: {count(tasks, 'is', 'are')} sent "
        f"to Celery's default broker, amqp://localhost, where none of your workers listens.",
        "Import the app in the __init__.py beside settings.py, so that Django loads it everywhere: "
        "from .celery import app as celery_app.",
    )


def is_carried(task: Any) -> bool:
    """Return whether a row sends a task again until it is done."""
    is_safe = isinstance(task, SafeTaskMixin)
    return (is_safe and task_wants_outbox(task) == UNTIL_DONE) or get_step_layer(task) is not None


def find_idempotent(task: Any) -> Idempotent | None:
    """Return the ``@idempotent`` of a task; None: it has none."""
    marks = (getattr(layer, "idempotent", None) for layer in layers(task.run))
    return next((mark for mark in marks if isinstance(mark, Idempotent)), None)


def is_done_once(task: Any) -> bool:
    """Return whether a task is ``@idempotent``, or its code uses ``do_once`` or ``idempotent``."""
    if find_idempotent(task) is not None:
        return True
    names = getattr(getattr(layers(task.run)[-1], "__code__", None), "co_names", ())
    return not {"do_once", "idempotent"}.isdisjoint(names)


def count(tasks: list[Any], one: str, many: str) -> str:
    """Return the subject and the verb of a sentence about tasks."""
    if len(tasks) == 1:
        return f"Task {tasks[0].name} {one}"
    return f"{len(tasks)} tasks, such as {tasks[0].name}, {many}"
