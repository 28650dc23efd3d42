"""The tasks that transactions send. Each has an effect that must happen once."""

from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, single_instance
from tests.app.models import Person
from tests.faults.scenario import find_witness

#: Retries go at once; sends of the tasks themselves wait for their commit, in the outbox.
RETRIED: Any = {
    "bind": True,
    "default_retry_delay": 0,
    "max_retries": 3,
    "send_on_commit": True,
    "outbox": True,
}


@shared_task(base=SafeTask, bind=True)
def welcome(self: Any, name: str) -> None:
    """Welcome somebody, once."""
    greet(self, name)


@shared_task(base=SafeTask, bind=True)
@single_instance(key="{name}", unique_until="end", timeout=1)
def welcome_alone(self: Any, name: str) -> None:
    """Welcome somebody, once; while this is on its way, nobody sends the same."""
    greet(self, name)


@shared_task(base=SafeTask, **RETRIED)
def welcome_at_last(self: Any, name: str) -> None:
    """Welcome somebody, once, at the second try."""
    greet(self, name, retries=1)


@shared_task
def end() -> None:
    """Note that all that was sent before has been taken up."""
    find_witness().journal.write("end")


def greet(task: Any, name: str, retries: int = 0) -> None:
    """Note a delivery, and do what is to be done once; the first tries fail inside of that."""
    journal, request = find_witness().journal, task.request
    # Links of a chain and bodies of chords are sent by the worker, not by a transaction.
    source = "retry" if request.retries else "worker" if request.parent_id else "transaction"
    journal.write("arrived", name=name, id=request.id, source=source)
    person = Person.everyone.filter(email=name).only("pk").first()
    if person is None:
        return
    with Person.do_once(person.pk, "is_welcome_email_sent") as once:
        if once is None:
            return
        if request.retries < retries:
            raise task.retry()
        journal.write("greeted", name=name)
