"""Tasks that send and re-send, for tests on a real worker. Each has ``send_on_commit=True``."""

from pathlib import Path
from typing import Any

from celery import chain, group, shared_task
from django.db import transaction

from django_celery_safe import SafeTask
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.processes import Journal


@shared_task(base=SafeTask, send_on_commit=True)
def write(journal: str, effect: str) -> str:
    """Write one line into a journal."""
    Journal(Path(journal)).write(effect)
    return effect


@shared_task(
    base=SafeTask, bind=True, send_on_commit=True, default_retry_delay=0, max_retries=5
)  # fmt: skip
def welcome(self: Any, pk: int, journal: str, failures: int, guarantee: str) -> str:
    """Greet once; the mail server refuses a few times, and then a retry comes out of the block."""
    lines = Journal(Path(journal))
    lines.write("began", task_id=self.request.id, retries=self.request.retries)
    with Person.do_once(pk, "is_welcome_email_sent", guarantee=guarantee) as person:  # type: ignore[arg-type]
        if person is None:
            return "done before"
        if self.request.retries < failures:
            raise self.retry()
        lines.write("greeted", task_id=self.request.id)
    return "greeted"


@shared_task(
    base=SafeTask, send_on_commit=True, autoretry_for=(ConnectionError,), default_retry_delay=0
)
def reconnect(journal: str, failures: int) -> str:
    """Fail inside a transaction, as often as told, and be retried by Celery."""
    lines = Journal(Path(journal))
    with transaction.atomic():
        Person.everyone.create()
        write.delay(journal, "sent by a run")
        if lines.count("failed") < failures:
            lines.write("failed")
            raise ConnectionError("refused")
    return "connected"


@shared_task(base=SafeTask, bind=True, send_on_commit=True)
def replace(self: Any, journal: str, kind: str) -> Any:
    """Put something in its own place, from inside a transaction."""
    canvas = {
        "task": write.si(journal, "replaced"),
        "chain": chain(write.si(journal, "replaced"), add.si(40, 2)),
        "group": group(add.si(1, 2), add.si(3, 4)),
        "chord": chain(group(add.si(1, 2), add.si(3, 4)), total.s()),
    }[kind]
    with transaction.atomic():
        Person.everyone.create()
        write.delay(journal, "rolled back")
        return self.replace(canvas)


@shared_task(base=SafeTask, send_on_commit=True)
def send_in_a_transaction(journal: str) -> list[str]:
    """Send from inside a transaction that commits, and one that does not."""
    with transaction.atomic():
        person = Person.everyone.create()
        kept = look.delay(journal, person.pk)
    with transaction.atomic():
        dropped = look.delay(journal, 0)
        transaction.set_rollback(True)
    return [kept.id, dropped.id]


@shared_task(base=SafeTask, bind=True, send_on_commit=True)
def look(self: Any, journal: str, pk: int) -> None:
    """Note whether the row is there."""
    found = Person.everyone.filter(pk=pk).exists()
    Journal(Path(journal)).write("looked", task_id=self.request.id, found=found)
