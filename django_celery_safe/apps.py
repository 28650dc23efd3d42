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
        from .concurrency import message_endings
        from .models.stages import RunRoom, StageRun
        from .sending import carried, carried_endings
        from .stages import engine, progress, worker_signals

        checks.connect()
        message_endings.connect()
        carried.connect()
        carried_endings.connect()
        worker_signals.connect()
        StageRun.room = RunRoom(
            progress.progress,
            progress.progress_by_stage,
            progress.wait,
            engine.resume,
            engine.abort,
        )
