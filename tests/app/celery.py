"""
The Celery app of the tests, configured by Django settings that begin with ``CELERY_``.

In the test process the fixture ``broker`` points it at the private Redis; a worker
gets the same from the settings that ``CeleryWorker`` passes on.
"""

from celery import Celery

app = Celery("tests", include=["tests.app.tasks", "tests.worker.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")
