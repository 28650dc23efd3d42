"""Locks in ``testing``: kept in memory, and held by someone else."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe import ConfigurationError, LockNotAcquired, cache_lock, find_lock
from django_celery_safe.testing import hold_lock, locks_in_memory
from tests.app.tasks import add
from tests.testing.tasks import import_feed

URL = "https://example.com/feed"


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


def test_the_lock_of_a_task_is_held(locks_in_memory: None) -> None:
    """All places are taken until the block ends, or its lock is released; other calls run."""
    with hold_lock(import_feed, URL) as lock:
        assert import_feed(url=URL, full=True) is None
        assert import_feed("another") == "imported another"
        lock.release()
        assert import_feed(URL) == f"imported {URL}"
    with pytest.raises(ZeroDivisionError), hold_lock(import_feed, URL):
        raise ZeroDivisionError
    assert import_feed(URL) == f"imported {URL}"


def test_a_lock_that_is_held_already(locks_in_memory: None) -> None:
    """It is an error, and leaves the other places as they are."""
    with cache_lock(import_feed.lock_name(URL), limit=2):
        with pytest.raises(LockNotAcquired, match="process"), hold_lock(import_feed, URL):
            pass
        assert import_feed(URL) == f"imported {URL}"


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (lambda: hold_lock(add, 1, 2), r"tests\.app\.tasks\.add has no @single_instance"),
        (lambda: hold_lock(import_feed), "url"),
        (lambda: hold_lock("import_feed", URL), "'import_feed', which is not a task"),
    ],
)
def test_what_has_no_lock(hold: Callable[[], Any], said: str) -> None:
    """A task without a lock, or without this one, is an error that says what to write."""
    with pytest.raises((ConfigurationError, TypeError), match=said), hold():
        pass
