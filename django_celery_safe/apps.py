"""The app's entry in INSTALLED_APPS: registers the system checks."""

from __future__ import annotations

from django.apps import AppConfig


class DjangoCelerySafeConfig(AppConfig):
    """Configuration of ``django_celery_safe``."""

    name = "django_celery_safe"
    verbose_name = "Celery safe"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks
        from .concurrency import endings
        from .concurrency.guard import run_steps_by
        from .stages import endings as stage_endings
        from .stages.decorator import run_plain

        checks.connect()
        endings.connect()
        stage_endings.connect()
        run_steps_by(run_plain)
