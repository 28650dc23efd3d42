"""Carried tasks that write to each row once, and die on the way."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from django_celery_safe import resumable
from tests.app.models import Person
from tests.concurrency.mailbox import Message
from tests.sending.carrying import Carried, leave_dead


def fill(alias: str, keys: Iterable[int]) -> Any:
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
    items: Any, at: dict[int, Callable[[], object]] | None = None, do: Any = write, **options: Any
) -> Callable[..., Any]:
    """Return a body that walks items, and calls something when it has so many in this run."""

    def body(task: Any, *args: Any) -> str:
        for number, item in enumerate(resumable(items, **options), start=1):
            do(item)
            if number in (at or {}):
                assert at is not None
                at[number]()
        return "done"

    return body


class Stop(Exception):
    """Ends a loop in the middle of a chunk."""


def die_after(carried: Carried, message: Message, count: int, items: Any, **options: Any) -> None:
    """Run a message in a process that dies when its loop has had so many items."""

    def stop() -> None:
        raise Stop

    whole = loop(items, {count: stop}, **options)

    def body(task: Any, *args: Any) -> None:
        with suppress(Stop):
            whole(task)

    carried.body = body
    leave_dead(carried, message, after_body=True)
