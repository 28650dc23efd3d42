"""Handing over: a task ends at its next checkpoint when its worker shuts down."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import checkpoint, idempotent, resumed_at
from tests.resuming.loops import EACH_ONCE, fill, loop, run, write, written
from tests.sending.carrying import Carried

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


def swallow(task: Any, walk: Callable[[], Any]) -> Any:
    """Catch whatever ends the loop."""
    with suppress(Exception):
        walk()


def retry(task: Any, walk: Callable[[], Any]) -> Any:
    """Retry whatever ends the loop."""
    try:
        walk()
    except Exception as error:
        raise task.retry(exc=error, countdown=1000) from error


def translate(task: Any, walk: Callable[[], Any]) -> Any:
    """Raise another error instead of what ends the loop."""
    try:
        walk()
    except Exception as error:
        raise ValueError("the import failed") from error


@pytest.mark.parametrize("body", [swallow, retry, translate])
def test_what_the_task_makes_of_it_does_not_count(
    carried: Carried, shut_down: ShutDown, body: Callable[..., Any]
) -> None:
    """Otherwise a half of the work would be done, failed or put off."""
    walk = loop(fill(carried.alias), {1: shut_down})
    assert run(carried, lambda task: body(task, walk)).state == "IGNORED"
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
