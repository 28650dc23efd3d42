"""
Tasks of ``test_copies``: a message of theirs is delivered again while they run.

A run stays in its room until the gate opens; what is to come before that waits for a
gate of its own, called ``turn``.
"""

from pathlib import Path
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, single_instance
from tests.processes import wait_for
from tests.worker.rooms import Room

#: A lease that a test can outwait, s.
LEASE = 3
#: The hard time limit of a run, s: more than half of the visibility timeout.
TIME_LIMIT = 12

#: A message of a killed run is delivered again.
LATE: Any = {"base": SafeTask, "bind": True, "acks_late": True, "reject_on_worker_lost": True}


def wait_for_turn(room: str) -> None:
    """Stand still until the test opens the other gate."""
    wait_for((Path(room) / "turn").exists, 60)


@shared_task(**LATE)
@single_instance(key=["room"], timeout=LEASE)
def staying(self: Any, room: str) -> Any:
    """Stay in the room."""
    return Room(Path(room)).stay(self)


@shared_task(**LATE)
@single_instance(key=["room"], timeout=LEASE)
def ending_slowly(self: Any, room: str) -> int:
    """Retry, and end long after the retry was sent."""
    with Room(Path(room)).entered(self):
        if self.request.retries == 0:
            try:
                raise self.retry(countdown=0)
            finally:
                wait_for_turn(room)
    return int(self.request.retries)


@shared_task(**LATE)
@single_instance(key=["room"], timeout=LEASE)
def replacing_slowly(self: Any, room: str, page: int = 0) -> int:
    """Put the next page in its own place, and end long after that was sent."""
    with Room(Path(room)).entered(self):
        if page == 0:
            try:
                raise self.replace(self.si(room, 1))
            finally:
                wait_for_turn(room)
    return page


@shared_task(base=SafeTask, bind=True, acks_late=True, time_limit=TIME_LIMIT)
@single_instance(key=["room"], timeout=2 * LEASE)
def limited(self: Any, room: str) -> Any:
    """Stay in the room beyond its hard time limit."""
    return Room(Path(room)).stay(self)
