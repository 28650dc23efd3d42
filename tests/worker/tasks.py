"""Tasks for the tests on real workers."""

from pathlib import Path
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject

from django_celery_safe import SafeTask, single_instance
from tests.processes import wait_for
from tests.worker.rooms import Room


class Witnessed(SafeTask):
    """A task class with a hook of its own: every message that is taken up is noted."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Note the message, whether or not the task then runs."""
        Room(Path(args[0])).note("tried", self)


@shared_task(base=Witnessed, bind=True)
@single_instance(key=["room"])
def skipping(self: Any, room: str) -> Any:
    """Stay in the room; skip if somebody is there."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, max_retries=0)
@single_instance(key=["room"], on_conflict="retry", retry_delay=0.2)
def returning(self: Any, room: str) -> Any:
    """Stay in the room; come back if somebody is there."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, max_retries=0)
@single_instance(key=["room"], limit=2, on_conflict="retry", retry_delay=0.2)
def two_at_once(self: Any, room: str) -> Any:
    """Stay in the room; come back if two are there."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True)
@single_instance(key=["room"], on_conflict="retry", retry_delay=5)
def returning_late(self: Any, room: str) -> Any:
    """Stay in the room; come back after more than the broker's visibility timeout."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True)
@single_instance(key=["room"], on_conflict="reject")
def rejecting(self: Any, room: str) -> Any:
    """Stay in the room; be rejected if somebody is there."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True)
@single_instance(key=["room"], on_conflict="raise")
def raising(self: Any, room: str) -> Any:
    """Stay in the room; fail if somebody is there."""
    return Room(Path(room)).stay(self)


EVERYTHING: Any = {"autoretry_for": (Exception,), "default_retry_delay": 0, "max_retries": 3}


@shared_task(base=Witnessed, bind=True, **EVERYTHING)
@single_instance(key=["room"])
def skipping_autoretry(self: Any, room: str) -> Any:
    """Skip, on a task that Celery retries for every error."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, **EVERYTHING)
@single_instance(key=["room"], on_conflict="reject")
def rejecting_autoretry(self: Any, room: str) -> Any:
    """Be rejected, on a task that Celery retries for every error."""
    return Room(Path(room)).stay(self)


@shared_task(bind=True)
@single_instance(key=["room"])
def plain(self: Any, room: str) -> Any:
    """Skip, on Celery's own task class, whose messages carry no key."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True)
@single_instance
def repeating(self: Any, room: str) -> int:
    """Retry twice without delay."""
    with Room(Path(room)).entered(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
    return int(self.request.retries)


@shared_task(base=Witnessed, bind=True, max_retries=1, autoretry_for=(KeyError,))
@single_instance(key="{room}")
def ending(self: Any, room: str, how: str) -> None:
    """End in one of the ways in which a task can end without a result."""
    with Room(Path(room)).entered(self):
        match how:
            case "exception":
                raise ValueError(how)
            case "ignore":
                raise Ignore(how)
            case "reject":
                raise Reject(how, requeue=False)
            case "retry":
                raise self.retry(countdown=3600)
            case "soft time limit":
                wait_for(lambda: False, 60)


@shared_task(base=Witnessed, bind=True)
@single_instance(key="{depth}")
def crawling(self: Any, room: str, depth: int) -> list[Any]:
    """Call itself for the next depth, and once more for its own."""
    deeper = crawling(room, depth - 1) if depth else "the ground"
    return [depth, deeper, crawling(room, depth)]


@shared_task(base=Witnessed, bind=True)
@single_instance(cache="gone")
def without_cache(self: Any, room: str) -> Any:
    """Stay in the room, under a lock whose cache does not answer."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, acks_late=True, reject_on_worker_lost=True)
@single_instance(key=["room"], timeout=2)
def surviving(self: Any, room: str) -> Any:
    """Stay in the room, under a short lease, and be delivered again if the process dies."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, acks_late=True, reject_on_worker_lost=True)
@single_instance(key=["room"], timeout=6)
def redelivered(self: Any, room: str) -> Any:
    """Stay in the room for longer than the broker waits for an acknowledgement."""
    return Room(Path(room)).stay(self)
