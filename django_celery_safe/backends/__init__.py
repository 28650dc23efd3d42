"""
The backend for Django's own tasks, ``django.tasks``, which came with Django 6.0.

Each Django task has a Celery task, named by its path: ``functions`` makes the Celery task,
``backend`` sends it, and ``results`` reads a task's result from its outbox row. Only Django
imports this package, for the setting ``TASKS``.
"""

from __future__ import annotations

import django

if django.VERSION < (6, 0):
    raise ImportError(
        f"django_celery_safe.backends is for django.tasks, which Django has since 6.0, and this is "
        f"Django {django.get_version()}. Upgrade Django, or use tasks of Celery: "
        f"@shared_task(base=SafeTask)."
    )

from .backend import SafeCeleryBackend

__all__ = ["SafeCeleryBackend"]
