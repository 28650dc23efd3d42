"""Where the tests of the backend play: beside a mailbox, or beside real workers."""

from dataclasses import dataclass
from typing import Any

from django_celery_safe.models import OutboxMessage
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.processes import wait_for

BACKEND = "django_celery_safe.backends.SafeCeleryBackend"
#: Seconds until something must have happened for which a lease of 2 s has to be over.
PATIENCE = 40


def tasks_setting(alias: str, **options: Any) -> dict[str, Any]:
    """Return TASKS with our backend, which has its rows in a database and may use any queue."""
    return {"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"using": alias, **options}}}


class ByHand:
    """Messages of Django's tasks, which a mailbox takes and a real tracer runs, one by one."""

    def __init__(self, mailbox: Mailbox, alias: str) -> None:
        self.mailbox, self.alias = mailbox, alias

    @property
    def rows(self) -> Any:
        """The outbox."""
        return OutboxMessage.objects.using(self.alias)

    def deliver(self) -> Outcome:
        """Run the only message that was sent since the last time."""
        return self.mailbox.deliver(self.take())

    def take(self) -> Message:
        """Return the only message that was sent since the last time."""
        return self.mailbox.take_one()

    def enqueue_and_run(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a task that was enqueued, and delivered once."""
        result = task.enqueue(*args, **kwargs)
        self.deliver()
        result.refresh()
        return result


@dataclass
class Scene:
    """
    Our app with real workers.

    Attributes:
        alias: The database with the outbox.
    """

    alias: str

    def until_finished(self, result: Any) -> Any:
        """Wait until a result is there; return it."""

        def is_finished() -> bool:
            result.refresh()
            return bool(result.is_finished)

        rows = OutboxMessage.objects.using(self.alias)
        wait_for(is_finished, PATIENCE, f"{result.id} is not finished: {rows.values()}")
        return result
