"""
Tasks of ``test_copies``: a message of theirs is delivered again while they run.

A run stays in its room until the gate opens.
"""

from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, single_instance
from tests.worker.rooms import Room

#: A lease that a test can outwait, s.
LEASE = 3
#: The hard time limit of a run, s: more than half of the visibility timeout.
TIME_LIMIT = 12


@shared_task(base=SafeTask, bind=True, acks_late=True, reject_on_worker_lost=True)
@single_instance(key=["room"], timeout=LEASE)
def staying(self: Any, room: str) -> Any:
    """Stay in the room; a message of a killed run is delivered again."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True, acks_late=True, time_limit=TIME_LIMIT)
@single_instance(key=["room"], timeout=2 * LEASE)
def limited(self: Any, room: str) -> Any:
    """Stay in the room beyond its hard time limit."""
    return Room(Path(room)).stay(self)
