"""Locks in ``testing``: kept in memory, and held by someone else."""

import uuid
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
    release_lock,
    single_instance,
)
from django_celery_safe.testing import hold_lock, lock_name, locks_in_memory
from tests.app.tasks import add
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeRedisCache
from tests.contract.conftest import SHARED_STORES, use_store
from tests.processes import wait_for
from tests.testing.tasks import effects, import_feed

__all__ = ["mailbox", "use_store"]

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


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("store", [*SHARED_STORES, "local"])
def test_a_held_lock_is_someone_elses(store: str, request: pytest.FixtureRequest) -> None:
    """On every store a lock that is held by its name keeps others out until the block ends."""
    if store != "local":
        request.getfixturevalue("use_store")(store)
    name = uuid.uuid4().hex
    with hold_lock(name) as held:
        assert held.held
        assert not cache_lock(name).acquire()
    with cache_lock(name) as lock:
        assert lock


def test_it_is_free_after_an_error(locks_in_memory: None) -> None:
    """The lock is freed however the block ends, and once more is no error."""
    with pytest.raises(ZeroDivisionError), hold_lock("feed"):
        raise ZeroDivisionError
    with hold_lock("feed") as held:
        held.release()
        assert cache_lock("feed").acquire()


def test_what_an_operator_frees_is_free(locks_in_memory: None) -> None:
    """Tested code may free the lock: the end of the block leaves the next one alone."""
    with hold_lock("feed"):
        assert release_lock(found("feed"))
        assert cache_lock("feed").acquire()
    assert find_lock("feed") is not None


def test_two_cant_hold_it(locks_in_memory: None) -> None:
    """The error for a lock that is held already names its holder."""
    with (
        hold_lock("feed"),
        pytest.raises(LockNotAcquired, match=r"feed.*process"),
        hold_lock("feed"),
    ):
        pass
    assert find_lock("feed") is None


def test_it_is_renewed(locks_in_memory: None, settings: Settings) -> None:
    """A block that is longer than a lease holds its lock all the while."""
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "LOCK_TIMEOUT": 3}
    with hold_lock("feed") as held:
        fence, began = held.fence, found("feed").remaining
        assert began is not None
        wait_for(lambda: (found("feed").remaining or 0) > 2.5, 30)
        wait_for(lambda: (found("feed").remaining or 0) < 2.5, 30)
        wait_for(lambda: (found("feed").remaining or 0) > 2.5, 30)
        assert found("feed").fence == fence


def test_a_lock_in_a_cache_of_its_own(
    redis_cache_settings: MakeRedisCache, settings: Settings
) -> None:
    """A lock with a ``cache`` is held there, and nowhere else."""
    settings.CACHES = {**settings.CACHES, **redis_cache_settings("django", "locks")}
    with hold_lock("feed", cache="locks"):
        assert not cache_lock("feed", cache="locks").acquire()
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


def test_all_places_of_a_lock_are_held(locks_in_memory: None) -> None:
    """A lock with a limit keeps others out as one of one does, until a place is released."""
    with hold_lock("few", limit=3, task_id="id-1") as held:
        assert not cache_lock("few", limit=3).acquire()
        assert cache_lock("few", limit=4).acquire()
        assert held.release()
        assert cache_lock("few", limit=3).acquire()
        with pytest.raises(LockNotAcquired), hold_lock("few", limit=5):
            pass
        assert find_lock("few:place:5") is None


def test_a_task_with_a_limit_meets_a_conflict(mailbox: Mailbox, locks_in_memory: None) -> None:
    """All places of a task's lock are held, the first for the task id that is given."""

    @single_instance(limit=3, on_conflict="raise")
    def work(number: int) -> int:
        return number

    task = mailbox.task(work, name="tests.few")
    name = lock_name(task, 7)
    with hold_lock(task, 7, task_id="id-1") as held:
        with pytest.raises(AlreadyRunning):
            task(7)
        holders = [found(name).holder, found(f"{name}:place:2").holder]
        assert [holder.task for holder in holders] == [task.name] * 2
        assert holders[0].task_id == "id-1" != holders[1].task_id
        assert held.release()
        assert task(7) == 7
    assert task(7) == 7


def test_the_lock_of_a_task_in_a_cache_of_its_own(
    mailbox: Mailbox, redis_cache_settings: MakeRedisCache, settings: Settings
) -> None:
    """A task's lock is held in the cache that its decorator names."""
    settings.CACHES = {**settings.CACHES, **redis_cache_settings("django", "locks")}

    @single_instance(cache="locks", on_conflict="raise")
    def work(number: int) -> int:
        return number

    task = mailbox.task(work, name="tests.work")
    with hold_lock(task, 7):
        assert find_lock(lock_name(task, 7), cache="locks") is not None
        with pytest.raises(AlreadyRunning):
            task(7)
    assert task(7) == 7


@pytest.mark.parametrize("typed", [False, True])
def test_a_worker_meets_it(typed: bool, mailbox: Mailbox, locks_in_memory: None) -> None:
    """A message meets the very lock; the one with the holder's task id comes back."""

    @single_instance(on_conflict="raise")
    def work(number: Any) -> Any:
        return number

    task = mailbox.task(work, name="tests.work")
    argument: Any = (1, "x") if typed else 7
    task.apply_async((argument,), task_id="mine")
    message = mailbox.take_one()
    with hold_lock(task, argument):
        assert mailbox.deliver(message).state == "FAILURE"
    with hold_lock(task, argument, task_id="mine"):
        assert mailbox.deliver(message).state == "IGNORED"
    assert mailbox.take_one().id == "mine"


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
