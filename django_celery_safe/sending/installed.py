"""Whether this app is in INSTALLED_APPS: without that, it has no system check that could say so."""

from __future__ import annotations

from django.apps import apps

from ..exceptions import ConfigurationError

#: Whether this process has found the app installed.
found = False


def refuse_uninstalled(task: str) -> None:
    """
    Refuse to send a task if this app is not installed.

    Raises:
        ConfigurationError: ``django_celery_safe`` is not in INSTALLED_APPS.
    """
    global found
    if not apps.ready:
        return
    if not apps.is_installed("django_celery_safe"):
        raise ConfigurationError(
            f'Task {task} is a SafeTask, and "django_celery_safe" is not in INSTALLED_APPS: '
            f"nothing would free the locks of messages, fail steps or check the settings. Add it, "
            f"and run manage.py migrate."
        )
    found = True
