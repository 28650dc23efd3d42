"""The Celery app of this folder's worker: ``celery -A tests.idempotency.worker_app``."""

from celery import Celery

app = Celery("idempotency", include=["tests.idempotency.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")
