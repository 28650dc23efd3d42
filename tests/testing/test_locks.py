"""Locks in ``testing``: kept in memory, and held by someone else."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from pytest_django import Settings

from django_celery_safe import (
    AlreadyRunning,
    ConfigurationError,
    HeldLock,
    LockNotAcquired,
    cache_lock,
    find_lock,
    single_instance,
)
from django_celery_safe.testing import hold_lock, lock_name, locks_in_memory
from tests.app.tasks import add
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeRedisCache
from tests.testing.tasks import effects, import_feed

__all__ = ["mailbox"]

URL = "https://example.com/feed"


def found(name: str) -> HeldLock:
    """Return who holds a lock."""
    lock = find_lock(name)
    assert lock is not None
    return lock


def test_locks_are_in_memory_and_cleared(settings: Settings) -> None:
    """Locks live in memory, whatever the settings say, and none is left for the next test."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "default", "LOCK_TIMEOUT": 5}
    with locks_in_memory():
        lock = cache_lock("kept")
        assert lock.acquire()
        assert 4 < lock.remaining <= 5
        with locks_in_memory():
            assert find_lock("kept") is None
            assert cache_lock("kept").acquire()
        assert find_lock("kept") is None
    assert settings.DJANGO_CELERY_SAFE["LOCK_DATABASE"] == "default"


def test_a_held_lock_is_someone_elses(locks_in_memory: None) -> None:
    """It keeps others out until the block ends, however that ends, or until its release."""
    with hold_lock("feed") as held:
        assert held.held
        assert not cache_lock("feed").acquire()
        with pytest.raises(LockNotAcquired, match=r"feed.*process"), hold_lock("feed"):
            pass
    with pytest.raises(ZeroDivisionError), hold_lock("feed"):
        raise ZeroDivisionError
    with hold_lock("feed") as held:
        held.release()
        assert cache_lock("feed").acquire()


def test_the_lock_of_a_task_needs_no_name(locks_in_memory: None) -> None:
    """The lock of a task's call is named by task and arguments, however they are written."""
    name = lock_name(import_feed, URL)
    assert name == lock_name(import_feed, url=URL, full=True)
    assert name != lock_name(import_feed, "another")
    with hold_lock(import_feed, URL):
        assert found(name).holder.task == import_feed.name
        assert import_feed(URL) is None
        assert import_feed("another") == "imported"
    assert import_feed(URL) == "imported"
    assert effects == ["another", URL]


def test_a_worker_meets_it(mailbox: Mailbox, locks_in_memory: None) -> None:
    """A message meets the very lock; the one with the holder's task id comes back."""

    @single_instance(on_conflict="raise")
    def work(number: Any) -> Any:
        return number

    task = mailbox.task(work, name="tests.work")
    task.apply_async(((1, "x"),), task_id="mine")
    message = mailbox.take_one()
    with hold_lock(task, (1, "x")):
        assert mailbox.deliver(message).state == "FAILURE"
    with hold_lock(task, (1, "x"), task_id="mine"):
        assert mailbox.deliver(message).state == "IGNORED"
    assert mailbox.take_one().id == "mine"


def test_the_lock_of_a_task_in_a_cache_of_its_own(
    mailbox: Mailbox, redis_cache_settings: MakeRedisCache, settings: Settings
) -> None:
    """A lock is held in the cache that the task's decorator, or the call, names."""
    settings.CACHES = {**settings.CACHES, **redis_cache_settings("django", "locks")}

    @single_instance(cache="locks", on_conflict="raise")
    def work(number: int) -> int:
        return number

    task = mailbox.task(work, name="tests.work")
    with hold_lock(task, 7), pytest.raises(AlreadyRunning):
        task(7)
    with hold_lock(lock_name(task, 7), cache="locks"), pytest.raises(AlreadyRunning):
        task(7)
    with hold_lock(lock_name(task, 7)):
        assert task(7) == 7


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (lambda: hold_lock(add, 1, 2), r"tests\.app\.tasks\.add has no @single_instance"),
        (lambda: hold_lock(import_feed), "url"),
        (lambda: hold_lock("import_feed", URL), r"got \('https.*pass the task itself"),
        (lambda: hold_lock(""), "not a valid name for a lock"),
    ],
)
def test_what_is_no_lock(hold: Callable[[], Any], said: str, unreachable: Celery) -> None:
    """A task without a lock, or without this one, is an error that says what to write."""
    with pytest.raises((ConfigurationError, TypeError), match=said), hold():
        pass
