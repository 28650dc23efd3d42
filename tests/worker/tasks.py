"""Tasks for the tests on real workers."""

from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, single_instance
from tests.worker.rooms import Room


class Witnessed(SafeTask):
    """A task class with a hook of its own: every message that is taken up is noted."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Note the message, whether or not the task then runs."""
        Room(Path(args[0])).note("tried", self)


@shared_task(base=Witnessed, bind=True, max_retries=0)
@single_instance(key=["room"], limit=2, on_conflict="retry", retry_delay=0.2)
def two_at_once(self: Any, room: str) -> Any:
    """Stay in the room; come back if two are there."""
    return Room(Path(room)).stay(self)
