"""The app's entry in INSTALLED_APPS: registers the system checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DjangoCelerySafeConfig(AppConfig):
    """Configuration of ``django_celery_safe``."""

    name = "django_celery_safe"
    verbose_name = _("Celery safe")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, transactions
        from .delivery import endings
        from .resuming import checkpoints

        checks.connect()
        transactions.connect()
        endings.connect()
        checkpoints.connect()
