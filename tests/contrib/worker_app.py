"""The Celery app of a worker that counts; started as ``celery -A tests.contrib.worker_app``."""

from celery import Celery, signals

app = Celery("counting", include=["tests.app.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")


@signals.worker_init.connect
def count(**_: object) -> None:
    """Count in the worker as ``ready()`` of a project's app does."""
    from django_celery_safe.contrib.prometheus import count_events

    count_events()
