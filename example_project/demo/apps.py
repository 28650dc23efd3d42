"""The app's entry in INSTALLED_APPS; in the demo's worker it keeps the journal."""

import os
from typing import Any

from celery import signals
from django.apps import AppConfig


class DemoConfig(AppConfig):
    """The site shown at work: ``manage.py demo``."""

    name = "demo"

    def ready(self) -> None:
        """Write down each run that begins and ends in this process and the children it forks."""
        from .models import Run

        def begin(task: Any, task_id: str, **_: Any) -> None:
            Run.objects.create(task=task.name, task_id=task_id, pid=os.getpid())

        def end(task_id: str, state: str | None, retval: Any, **_: Any) -> None:
            run = Run.objects.filter(task_id=task_id, pid=os.getpid()).latest("pk")
            run.state, run.returned = state or "", retval if state == "SUCCESS" else None
            run.save()

        signals.task_prerun.connect(begin, weak=False)
        signals.task_postrun.connect(end, weak=False)
