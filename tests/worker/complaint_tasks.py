"""Tasks of ``test_complaints``, written as a user would; each stays in its room while it runs."""

from pathlib import Path
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore
from django.db import transaction

from django_celery_safe import SafeTask, single_instance
from tests.processes import wait_for
from tests.worker.rooms import Room
from tests.worker.tasks import Witnessed

#: A lease that a test can outwait, s.
SHORT_LEASE = 4


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}", unique_until="end")
def export(self: Any, room: str) -> Any:
    """Be sent once, until it has ended."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}", unique_until="end", timeout=SHORT_LEASE)
def export_briefly(self: Any, room: str) -> Any:
    """The same under a short lease."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}")
def import_feed(self: Any, room: str) -> Any:
    """Run once at a time."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}", timeout=SHORT_LEASE)
def crawl(self: Any, room: str) -> Any:
    """Run for longer than its lease."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{room}", timeout=SHORT_LEASE, renew=False)
def crawl_unrenewed(self: Any, room: str, gate: str) -> None:
    """Run beyond the end of its lease, until a gate of its own opens."""
    place = Room(Path(room))
    place.note("started", self)
    wait_for((place.folder / gate).exists, 60)


@shared_task(base=SafeTask, bind=True)
@single_instance(unique_until="end")
def add(self: Any, room: str, a: Any, b: Any = 2) -> Any:
    """Be the same call if the arguments are the same."""
    return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True)
@single_instance(unique_until="end")
def retried(self: Any, room: str) -> int:
    """Retry itself once."""
    with Room(Path(room)).entered(self):
        if self.request.retries == 0:
            raise self.retry(countdown=0)
    return int(self.request.retries)


@shared_task(base=SafeTask, bind=True, autoretry_for=(OSError,), default_retry_delay=0)
@single_instance(unique_until="end")
def autoretried(self: Any, room: str) -> int:
    """Be retried once by Celery."""
    with Room(Path(room)).entered(self):
        if self.request.retries == 0:
            raise OSError("refused")
    return int(self.request.retries)


@shared_task(base=SafeTask, bind=True, send_on_commit=True)
@single_instance(unique_until="end")
def retried_in_atomic(self: Any, room: str) -> int:
    """Retry itself once, by an exception that rolls the transaction back."""
    with Room(Path(room)).entered(self), transaction.atomic():
        if self.request.retries == 0:
            raise self.retry(countdown=0)
    return int(self.request.retries)


@shared_task(base=SafeTask, bind=True)
@single_instance(unique_until="end")
def ignored(self: Any, room: str) -> None:
    """End without a result."""
    Room(Path(room)).note("started", self)
    raise Ignore


@shared_task(
    base=Witnessed, bind=True, autoretry_for=(Exception,), default_retry_delay=0, max_retries=3
)  # fmt: skip
@single_instance(key="{room}", on_conflict="reject")
def rejected(self: Any, room: str) -> Any:
    """Be rejected, on a task that Celery retries for every error."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True)
@single_instance(key="{room}", on_conflict="retry", retry_delay=3600)
def come_back_late(self: Any, room: str) -> Any:
    """Come back after far more than the broker's visibility timeout."""
    return Room(Path(room)).stay(self)


@shared_task(base=Witnessed, bind=True, acks_late=True)
@single_instance(key="{room}")
def acknowledged_late(self: Any, room: str) -> Any:
    """Run for longer than the broker's visibility timeout."""
    return Room(Path(room)).stay(self)


@shared_task(bind=True)
def tell(self: Any, value: Any, room: str) -> Any:
    """Note and return what the task before it returned."""
    Room(Path(room)).note("told", self, value=value)
    return value
