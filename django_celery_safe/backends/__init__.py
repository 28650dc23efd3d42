"""
The backend for Django's own tasks, ``django.tasks``, which came with Django 6.0.

Each Django task has a Celery task, named by its path: ``functions`` makes the Celery task,
``backend`` sends it, and ``results`` reads a task's result from its outbox row. Only Django
imports this package, for the setting ``TASKS``.
"""

from .backend import SafeCeleryBackend

__all__ = ["SafeCeleryBackend"]
