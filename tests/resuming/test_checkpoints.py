"""``checkpoint()`` and ``resumed_at()``, and cursors under ``idempotent`` and in steps."""

from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import Reject
from django.db import transaction

from django_celery_safe import (
    ConfigurationError,
    checkpoint,
    idempotent,
    resumable,
    resumed_at,
)
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.resuming.loops import die_after, fill, loop, write, written
from tests.sending.carrying import Carried, leave_dead

LINES = [f"line {number}" for number in range(10)]


def read_lines(alias: str, until: int = 10) -> Callable[[Any], Any]:
    """Return a body that writes a row for each line, two in a transaction."""

    def body(task: Any) -> Any:
        begun_at = resumed_at()
        for place in range(begun_at or 0, until, 2):
            with transaction.atomic(using=alias):
                for line in LINES[place : place + 2]:
                    Person.everyone.using(alias).create(email=line)
                checkpoint(place + 2)
        return begun_at

    return body


def read_emails(alias: str) -> list[str]:
    """Return the lines that were written, in order."""
    return [*Person.everyone.using(alias).order_by("pk").values_list("email", flat=True)]


@pytest.mark.sql
def test_a_killed_task_reads_its_last_checkpoint(carried: Carried) -> None:
    """What a block wrote and its cursor are committed together."""
    message = carried.send()
    carried.body = read_lines(carried.alias, until=6)
    leave_dead(carried, message, after_body=True)
    (again,) = carried.relay()
    carried.body = read_lines(carried.alias)
    assert carried.mailbox.deliver(again) == ("SUCCESS", 6)
    assert read_emails(carried.alias) == LINES


@pytest.mark.sql
def test_a_block_that_is_rolled_back_takes_its_cursor_along(carried: Carried) -> None:
    """The next run does it again."""

    def body(task: Any) -> Any:
        checkpoint(["a", 1])
        with pytest.raises(ValueError, match="no"), transaction.atomic(using=carried.alias):
            checkpoint(["b", 2])
            raise ValueError("no")

    carried.body = body
    leave_dead(carried, carried.send(), after_body=True)
    (again,) = carried.relay()
    carried.body = lambda task: resumed_at()
    assert carried.mailbox.deliver(again) == ("SUCCESS", ["a", 1])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda task: checkpoint(object()), "plain data"),
        (lambda task: checkpoint("x" * 5000), "plain data"),
        (lambda task: [checkpoint(one) for one in resumable(range(3))], "second"),
        (lambda task: (checkpoint(1), list(resumable(range(3)))), "second"),
    ],
)
def test_a_wrong_checkpoint_fails_the_task(carried: Carried, body: Any, said: str) -> None:
    """With a text that says what to do."""
    carried.body = body
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert said in str(error)


def test_a_direct_call_has_no_checkpoint(carried: Carried) -> None:
    """Each call does all of it."""
    carried.body = read_lines(carried.alias)
    assert carried.task() is None
    assert carried.task() is None
    assert read_emails(carried.alias) == LINES + LINES


# Under idempotent.


@pytest.mark.sql
def test_the_next_caller_of_a_key_goes_on(alias: str) -> None:
    """After a failure; a later call, when the work was done, begins anew."""
    people = fill(alias, range(1, 11))

    def work(*, until: int = 0) -> bool:
        with idempotent("import", using=alias, ttl=0.001) as claim:
            for row in resumable(people, every=3) if claim else ():
                write(row)
                if row.pk == until:
                    raise Reject("no")
            return bool(claim)

    with pytest.raises(Reject):
        work(until=5)
    assert sum(written(alias).values()) == 3
    assert work()
    assert written(alias) == dict.fromkeys(range(1, 11), 1)
    IdempotencyRecord.objects.using(alias).update(expires_at="2000-01-01T00:00Z")
    assert work()
    assert written(alias) == dict.fromkeys(range(1, 11), 2)


@pytest.mark.sql
def test_other_arguments_of_a_key_begin_anew(alias: str) -> None:
    """The place in one feed is none in another."""
    people = fill(alias, range(1, 11))

    @idempotent(key=lambda feed, until: "import", using=alias)
    def work(feed: int, until: int = 0) -> None:
        for row in resumable(people.filter(pk__gt=0), every=3):
            write(row)
            if row.pk == until:
                raise Reject("no")

    with pytest.raises(Reject):
        work(1, 5)
    work(2, 0)
    assert written(alias) == {pk: 1 + (pk < 4) for pk in range(1, 11)}


@pytest.mark.sql
def test_a_carried_task_that_is_idempotent_has_one_place(carried: Carried) -> None:
    """The key keeps it, and the message shows it and forgets the deaths before it."""
    people, message = fill(carried.alias, range(1, 11)), carried.send()
    carried.rows.update(deaths=2)
    die_after(carried, message, 5, people, every=3)
    (again,) = carried.relay()

    def body(task: Any) -> Any:
        with idempotent("import", using=carried.alias) as claim:
            return [row.pk for row in resumable(people, every=3)] if claim else None

    carried.rows.update(cursor="")
    carried.body = body
    leave_dead(carried, again, after_body=True)
    assert carried.row.deaths == 0
    assert carried.row.progress == "10/10"
    (again,) = carried.relay()
    assert carried.mailbox.deliver(again) == ("SUCCESS", None)


def test_two_loops_need_two_claims(carried: Carried) -> None:
    """A key of its own lets a task have a second loop."""
    people = fill(carried.alias, range(1, 4))

    def body(task: Any) -> None:
        for number in (1, 2):
            with idempotent(f"part {number}", using=carried.alias) as claim:
                loop(people)(task) if claim else None

    carried.body = body
    assert carried.mailbox.deliver(carried.send()).state == "SUCCESS"
    assert written(carried.alias) == {1: 2, 2: 2, 3: 2}
