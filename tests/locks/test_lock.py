"""CacheLock on its own: its texts, errors and warnings."""

import math
import os
import time
from datetime import timedelta
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe import ConfigurationError, LockNotAcquired, cache_lock
from django_celery_safe.leases.lease import boottime
from tests.clock import HeldClock

pytestmark = pytest.mark.usefixtures("locks_in_memory")


def test_a_block_has_the_lock_or_not() -> None:
    """
    A lock is truthy inside its block when acquired, and falsy when someone else holds it.

    A block that ran without the lock and did not ask gets a RuntimeWarning; others do not.
    """
    with cache_lock("unasked") as lock:
        assert lock
        with (
            pytest.warns(RuntimeWarning, match=r"ran without the lock 'unasked'.*if lock:"),
            cache_lock("unasked"),
        ):
            pass
        with cache_lock("unasked") as asked:
            assert not asked
        with cache_lock("unasked") as asked:
            assert not asked.held
        with cache_lock("unasked") as asked:
            assert asked.contender is not None
        with pytest.raises(ZeroDivisionError), cache_lock("unasked"):
            raise ZeroDivisionError
        assert lock.held
    assert not lock


def test_ensure_needs_the_lock() -> None:
    """ensure() on a lock that was never acquired raises LockNotAcquired, naming the holder."""
    wanted = pytest.raises(LockNotAcquired, match=f"process {os.getpid()}")
    with cache_lock("wanted"), cache_lock("wanted") as lock, wanted:
        lock.ensure()


def test_what_is_no_lease_is_refused() -> None:
    """A timeout of None, zero, negative, infinite or no number is refused with what to do."""
    nothing: list[Any] = [None, 0, -1, 0.0001, "30", True, math.nan, math.inf, timedelta(0), []]
    for timeout in nothing:
        with pytest.raises(ConfigurationError, match="timeout="):
            cache_lock("lease", timeout=timeout)


def test_what_is_no_time_to_wait_is_refused() -> None:
    """A blocking_timeout that is negative, infinite or no number is refused, with what to do."""
    nothing: list[Any] = [-1, "1", math.nan, math.inf, False]
    for waiting in nothing:
        with pytest.raises(ConfigurationError, match=r"blocking_timeout=.* None to wait for ever"):
            cache_lock("wait", blocking_timeout=waiting)
        with pytest.raises(ConfigurationError, match="blocking_timeout="):
            cache_lock("wait").acquire(waiting)


def test_what_is_no_name_is_refused() -> None:
    """A lock needs a name that is a non-empty str."""
    nothing: list[Any] = ["", None, 42, b"bytes"]
    for name in nothing:
        with pytest.raises(ConfigurationError, match="is not a valid name of a lock"):
            cache_lock(name)


def test_the_lease_is_the_settings(settings: Settings) -> None:
    """Without a timeout the lease is LOCK_TIMEOUT, read when the lock is acquired."""
    lock = cache_lock("settings")
    settings.DJANGO_CELERY_SAFE = {
        **settings.DJANGO_CELERY_SAFE,
        "LOCK_TIMEOUT": timedelta(seconds=7),
    }
    with lock:
        assert 6 < lock.remaining <= 7.001


def test_a_lock_is_not_held_after_its_machine_was_suspended(clock: HeldClock) -> None:
    """A lease is over by a clock that counts on meanwhile, where the system has one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert boottime.args == (time.CLOCK_BOOTTIME,)  # type: ignore[attr-defined]
    with cache_lock("suspended", timeout=60) as lock:
        clock.jump(3600)
        assert (lock.held, lock.remaining) == (False, 0.0)
