"""Handing over: a task ends at its next checkpoint when its worker shuts down."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import checkpoint, idempotent, resumable, resumed_at
from tests.resuming.loops import fill, loop, write, written
from tests.sending.carrying import Carried

EACH_ONCE = dict.fromkeys(range(1, 11), 1)
ShutDown = Callable[[], object]


@pytest.mark.sql
def test_a_task_is_handed_over_behind_its_chunk(carried: Carried, shut_down: ShutDown) -> None:
    """The row is due at once, counts no death, and the next run does the rest."""
    people = fill(carried.alias, range(1, 11))
    carried.body = loop(people, {2: shut_down}, every=3)
    assert carried.mailbox.deliver(carried.send()).state == "IGNORED"
    row = carried.row
    assert (row.state, row.deaths, row.starts, row.progress) == ("pending", 0, 1, "3/10")
    assert carried.waits <= 0
    (again,) = carried.relay()
    carried.body = loop(people, every=10)
    assert carried.mailbox.deliver(again).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def test_the_last_chunk_is_not_handed_over(carried: Carried, shut_down: ShutDown) -> None:
    """Nothing is left that another worker could do."""
    people = fill(carried.alias, range(1, 11))
    carried.body = loop(people, {9: shut_down}, every=4)
    assert carried.mailbox.deliver(carried.send()) == ("SUCCESS", "done")


def swallow(task: Any, people: Any) -> str:
    """Catch whatever ends the loop."""
    try:
        for row in resumable(people, every=3):
            write(row)
    except Exception:
        return "done"
    return "all"


def retry(task: Any, people: Any) -> Any:
    """Retry whatever ends the loop."""
    try:
        for row in resumable(people, every=3):
            write(row)
    except Exception as error:
        raise task.retry(exc=error, countdown=1000) from error


def translate(task: Any, people: Any) -> Any:
    """Raise another error instead of what ends the loop."""
    try:
        for row in resumable(people, every=3):
            write(row)
    except Exception as error:
        raise ValueError("the import failed") from error


@pytest.mark.parametrize("body", [swallow, retry, translate])
def test_what_the_task_makes_of_it_does_not_count(
    carried: Carried, shut_down: ShutDown, body: Callable[..., Any]
) -> None:
    """Otherwise a half of the work would be done, failed or put off."""
    people = fill(carried.alias, range(1, 11))
    shut_down()
    carried.body = lambda task: body(task, people)
    assert carried.mailbox.deliver(carried.send()).state == "IGNORED"
    assert (carried.row.state, carried.row.progress) == ("pending", "3/10")
    assert carried.waits <= 0
    assert not carried.mailbox.take()


@pytest.mark.sql
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_checkpoint_in_a_block_rolls_it_back(
    carried: Carried, shut_down: ShutDown, is_hidden: bool
) -> None:
    """Also if the block does not see the error."""
    people = fill(carried.alias, [1, 2])

    def body(task: Any) -> Any:
        for pk in (1, 2):
            with transaction.atomic(using=carried.alias):
                write(people.get(pk=pk))
                try:
                    checkpoint(pk)
                except Exception:
                    if not is_hidden:
                        raise
            shut_down()

    carried.body = body
    assert carried.mailbox.deliver(carried.send()).state == "IGNORED"
    assert written(carried.alias) == {1: 1, 2: 0}
    (again,) = carried.relay()
    carried.body = lambda task: resumed_at()
    assert carried.mailbox.deliver(again) == ("SUCCESS", 1)


def test_a_checkpoint_outside_of_a_block_is_kept(carried: Carried, shut_down: ShutDown) -> None:
    """It was committed before the task ends."""
    shut_down()
    carried.body = lambda task: checkpoint(7)
    assert carried.mailbox.deliver(carried.send()).state == "IGNORED"
    (again,) = carried.relay()
    carried.body = lambda task: resumed_at()
    assert carried.mailbox.deliver(again) == ("SUCCESS", 7)


def test_what_no_row_brings_back_is_not_handed_over(alias: str, shut_down: ShutDown) -> None:
    """Work under a key alone goes to its end."""
    people = fill(alias, range(1, 11))
    shut_down()
    with idempotent("import", using=alias) as claim:
        assert claim
        for row in resumable(people, every=3):
            write(row)
    assert written(alias) == EACH_ONCE
