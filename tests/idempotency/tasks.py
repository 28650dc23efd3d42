"""Idempotent tasks for a real worker."""

from pathlib import Path
from typing import Any, Final

from celery import shared_task
from django.db import transaction

from django_celery_safe import SafeTask, current_claim, idempotent
from tests.app.models import Person
from tests.worker.rooms import Room
from tests.worker.tasks import Witnessed

#: A lease that a test can outwait, and longer than the visibility timeout of its broker, s.
LEASE: Final = 6

#: A message of a killed run is delivered again.
LATE: Final[Any] = {
    "base": Witnessed, "bind": True, "acks_late": True, "reject_on_worker_lost": True
}  # fmt: skip


@shared_task(**LATE)
@idempotent(["room"], timeout=LEASE)
def staying(self: Any, room: str) -> Any:
    """Stay in the room, once."""
    return Room(Path(room)).stay(self)


@shared_task(**LATE)
@idempotent(["room"], timeout=LEASE)
def writing(self: Any, room: str) -> Any:
    """Stay in the room with a transaction open that has finished the claim."""
    with transaction.atomic():
        Person.everyone.create(email="written@example.org")
        current_claim().finish("written")
        return Room(Path(room)).stay(self)


@shared_task(base=SafeTask, bind=True, max_retries=5)
@idempotent
def repeating(self: Any, room: str) -> int:
    """Retry twice without delay; no attempt may wait for the lease, which is long."""
    with Room(Path(room)).entered(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
    return int(self.request.retries)


@shared_task(
    base=SafeTask, bind=True, autoretry_for=(ConnectionError,), default_retry_delay=0,
    retry_backoff=False,
)  # fmt: skip
@idempotent
def reconnecting(self: Any, room: str) -> int:
    """Fail twice, and be retried by Celery."""
    with Room(Path(room)).entered(self):
        if self.request.retries < 2:
            raise ConnectionError("refused")
    return int(self.request.retries)
