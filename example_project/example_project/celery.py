"""The Celery app. Its settings are the ``CELERY_…`` ones of :mod:`example_project.settings`."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

app = Celery("example_project", task_cls="django_celery_safe:SafeTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
