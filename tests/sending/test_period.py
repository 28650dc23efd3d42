"""Tasks sent once per period, ``unique_until=600``, whether or not the first one ends."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import shared_task

from django_celery_safe import (
    ConfigurationError,
    HeldLock,
    SafeTask,
    find_lock,
    release_lock,
    single_instance,
)
from tests.concurrency.holders import remaining
from tests.concurrency.mailbox import Mailbox
from tests.contract.conftest import use_store
from tests.sending.published import Published

__all__ = ["use_store"]

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "tests.periodic"
#: A period that no test outlives, s.
PERIOD = 600
#: Seconds that a test may take between a send and a look at its lock.
SLACK = 120

Sent = Callable[[], list[Published]]


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until=timedelta(seconds=PERIOD))
def hourly(number: int) -> int:
    """Be sent once per period for each number."""
    return number


def lock_of(number: int = 1, name: str = NAME) -> HeldLock:
    """Return the lock of the send for this number."""
    lock = find_lock(f"sent:{name}:{number}")
    assert lock is not None
    return lock


# Duplicates within a period.


@pytest.mark.parametrize("name", ["django-redis", "memcached", "portable", "local"])
def test_a_second_send_within_the_period_is_a_duplicate(
    name: str, sent: Sent, use_store: Callable[[str], None]
) -> None:
    """It gets the result of the first; an operator's release ends the period."""
    use_store(name)
    first, second, other = hourly.delay(1), hourly.delay(1), hourly.delay(2)
    assert [one.is_duplicate for one in (first, second, other)] == [False, True, False]
    assert second.id == first.id
    if name not in {"portable", "memcached"}:  # which can't tell
        assert PERIOD - SLACK < remaining(lock_of(1, hourly.name)) <= PERIOD
    assert release_lock(lock_of(1, hourly.name))
    third = hourly.delay(1)
    assert third.is_duplicate is False
    assert {one.id for one in sent()} == {first.id, other.id, third.id}


@pytest.fixture
def mailbox_anywhere() -> Iterator[Mailbox]:
    """A mailbox whose locks are where the test puts them."""
    with closing(Mailbox()) as mailbox:
        yield mailbox


def plain(number: int) -> str:
    """Do nothing."""
    return "done"


def end(self: Any, number: int, how: str) -> str:
    """End in this way at the first run."""
    if self.request.retries == 0:
        match how:
            case "fail":
                raise KeyError(how)
            case "retry":
                raise self.retry(countdown=0)
    return "done"


ENDS = {"fail": "FAILURE", "retry": "RETRY"}


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize("how", ENDS)
def test_no_end_of_a_run_ends_the_period(how: str, mailbox: Mailbox) -> None:
    """The lock is neither freed, nor moved, nor renewed; the first's own retry passes."""
    decorate = single_instance(key="{number}", unique_until=PERIOD, timeout=5)
    task = mailbox.task(decorate(end), base=SafeTask, bind=True, name=NAME)
    first = task.delay(1, how)
    before = lock_of()
    assert mailbox.deliver(mailbox.take_one()).state == ENDS[how]
    again = mailbox.take()
    assert len(again) == (how == "retry")
    for message in again:
        assert mailbox.deliver(message) == ("SUCCESS", "done")
    after = lock_of()
    assert (after.token, after.holder) == (before.token, before.holder)
    assert PERIOD - SLACK < remaining(after) <= remaining(before)
    assert not after.holder.renewed
    assert task.delay(1, how).id == first.id
    assert mailbox.take() == []


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize(
    "options", [{"countdown": 5000}, {"expires": datetime.now(UTC) - timedelta(days=1)}]
)
def test_the_period_begins_at_the_send(options: dict[str, Any], mailbox: Mailbox) -> None:
    """Neither the message's eta nor its expiry makes it longer or shorter."""
    task = mailbox.task(
        single_instance(key="{number}", unique_until=PERIOD)(plain), base=SafeTask, name=NAME
    )
    task.apply_async((1,), **options)
    assert PERIOD - SLACK < remaining(lock_of()) <= PERIOD
    assert task.delay(1).is_duplicate is True


# What is refused.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"unique_until": 0}, "unique_until=0"),
        ({"unique_until": 10**400}, "unique_until="),  # too large for a float
        ({"unique_until": timedelta(days=400)}, "at most a year"),
        ({"unique_until": "10 min"}, "'10 min'"),
    ],
)
def test_a_period_without_a_meaning_is_refused(options: dict[str, Any], sentence: str) -> None:
    """The error comes at import, and shows the option."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(**options)


@pytest.mark.parametrize(("name", "seconds"), [("memcached", 31 * 24 * 3600), ("portable", 1)])
def test_a_period_that_the_store_cant_keep_is_refused_at_the_send(
    name: str, seconds: float, mailbox_anywhere: Mailbox, use_store: Callable[[str], None]
) -> None:
    """The period is not adjusted: nothing is sent, and there is no lock."""
    use_store(name)
    mailbox = mailbox_anywhere
    task = mailbox.task(single_instance(unique_until=seconds)(plain), base=SafeTask, name=NAME)
    with pytest.raises(ConfigurationError, match="can't be kept in"):
        task.delay(1)
    assert mailbox.take() == []
    assert find_lock(f"sent:{task.lock_name(1)}") is None
