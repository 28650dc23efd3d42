"""
The Celery app of this folder's worker: ``celery -A tests.stages.worker_app``.

With SAFE_TESTS_BROKEN_ENGINE=counter or =count in its environment the worker ends stages
wrongly, see ``broken``.
"""

from typing import Any

from celery import Celery
from celery.signals import worker_init

app = Celery("stages", include=["tests.stages.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")


@worker_init.connect
def break_engine(**kwargs: Any) -> None:
    """Take the engine that the environment names, before the worker's children are forked."""
    from tests.stages import broken  # needs the app registry

    broken.use_chosen()
