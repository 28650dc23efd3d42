"""``checkpoint()`` and ``resumed_at()``, and cursors under ``idempotent``."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import ConfigurationError, checkpoint, idempotent, resumable, resumed_at
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.resuming.loops import EACH_ONCE, Stop, fill, loop, run, stop, written
from tests.sending.carrying import Carried, leave_dead

LINES = [f"line {number}" for number in range(10)]


def read_lines(alias: str, until: int = 10) -> Callable[..., Any]:
    """Return a body that writes a row for each line, two in a transaction."""

    def body(task: Any = None) -> Any:
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


def die_in(carried: Carried, body: Callable[..., Any]) -> None:
    """Let a process die at the end of a body."""
    carried.body = body
    leave_dead(carried, carried.send(), after_body=True)


@pytest.mark.sql
def test_a_killed_task_reads_its_last_checkpoint(carried: Carried) -> None:
    """What a block wrote and its cursor are committed together."""
    die_in(carried, read_lines(carried.alias, until=6))
    assert run(carried, read_lines(carried.alias)) == ("SUCCESS", 6)
    assert read_emails(carried.alias) == LINES


@pytest.mark.sql
def test_a_block_that_is_rolled_back_takes_its_cursor_along(carried: Carried) -> None:
    """The next run does it again."""

    def body(task: Any) -> Any:
        checkpoint(["a", 1])
        with pytest.raises(Stop), transaction.atomic(using=carried.alias):
            checkpoint(["b", 2])
            stop()

    die_in(carried, body)
    assert run(carried, lambda task: resumed_at()) == ("SUCCESS", ["a", 1])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda task: checkpoint(object()), "plain data"),
        (lambda task: checkpoint("x" * 5000), "plain data"),
        (lambda task: [checkpoint(one) for one in resumable(range(3))], "second"),
    ],
)
def test_a_wrong_checkpoint_fails_the_task(carried: Carried, body: Any, said: str) -> None:
    """With a text that says what to do."""
    state, error = run(carried, body)
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert said in str(error)


def test_a_direct_call_has_no_checkpoint(carried: Carried) -> None:
    """Each call does all of it."""
    carried.body = read_lines(carried.alias)
    assert (carried.task(), carried.task()) == (None, None)
    assert read_emails(carried.alias) == LINES + LINES


# Under idempotent.


@pytest.mark.sql
def test_the_next_caller_of_a_key_goes_on(alias: str) -> None:
    """After a failure; a later call, when the work was done, begins anew."""

    def work(at: Any = None) -> None:
        with idempotent("import", using=alias) as claim:
            assert claim
            loop(people, at)()

    people = fill(alias)
    with pytest.raises(Stop):
        work({5: stop})
    work()
    assert written(alias) == EACH_ONCE
    IdempotencyRecord.objects.using(alias).update(expires_at="2000-01-01T00:00Z")
    work()
    assert written(alias) == dict.fromkeys(EACH_ONCE, 2)


@pytest.mark.sql
def test_other_arguments_of_a_key_begin_anew(alias: str) -> None:
    """The place in one feed is none in another."""
    people = fill(alias)

    @idempotent(key=lambda feed: "import", using=alias)
    def work(feed: int) -> None:
        loop(people, {5: stop} if feed == 1 else None)()

    with pytest.raises(Stop):
        work(1)
    work(2)
    assert written(alias) == {pk: 1 + (pk < 4) for pk in EACH_ONCE}


@pytest.mark.sql
def test_a_carried_task_that_is_idempotent_has_one_place(carried: Carried) -> None:
    """The key keeps it, and the message shows it and forgets the deaths before it."""
    walk = loop(fill(carried.alias))

    def body(task: Any) -> Any:
        with idempotent("import", using=carried.alias) as claim:
            return walk() if claim else "done before"

    message = carried.send()
    carried.rows.update(deaths=2)
    carried.body = body
    leave_dead(carried, message, after_body=True)
    assert (carried.row.deaths, carried.row.progress) == (0, "10/10")
    assert run(carried, body) == ("SUCCESS", "done before")
