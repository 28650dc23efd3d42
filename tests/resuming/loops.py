"""Carried tasks that write to each row once, and die on the way."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from django_celery_safe import resumable
from tests.app.models import Person
from tests.concurrency.mailbox import Message, Outcome
from tests.sending.carrying import Carried, leave_dead

#: What ``written`` says when each of ten rows was written to once.
EACH_ONCE = dict.fromkeys(range(1, 11), 1)


def fill(alias: str, keys: Iterable[int] = EACH_ONCE) -> Any:
    """Add rows to which nothing was written; return a queryset of all rows."""
    people = Person.everyone.using(alias)
    people.bulk_create([Person(pk=key, email="") for key in keys])
    return people.all()


def write(row: Any) -> None:
    """Write to a row; a second time shows."""
    row.email += "x"
    row.save(update_fields=["email"])


def written(alias: str) -> dict[int, int]:
    """Return how many times each row was written to."""
    rows = Person.everyone.using(alias).order_by("pk").values_list("pk", "email")
    return {pk: len(text) for pk, text in rows}


def loop(
    items: Any,
    at: Mapping[int, Callable[[], object]] | None = None,
    do: Any = write,
    every: int = 3,
) -> Callable[..., Any]:
    """Return a body that walks items, and calls something when it has had so many in this run."""
    calls = at or {}

    def body(task: Any = None, *args: Any) -> str:
        for number, item in enumerate(resumable(items, every=every), start=1):
            do(item)
            calls.get(number, bool)()
        return "done"

    return body


def run(carried: Carried, body: Callable[..., Any], message: Message | None = None) -> Outcome:
    """Run a body for a message; unset: for a new one, or the one that a relay has to send."""
    carried.body = body
    if message is None:
        (message,) = carried.relay() or [carried.send()]
    return carried.mailbox.deliver(message)


class Stop(Exception):
    """Ends a loop in the middle of a chunk."""


def stop() -> None:
    """End a loop."""
    raise Stop


def die_after(carried: Carried, count: int, items: Any, **options: Any) -> None:
    """Run the message in a process that dies when its loop has had so many items."""
    whole = loop(items, {count: stop}, **options)

    def body(task: Any, *args: Any) -> None:
        with suppress(Stop):
            whole(task)

    (message,) = carried.relay() or [carried.send()]
    leave_dead(carried, message, after=body)
