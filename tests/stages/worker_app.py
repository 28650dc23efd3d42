"""The Celery app of workers that run these steps: ``celery -A tests.stages.worker_app``."""

from celery import Celery

app = Celery("stages", include=["tests.stages.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")
