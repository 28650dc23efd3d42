"""The Django project: settings, URLs, and the Celery app that every process needs."""

from .celery import app as celery_app

__all__ = ["celery_app"]
