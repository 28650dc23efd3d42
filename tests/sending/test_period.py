"""Tasks sent once per period, ``unique_until=600``, whether or not the first one ends."""

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_celery_safe import (
    ConfigurationError,
    HeldLock,
    SafeTask,
    find_lock,
    release_lock,
    single_instance,
)
from tests.concurrency.mailbox import Mailbox
from tests.locks.renewals import get_lock

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "tests.periodic"
#: A period that no test outlives, s.
PERIOD = 600
#: Seconds that a test may take between a send and a look at its lock.
SLACK = 120


def lock_of() -> HeldLock:
    """Return the lock of the send for the number 1."""
    return get_lock(f"sent:{NAME}:1")


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
    assert PERIOD - SLACK < after.remaining <= before.remaining
    assert not after.holder.renewed
    assert task.delay(1, how).id == first.id
    assert mailbox.take() == []


@pytest.mark.usefixtures("locks_in_memory")
@pytest.mark.parametrize(
    "options", [{"countdown": 5000}, {"expires": datetime.now(UTC) - timedelta(days=1)}]
)
def test_the_period_begins_at_the_send(options: dict[str, Any], mailbox: Mailbox) -> None:
    """Neither the message's eta nor its expiry makes it longer or shorter."""
    once = single_instance(key="{number}", unique_until=timedelta(seconds=PERIOD))
    task = mailbox.task(once(plain), base=SafeTask, name=NAME)
    task.apply_async((1,), **options)
    assert PERIOD - SLACK < lock_of().remaining <= PERIOD
    assert [task.delay(number).is_duplicate for number in (1, 2)] == [True, False]
    assert release_lock(lock_of())
    assert task.delay(1).is_duplicate is False


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
    name: str, seconds: float, use_store: Callable[[str], None]
) -> None:
    """The period is not adjusted: nothing is sent, and there is no lock."""
    use_store(name)
    once = single_instance(unique_until=seconds)(plain)
    with closing(Mailbox()) as mailbox:
        task = mailbox.task(once, base=SafeTask, name=NAME)
        with pytest.raises(ConfigurationError, match="can't be kept in"):
            task.delay(1)
        assert mailbox.take() == []
    assert find_lock(f"sent:{task.lock_name(1)}") is None
