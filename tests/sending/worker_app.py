"""The Celery app of this folder's workers; started as ``celery -A tests.sending.worker_app``."""

from celery import Celery

app = Celery("sending", include=["tests.app.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")
