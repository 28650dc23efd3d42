"""Tasks with ``unique_until`` that run eagerly: the same sends are duplicates as with a worker."""

from typing import Any

import pytest
from django.db import transaction

from django_celery_safe import AlreadySent, SafeTask, iter_locks, single_instance
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox

__all__ = ["mailbox"]

pytestmark = pytest.mark.usefixtures("locks_in_memory")


def make(mailbox: Mailbox, runs: list[int], **options: Any) -> Any:
    """Return a task that sends itself once more while it runs."""
    mailbox.app.conf.task_always_eager = True

    def work(x: int, sends: bool = False) -> bool | None:
        runs.append(x)
        return task.delay(x).is_duplicate if sends else None

    alone = single_instance(key="{x}", on_conflict="skip", **options)
    task = mailbox.task(alone(work), base=SafeTask, name="tests.eager")
    return task


def test_a_duplicate_is_an_error_for_eager_tasks(mailbox: Mailbox) -> None:
    """With on_duplicate="raise"."""
    task = make(mailbox, [], unique_until=600, on_duplicate="raise")
    task.delay(5)
    with pytest.raises(AlreadySent):
        task.delay(5)


@pytest.mark.parametrize(("until", "is_duplicate"), [("end", True), ("start", False)])
def test_an_eager_send_counts_until_its_run_starts_or_ends(
    until: Any, is_duplicate: bool, mailbox: Mailbox
) -> None:
    """A send from its own run is a duplicate, or not; afterwards it is sent again."""
    task = make(mailbox, [], unique_until=until)
    for _ in range(2):
        result = task.delay(5, sends=True)
        assert (result.is_duplicate, result.get()) == (False, is_duplicate)
        assert list(iter_locks()) == []


@pytest.mark.django_db(transaction=True)
def test_the_commit_finds_out_what_is_a_duplicate(mailbox: Mailbox) -> None:
    """A send that waits for it takes no lock before; a period holds for eager tasks, too."""
    runs: list[int] = []
    task = make(mailbox, runs, unique_until=600)
    with transaction.atomic():
        first, again, other = (task.delay_on_commit(x) for x in (5, 5, 6))
        assert [first.is_duplicate, again.is_duplicate, runs] == [None, None, []]
        assert list(iter_locks()) == []
    assert [one.is_duplicate for one in (first, again, other)] == [False, True, False]
    assert (again.id, runs) == (first.id, [5, 6])
    assert task.delay(5).is_duplicate
