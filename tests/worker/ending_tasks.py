"""A Celery app of its own without any single-instance task, for ``test_endings``."""

from pathlib import Path
from typing import Any

from celery import Celery

from django_celery_safe import SafeTask
from tests.worker.rooms import Room

bare_app = Celery("bare", set_as_current=False)
bare_app.config_from_object("django.conf:settings", namespace="CELERY")


@bare_app.task(base=SafeTask, bind=True, shared=False)
def asked(self: Any, room: str) -> Any:
    """Stay in the room, alone only if the call asks for it."""
    return Room(Path(room)).stay(self)
