"""Carried tasks whose messages are delivered by hand, in this process, by real tracers."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery.app.task import Context
from celery.signals import task_revoked
from django.db import OperationalError, connections
from django.db.models import F

from django_celery_safe import SafeTask
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.background import settle
from tests.concurrency.mailbox import Mailbox, Message, Outcome

Body = Callable[..., Any]


class Carried:
    """
    A carried task in a mailbox, whose body each test gives; its messages are delivered by hand.

    Args:
        alias: Where the rows are.
        options: Options of the task.
    """

    def __init__(self, mailbox: Mailbox, alias: str, **options: Any) -> None:
        self.mailbox, self.alias = mailbox, alias
        self.calls: list[Any] = []
        self.body: Body = lambda task, *args: args[0] if args else None
        self.task = self.make_task("tests.carried", **options)

    def make_task(self, name: str, decorate: Any = None, **options: Any) -> Any:
        """Make a task that does what ``body`` does, with a base that carries it."""

        def work(task: Any, *args: Any) -> Any:
            self.calls.append(args[0] if args else None)
            return self.body(task, *args)

        function = work if decorate is None else decorate(work)
        options = {"base": SafeTask, "outbox": "until_done", **options}
        return self.mailbox.task(function, name=name, bind=True, **options)

    def send(self, *args: Any, task: Any = None, **options: Any) -> Message:
        """Send the task; return its message, which left at once."""
        (task or self.task).apply_async_on_commit(args, using=self.alias, **options)
        return self.mailbox.take_one()

    def run(self, body: Body, *args: Any, **options: Any) -> Outcome:
        """Send the task, which does this from now on, and run it."""
        self.body = body
        return self.mailbox.deliver(self.send(*args, **options))

    def relay(self) -> list[Message]:
        """Send what is due, as a relay does; return it."""
        relay = Relay(self.alias)
        while relay.relay_batch():
            pass
        return self.mailbox.take()

    def run_again(self) -> Outcome:
        """Run the only message that a relay has to send."""
        (message,) = self.relay()
        return self.mailbox.deliver(message)

    def deliver_elsewhere(self, message: Message) -> Outcome:
        """Run a message as another process does, while this one is inside a task."""
        return self.mailbox.deliver_elsewhere(message)

    def make_due(self) -> None:
        """Let the time come at which a relay looks at the rows: leases expire, too."""
        self.rows.filter(due_at__isnull=False).update(due_at=Now() - timedelta(seconds=1))

    @property
    def rows(self) -> Any:
        """The outbox."""
        return OutboxMessage.objects.using(self.alias)

    @property
    def row(self) -> Any:
        """The only row of the outbox."""
        return self.rows.get()

    @property
    def waits(self) -> float:
        """In how many seconds a relay looks at the only row."""
        row = self.rows.annotate(left=F("due_at") - Now()).get()
        return float(row.left.total_seconds())


def leave_dead(carried: Carried, message: Message, after: Body | None = None) -> None:
    """
    Begin the task of a message as a process that dies in it, and whose lease is over.

    Args:
        after: What the task does from now on; the process dies when that is done, before it is
            recorded.
    """

    class Death(BaseException):
        """The end of a process, after which nothing of it is done."""

    def die(task: Any, *args: Any) -> None:
        if after is not None:
            after(task, *args)
        row = carried.row
        before.update({name: getattr(row, name) for name in ("token", "holder")})
        raise Death

    before: dict[str, Any] = {}
    body, carried.body = carried.body, die
    with pytest.raises(Death):
        carried.mailbox.deliver(message)
    carried.body = after or body
    carried.rows.update(state="running", error="", **before)
    carried.make_due()


def revoke(task: Any, message: Message, **facts: bool) -> None:
    """Say what a worker's main process says of a message that is terminated, expired or revoked."""
    facts = {"terminated": False, "expired": False, **facts}
    request = Context(message.headers, headers=message.headers)
    task_revoked.send(task, request=request, signum=None, **facts)
    settle()


def lose_commit(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the answer to the next COMMIT of this thread."""
    connection: Any = connections[alias]
    commit = connection._commit

    def lose_answer() -> None:
        commit()
        monkeypatch.undo()
        raise OperationalError("the answer got lost")

    monkeypatch.setattr(connection, "_commit", lose_answer)
