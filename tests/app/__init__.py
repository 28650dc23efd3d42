"""A small app for the tests: rows with flags, and a Celery app with a few tasks."""

from tests.app.celery import app

__all__ = ["app"]
