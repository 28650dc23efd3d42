"""A lock that ends before the transaction around it commits is told, with its place."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from django.db import transaction
from django.test import TestCase

from django_celery_safe import cache_lock, single_instance
from django_celery_safe.locks import misuse

pytestmark = [pytest.mark.usefixtures("locks_in_memory"), pytest.mark.django_db(transaction=True)]

app = Celery(set_as_current=False)


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Return the warnings of a process in which no place was named before."""
    monkeypatch.setattr(misuse, "_warned", set())

    def warned() -> list[str]:
        said = [record for record in caplog.records if "inside atomic()" in record.getMessage()]
        assert all(record.levelno == logging.WARNING for record in said)
        return [record.getMessage() for record in said]

    return warned


def in_a_block() -> None:
    """Take the lock inside the transaction."""
    with transaction.atomic(), cache_lock("balance") as lock:
        assert lock


@transaction.atomic
@cache_lock("balance")
def in_a_function() -> None:
    """Begin the transaction outside of the lock."""


@app.task(shared=False)
@transaction.atomic
@single_instance
def in_a_task() -> None:
    """Begin the transaction outside of the lock."""


def outside() -> None:
    """Commit before the lock ends."""
    with cache_lock("balance") as lock, transaction.atomic():
        assert lock


@pytest.mark.parametrize(
    ("work", "name"),
    [(in_a_block, "balance"), (in_a_function, "balance"), (in_a_task, "in_a_task:")],
    ids=["block", "function", "task"],
)
def test_a_lock_released_before_the_commit_is_told_once_with_its_place(
    work: Callable[[], Any], name: str, warned: Callable[[], list[str]]
) -> None:
    """One line for each place in the code, which says which one is to be outside."""
    function = getattr(work, "run", work)
    for _ in range(2):
        work()
    (said,) = warned()
    assert name in said
    assert f"{__file__}:" in said
    assert f" in {function.__name__}: it was free before the commit" in said
    assert "`with cache_lock(...) as lock:` around `with transaction.atomic():`" in said
    assert "@transaction.atomic below @single_instance" in said


def test_a_lock_around_the_transaction_is_right(warned: Callable[[], list[str]]) -> None:
    """No warning follows, nor in a TestCase, whose transaction is not the project's."""
    outside()
    with cache_lock("balance"):
        pass

    class Case(TestCase):
        def test(self) -> None:
            outside()
            with cache_lock("balance"):
                pass

    result: Any = Case("test").run()
    assert result.wasSuccessful(), result.failures + result.errors
    assert warned() == []
