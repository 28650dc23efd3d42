"""
Faults that show at a process's first send: no Celery app of the project, or our app not installed.

``checks.project`` reports the missing Celery app before anything is sent; it uses the same test.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

from celery import _state
from django.apps import apps

from ..events import SENT_WITHOUT_APP
from ..exceptions import ConfigurationError
from ..usage import calling_line

#: The Celery apps with which this process has sent something.
SEEN: Final[WeakSet[Any]] = WeakSet()


def is_fallback(app: Any) -> bool:
    """
    Return whether an app is Celery's default app, made because the project has loaded none.

    A default app with a broker, for example from the environment variable ``CELERY_BROKER_URL``,
    does not count, because it is meant to be used.
    """
    default: Any = _state.default_app  # type: ignore[attr-defined]
    made_by_celery = app is default and app.main == "default" and not app.set_as_current
    return made_by_celery and not app.conf.broker_write_url


def look_at_first_send(app: Any, task: str) -> None:
    """
    Log the first send through Celery's default app, which has no configured broker.

    Raises:
        ConfigurationError: ``django_celery_safe`` is not in INSTALLED_APPS.
    """
    if apps.ready and not apps.is_installed("django_celery_safe"):
        raise ConfigurationError(
            f'Task {task} is a SafeTask, and "django_celery_safe" is not in INSTALLED_APPS: '
            f"nothing would free the locks of messages, fail steps or check the settings. Add it, "
            f"and run manage.py migrate."
        )
    SEEN.add(app)
    if is_fallback(app) and not app.conf.task_always_eager:
        broker = app.connection_for_write().as_uri()
        SENT_WITHOUT_APP.emit(look_at_first_send, task=task, broker=broker, place=calling_line())
