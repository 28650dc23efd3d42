"""The app's entry in INSTALLED_APPS; in the demo's own worker it starts the journal."""

from django.apps import AppConfig
from django.conf import settings


class DemoConfig(AppConfig):
    """The site shown at work: ``manage.py demo``."""

    name = "demo"

    def ready(self) -> None:
        folder = getattr(settings, "DEMO_FOLDER", None)
        if folder is not None:
            from .journal import Journal

            Journal(folder).connect()
