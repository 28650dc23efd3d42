"""``checkpoint()`` and ``resumed_at()``, cursors under ``idempotent``, and handing over."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import (
    ConfigurationError,
    TaskPoisoned,
    checkpoint,
    idempotent,
    resumable,
    resumed_at,
)
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.resuming.loops import EACH_ONCE, Stop, fill, loop, run, stop, write, written
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


@pytest.mark.sql
def test_a_killed_task_reads_its_last_checkpoint(carried: Carried) -> None:
    """The writes of a block are committed together with its cursor."""
    leave_dead(carried, carried.send(), after=read_lines(carried.alias, until=6))
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

    leave_dead(carried, carried.send(), after=body)
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


def test_a_block_that_handles_a_wrong_cursor_goes_on(carried: Carried) -> None:
    """The error comes before any query, so the block can write and commit."""

    def body(task: Any) -> None:
        with transaction.atomic(using=carried.alias):
            with pytest.raises(ConfigurationError, match="plain data"):
                checkpoint("x" * 5000)
            Person.everyone.using(carried.alias).create(email="written")
            checkpoint(1)

    assert run(carried, body).state == "SUCCESS"
    assert read_emails(carried.alias) == ["written"]


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
def test_the_place_of_a_key_in_a_carried_task_is_the_keys(carried: Carried) -> None:
    """The message forgets the deaths before it, and has no place of its own."""
    walk = loop(fill(carried.alias))

    def body(task: Any) -> Any:
        with idempotent("import", using=carried.alias) as claim:
            return walk() if claim else "done before"

    message = carried.send()
    carried.rows.update(deaths=2)
    leave_dead(carried, message, after=body)
    assert (carried.row.deaths, carried.row.progress) == (0, "")
    assert run(carried, body) == ("SUCCESS", "done before")


@pytest.mark.sql
@pytest.mark.parametrize("key_first", [True, False])
def test_a_task_and_a_key_inside_it_have_a_place_each(key_first: bool, carried: Carried) -> None:
    """Neither goes on at the place of the other, nor does it forget its own."""
    people = fill(carried.alias)
    parts = [people.filter(pk__gt=5), people.filter(pk__lte=5)]

    def body(task: Any) -> None:
        loops = [lambda: walk_under_key(parts[0]), loop(parts[1])]
        for each in loops if key_first else reversed(loops):
            each()

    def walk_under_key(rows: Any) -> None:
        with suppress(Stop), idempotent("half", using=carried.alias) as claim:
            if claim:
                loop(rows, {4: stop} if deaths else None)()

    deaths = [1]
    leave_dead(carried, carried.send(), after=body)
    deaths.clear()
    assert run(carried, body).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def test_deaths_at_one_place_are_deaths_without_progress(carried: Carried) -> None:
    """A checkpoint at the place where the run began lets no task kill its processes for ever."""
    carried.body = lambda task: checkpoint(resumed_at() or 0)
    message = carried.send()
    for _ in range(3):
        leave_dead(carried, message, after=carried.body)
        (message,) = carried.relay()
    assert type(run(carried, carried.body, message).value) is TaskPoisoned


# Handing over: a task ends at its next checkpoint when its worker shuts down.


ShutDown = Callable[[], object]


@pytest.mark.sql
def test_a_task_is_handed_over_behind_its_chunk(carried: Carried, shut_down: ShutDown) -> None:
    """The row is due at once, counts no death, and the next run does the rest."""
    people = fill(carried.alias)
    assert run(carried, loop(people, {2: shut_down})).state == "IGNORED"
    row = carried.row
    assert (row.state, row.deaths, row.starts, row.progress) == ("pending", 0, 1, "3/10")
    assert carried.waits <= 0
    assert run(carried, loop(people, every=10)).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def test_the_last_chunk_is_not_handed_over(carried: Carried, shut_down: ShutDown) -> None:
    """Its task ends as usual, because no items are left for another worker."""
    assert run(carried, loop(fill(carried.alias), {10: shut_down})) == ("SUCCESS", "done")


@pytest.mark.parametrize("way", ["swallow", "retry", "translate"])
def test_what_the_task_makes_of_it_does_not_count(
    carried: Carried, shut_down: ShutDown, way: str
) -> None:
    """Otherwise a half of the work would be done, failed or put off."""
    walk = loop(fill(carried.alias), {1: shut_down})

    def body(task: Any) -> None:
        try:
            walk()
        except Exception as error:
            if way == "retry":
                raise task.retry(exc=error, countdown=1000) from error
            if way == "translate":
                raise ValueError("the import failed") from error

    assert run(carried, body).state == "IGNORED"
    assert (carried.row.state, carried.row.progress) == ("pending", "3/10")
    assert carried.waits <= 0
    assert not carried.mailbox.take()


@pytest.mark.sql
@pytest.mark.parametrize("hidden", [(), Exception])
def test_a_checkpoint_in_a_block_rolls_it_back(
    carried: Carried, shut_down: ShutDown, hidden: Any
) -> None:
    """Also if the block does not see the error."""
    people = fill(carried.alias, [1, 2])

    def body(task: Any) -> Any:
        for pk in (1, 2):
            with transaction.atomic(using=carried.alias):
                write(people.get(pk=pk))
                with suppress(hidden):
                    checkpoint(pk)
            shut_down()

    assert run(carried, body).state == "IGNORED"
    assert written(carried.alias) == {1: 1, 2: 0}
    assert run(carried, lambda task: resumed_at()) == ("SUCCESS", 1)


def test_a_checkpoint_outside_of_a_block_is_kept(carried: Carried, shut_down: ShutDown) -> None:
    """It was committed before the task ends."""
    shut_down()
    assert run(carried, lambda task: checkpoint(7)).state == "IGNORED"
    assert run(carried, lambda task: resumed_at()) == ("SUCCESS", 7)


def test_what_no_row_brings_back_is_not_handed_over(alias: str, shut_down: ShutDown) -> None:
    """Work under a key alone goes to its end."""
    with idempotent("import", using=alias) as claim:
        assert claim
        loop(fill(alias), {1: shut_down})()
    assert written(alias) == EACH_ONCE
