"""A small project of a user, with tests; copied and run by ``test_projects``."""

from .celery import app

__all__ = ["app"]
